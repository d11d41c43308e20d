"""Hand-over of a tensor between two processes of one device by CUDA IPC: a raw probe."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.multiprocessing

from benchmarks._gpu_ranks import synchronize
from benchmarks._gpu_rows import Row
from benchmarks._resize_live import first_device

_ROUNDS = 10
_WAIT_S = 40.0


def hand_over(device: str, small: bool) -> Iterator[Row]:
    """Open another process's memory, check a random number in it, and copy it."""
    nbytes = 1 << (20 if small else 30)
    context = torch.multiprocessing.get_context("spawn")
    queue, (here, there) = context.Queue(), context.Pipe()
    owner = context.Process(target=_own, args=(queue, there, device, nbytes), daemon=True)
    owner.start()
    try:
        proof = _received(here)
        torch.zeros(1, device=first_device(device))  # starts CUDA in this process
        begun = time.perf_counter()
        source = queue.get(timeout=_WAIT_S)
        opened_ms = (time.perf_counter() - begun) * 1e3
        assert source[-1].item() == proof, "this is not the memory of the other process"
        speed, limit = (_gb_s(tensor, device) for tensor in (source, source.clone()))
        del source
        here.send("done")
    finally:
        owner.join(5)
        owner.kill()
    kind = "CUDA IPC" if device == "cuda" else "shared memory"
    yield Row(f"{kind}: copy of {nbytes >> 20} MiB", speed, "GB/s", limit, "within one process")
    yield Row(f"{kind}: opening it", opened_ms, "ms")


def _own(queue: Any, there: Any, device: str, nbytes: int) -> None:
    """Make a tensor, hand it over, and keep it until it is copied."""
    tensor = torch.zeros(nbytes // 8, dtype=torch.int64, device=first_device(device))
    proof = int(torch.randint(1 << 60, ()).item()) ^ time.time_ns()
    tensor[-1] = proof
    synchronize(device)
    there.send(proof)
    queue.put(tensor)
    _received(there)


def _received(connection: Any) -> Any:
    if not connection.poll(_WAIT_S):
        raise TimeoutError("the other process does not answer")
    return connection.recv()


def _gb_s(source: torch.Tensor, device: str) -> float:
    target = torch.empty_like(source)
    target.copy_(source)
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(_ROUNDS):
        target.copy_(source)
    synchronize(device)
    return _ROUNDS * source.nbytes / (time.perf_counter() - begun) / 1e9
