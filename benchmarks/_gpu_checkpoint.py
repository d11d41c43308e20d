"""Lazy checkpoints of a state on the device: speed of the copy, and what a step loses to it."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks._checkpoint_modes import Mode, Nothing, State, open_mode
from benchmarks._gpu_rows import NotRunError, Row

_SPARE = 1.25
"""Host memory left free beside copies of the state."""


class Bf16Loop:
    """A stack of square linear layers under bf16 autocast, with AdamW; 12 bytes of state each."""

    def __init__(self, gib: float, device: str) -> None:
        width, self._tokens = (4096, 8192) if device == "cuda" else (256, 64)
        layers = max(1, round(gib * 2**30 / 12 / width**2))
        self._device = device
        self.model = nn.Sequential(
            *(nn.Linear(width, width, bias=False, device=device) for _ in range(layers))
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self._inputs = torch.randn(self._tokens, width, device=device)
        for _ in range(3):
            self.step(Nothing(Path()))

    @property
    def state(self) -> State:
        """Parameters and moments, not copied."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return sum(p.nbytes for p in self.model.parameters()) * 3

    def step(self, mode: Mode) -> None:
        """Train one step, and wait for it."""
        with torch.autocast(self._device, torch.bfloat16):
            loss = self.model(self._inputs).float().square().mean()
        loss.backward()
        mode.fence()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.settle()

    def settle(self) -> None:
        """Wait for the device."""
        if self._device == "cuda":
            torch.cuda.synchronize()


def copies(device: str, small: bool, gib: float) -> Iterator[Row]:
    """Speed of a lazy checkpoint's copy to the host, beside that of one plain pinned copy."""
    _need_memory(gib, 2)
    loop = Bf16Loop(gib, device)
    limit = _plain_gb_s(device, min(loop.nbytes, 2**30))
    with tempfile.TemporaryDirectory() as folder:
        mode, seen = open_mode("ResiHP", Path(folder) / "run"), []
        for step in range(4):  # the first one allocates and pins
            begun = time.perf_counter()
            mode.save(step, loop.state)
            mode.fence()
            loop.settle()
            seen.append(loop.nbytes / (time.perf_counter() - begun) / 1e9)
            mode.settle()
            loop.step(mode)
        skipped = mode.close()
    note = f"{skipped} skipped" if skipped else ""
    name = f"checkpoint of {gib:g} GiB: copy to the host"
    yield Row(name, statistics.median(seen[1:]), "GB/s", limit, "a plain pinned copy", note)


def _plain_gb_s(device: str, nbytes: int) -> float:
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device == "cuda")
    best = 0.0
    for _ in range(5):
        begun = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if device == "cuda":
            torch.cuda.synchronize()
        best = max(best, nbytes / (time.perf_counter() - begun) / 1e9)
    return best


def slowdown(device: str, small: bool, gib: float, mode: str, during: int = 4) -> Iterator[Row]:
    """What a checkpoint adds to the `during` steps that begin with it, relative to one step."""
    _need_memory(gib, 2)
    loop = Bf16Loop(gib, device)
    with tempfile.TemporaryDirectory() as folder:
        saver = _open(mode, Path(folder) / "run")
        plain, blocked, longer = Nothing(Path()), [], []
        for turn in range(2 if small else 4):
            plain_s = statistics.median(_timed(loop, plain) for _ in range(during))
            begun = time.perf_counter()
            saver.save(turn, loop.state)
            saved_s = time.perf_counter() - begun
            steps_s = saved_s + sum(_timed(loop, saver) for _ in range(during))
            saver.settle()
            if turn > 0:
                blocked.append(saved_s * 1e3)
                longer.append((steps_s - during * plain_s) * 1e3)
        saver.close()
    step_ms, name = plain_s * 1e3, f"checkpoint of {gib:g} GiB, {mode}"
    yield Row(f"{name}: save() blocks", statistics.median(blocked), "ms", step_ms, "a bf16 step")
    added = statistics.median(longer)
    yield Row(f"{name}: added to {during} steps", added, "ms", step_ms, "a bf16 step")


def _timed(loop: Bf16Loop, mode: Mode) -> float:
    begun = time.perf_counter()
    loop.step(mode)
    return time.perf_counter() - begun


def _open(mode: str, folder: Path) -> Mode:
    if mode != NEWER:
        return open_mode(mode, folder)
    folder.mkdir(parents=True)
    return ExperimentalCheckpointer(folder)


def _need_memory(gib: float, images: int) -> None:
    """Raises `NotRunError` if the host has no room for as many images of the state."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free_gib = next(int(x.split()[1]) for x in lines if x.startswith("MemAvailable")) / 2**20
    if free_gib < _SPARE * images * gib:
        need = _SPARE * images * gib
        raise NotRunError(f"not run: needs {need:.0f} GiB of host memory, {free_gib:.0f} are free")


NEWER = "torch's experimental checkpointer"


class ExperimentalCheckpointer(Nothing):
    """The asynchronous checkpointer of `torch.distributed.checkpoint._experimental`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        if not torch.cuda.is_available():
            raise NotRunError("not run: its stager needs a device")
        try:
            from torch.distributed.checkpoint._experimental.builder import make_async_checkpointer
        except ImportError as error:
            raise NotRunError(f"not run: this torch has none ({error})") from error
        self._saver: Any = make_async_checkpointer()
        self._staged: Any = None
        self._written: Any = None

    def save(self, step: int, state: State) -> None:
        """Wait for the save before, then begin."""
        self._staged, self._written = self._saver.save(str(self.folder / str(step % 2)), state)

    def fence(self) -> None:
        """Wait for the stager."""
        if self._staged is not None:
            self._staged.result()
            self._staged = None

    def settle(self) -> None:
        """Wait for the save in flight."""
        if self._written is not None:
            self._written.result()

    def close(self) -> int:
        """Finish all checkpoints."""
        self.settle()
        self._saver.close()
        return 0
