"""Reading a tensor of another process of one device, as a change of layout does."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks._gpu_ranks import synchronize
from benchmarks._gpu_rows import Row
from benchmarks._resize_live import first_device
from resihp.elastic.reshard.shared_memory import MemoryAccess, memory_of

_ROUNDS = 10
_WAIT_S = 40.0
_COLUMNS = 1024


def hand_over(device: str, small: bool) -> Iterator[Row]:
    """Map another process's memory, copy it, and read on when that process is dead."""
    rows = 1 << (8 if small else 18)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    owner = context.Process(target=_own, args=(there, device, rows), daemon=True)
    owner.start()
    try:
        if not here.poll(_WAIT_S):
            raise TimeoutError("the other process does not answer")
        whole, half = here.recv()
        memory = memory_of(first_device(device))
        target = torch.zeros(rows, _COLUMNS, dtype=torch.int32, device=memory.device)
        synchronize(device)
        first_ms = _seconds(memory, target, whole) * 1e3
        assert target[-1, -1].item() == rows * _COLUMNS - 1, "not the memory of the other process"
        inside = _within(target)
        speeds = [
            (f"{target.nbytes >> 20} MiB", _gb_s(memory, target, whole), inside),
            ("half of each row", *_half(memory, target, half)),
        ]
        owner.kill()
        owner.join(_WAIT_S)
        is_whole = device == "cuda" and _is_readable(memory, target, whole)
    finally:
        owner.kill()
        owner.join(_WAIT_S)
    kind = "CUDA IPC" if device == "cuda" else "host memory"
    for what, speed, limit in speeds:
        yield Row(f"{kind}: copy of {what}", speed, "GB/s", limit, "within one process")
    yield Row(f"{kind}: mapping it, and the first copy", first_ms, "ms")
    yield Row(f"{kind}: whole after its process was killed", float(is_whole), "", 1.0)


def _own(there: Any, device: str, rows: int) -> None:
    """Make a tensor, tell where it and half of it lie, and keep it."""
    memory = memory_of(first_device(device))
    tensor = torch.arange(rows * _COLUMNS, device=memory.device, dtype=torch.int32)
    tensor = tensor.view(rows, _COLUMNS)
    synchronize(device)
    there.send([memory.place(tensor), memory.place(tensor[:, _COLUMNS // 2 :])])
    time.sleep(10 * _WAIT_S)


def _seconds(memory: MemoryAccess, target: torch.Tensor, place: list[int]) -> float:
    begun = time.perf_counter()
    assert sum(memory.read([target], [place])) == target.nbytes
    return time.perf_counter() - begun


def _gb_s(memory: MemoryAccess, target: torch.Tensor, place: list[int]) -> float:
    best = min(_seconds(memory, target, place) for _ in range(_ROUNDS))
    return target.nbytes / best / 1e9


def _half(memory: MemoryAccess, target: torch.Tensor, place: list[int]) -> tuple[float, float]:
    """GB/s of copies of half of each row, from the other process and within this one."""
    half = torch.zeros_like(target[:, _COLUMNS // 2 :])
    speed = _gb_s(memory, half, place)
    assert half.equal(target[:, _COLUMNS // 2 :])
    return speed, _within(target[:, _COLUMNS // 2 :])


def _within(source: torch.Tensor) -> float:
    device, target, best = source.device.type, torch.empty_like(source), float("inf")
    for _ in range(_ROUNDS):
        synchronize(device)
        begun = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        best = min(best, time.perf_counter() - begun)
    return source.nbytes / best / 1e9


def _is_readable(memory: MemoryAccess, target: torch.Tensor, place: list[int]) -> bool:
    expected = target.clone()
    target.zero_()
    _seconds(memory, target, place)
    return target.equal(expected)
