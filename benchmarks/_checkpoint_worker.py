"""One process of the checkpoint benchmark: trains with one mode, prints JSON.

`python -m benchmarks._checkpoint_worker MODE FOLDER GIB STEP_S STEPS ROUNDS THREADS`
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import sys
import time
from math import ceil
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks._checkpoint_modes import Mode, Nothing, State, open_mode

LAYERS = 24
_SMALL, _LARGE = 8, 128
WARM_UP = 6
"""Checkpoints during which a mode allocates memory and files and starts threads and processes."""


class Loop:
    """A stack of linear layers with AdamW; its state (parameters, moments) has a given size."""

    def __init__(self, gib: float, step_s: float) -> None:
        torch.manual_seed(0)
        self.width = int((gib * 2**30 / 12 / LAYERS) ** 0.5)
        layers = [nn.Linear(self.width, self.width, bias=False) for _ in range(LAYERS)]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.batch = _SMALL
        self.step(Nothing(Path()))
        begun = time.perf_counter()
        self._update(Nothing(Path()))
        update_s = time.perf_counter() - begun
        small_s, large_s = self._gradients_s(_SMALL), self._gradients_s(_LARGE)
        each_s = (large_s - small_s) / (_LARGE - _SMALL)
        self.batch = max(1, ceil(_SMALL + (step_s - update_s - small_s) / each_s))
        while self._shortest_s() < step_s:
            self.batch = ceil(1.1 * self.batch)

    def _shortest_s(self) -> float:
        """Median of three steps."""
        times = []
        for _ in range(3):
            begun = time.perf_counter()
            self.step(Nothing(Path()))
            times.append(time.perf_counter() - begun)
        return min(times)

    @property
    def state(self) -> State:
        """Parameters and moments, not copied."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return LAYERS * self.width**2 * 12

    def step(self, mode: Mode) -> float:
        """Train one step; return the seconds of the fence."""
        self._gradients()
        return self._update(mode)

    def _gradients(self) -> None:
        self.model(torch.ones(self.batch, self.width)).square().mean().backward()

    def _gradients_s(self, batch: int) -> float:
        """Seconds for the gradients of a batch size, after a first time that allocates."""
        self.batch = batch
        self._gradients()
        begun = time.perf_counter()
        self._gradients()
        return time.perf_counter() - begun

    def _update(self, mode: Mode) -> float:
        begun = time.perf_counter()
        mode.fence()
        waited = time.perf_counter() - begun
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return waited


def phase(loop: Loop, mode: Mode, steps: int, every: int) -> dict[str, list[float]]:
    """Train until no checkpoint is in flight; seconds of each step, and blocked by each checkpoint.

    A step begins with its checkpoint, which is written during the step.
    """
    step_s: list[float] = []
    blocking_s: list[float] = []
    for step in range(steps):
        begun, saves = time.perf_counter(), step % every == 0
        if saves:
            mode.save(step, loop.state)
            blocking_s.append(time.perf_counter() - begun)
        blocking_s[-1] += loop.step(mode)
        step_s.append(time.perf_counter() - begun)
    mode.settle()
    return {"step_s": step_s, "blocking_s": blocking_s}


def main(
    name: str, folder: Path, gib: float, step_s: float, steps: int, rounds: int, threads: int
) -> None:
    """Train alternately without and with checkpoints, after warm-up, and print the result."""
    torch.set_num_threads(threads)
    if "process" in name:
        _join_alone()
    loop = Loop(gib, step_s)
    plain = Nothing(folder)
    phase(loop, plain, 2, 1)
    _reset_peak()
    phase(loop, plain, 2, 1)
    before = _peak()
    mode = open_mode(name, folder / "run")
    phase(loop, mode, WARM_UP, 1)
    mode.durable_s.clear()
    found: dict[str, object] = {"state_bytes": loop.nbytes, "batch": loop.batch}
    base_s = phase(loop, plain, steps, 1)["step_s"]
    for label, every in (("each", 1), ("fifth", 5)):
        slowdowns: list[float] = []
        blocking_s: list[float] = []
        for _ in range(rounds):
            seen = phase(loop, mode, max(steps, every), every)
            after_s = phase(loop, plain, steps, 1)["step_s"]
            around_s = statistics.mean([*base_s, *after_s])
            slowdowns.append(statistics.mean(seen["step_s"]) / around_s)
            blocking_s += seen["blocking_s"]
            base_s = after_s
        found[label] = {"slowdowns": slowdowns, "blocking_s": blocking_s}
    found["base_s"] = statistics.median(base_s)
    found["skipped"] = mode.close()
    found["durable_s"] = mode.durable_s
    found["extra_bytes"] = _peak() - before
    shutil.rmtree(folder / "run", ignore_errors=True)
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)  # torch's checkpoint process does not end otherwise


def _join_alone() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=0, world_size=1)


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    """Peak resident size in bytes, with that of child processes."""
    processes = [os.getpid(), *_children(os.getpid())]
    return sum(_status(process, "VmHWM") for process in processes)


def _children(process: int) -> list[int]:
    try:
        text = Path(f"/proc/{process}/task/{process}/children").read_text()
    except OSError:
        return []
    found = [int(child) for child in text.split()]
    return found + [below for child in found for below in _children(child)]


def _status(process: int, field: str) -> int:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    mode_name, path, size, seconds, *counts = sys.argv[1:]
    main(mode_name, Path(path), float(size), float(seconds), *map(int, counts))
