"""Parts of the slow-down of a loop with a checkpoint at every step.

Steps with a disturbance alternate with undisturbed ones, so that other load on the machine affects
both; figures are medians of the differences. The kernel reports how long the training thread
computed and how long it waited for a core (`schedstat`); the rest it slept, for the interpreter
lock or at the fence. Longer computing is the cost of sharing memory, cache and clock rate.
"""

from __future__ import annotations

import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks._checkpoint_modes import Mode, Nothing, ResiHP, State, tensors_of
from benchmarks._checkpoint_worker import Loop
from resihp.checkpoint.format.checksum import ROW_BYTES, checksum
from resihp.checkpoint.format.index import CHUNK_BYTES
from resihp.checkpoint.levels.direct_file import DirectFile
from resihp.checkpoint.levels.local_disk import RUN_CHUNKS
from resihp.checkpoint.staging.zero_copy import WRITERS

COLUMNS = (
    "during a step", "slow-down", "quartiles", "computes longer", "waits for a core", "sleeps",
    "in save and fence", "ends after the step", "other threads compute",
)  # fmt: skip
WARM_UP = 6

Acts = tuple[str, ...]


@dataclass(frozen=True)
class Spent:
    """Seconds of one step: of the training thread, and of all other threads together.

    late  from the end of the step to the end of the disturbance
    """

    wall: float
    computing: float
    ready: float
    sleeping: float
    blocked: float
    late: float
    others: float

    def __sub__(self, other: Spent) -> Spent:
        return Spent(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


class Beside(Nothing):
    """Threads that run during the step; the fence waits for them."""

    def __init__(self, folder: Path, work: Callable[[State], list[Callable[[], object]]]) -> None:
        super().__init__(folder)
        self._work, self._pool = work, ThreadPoolExecutor(WRITERS)
        self._running: list[Future[object]] = []

    def save(self, step: int, state: State) -> None:
        """Start the threads."""
        self._running = [self._pool.submit(one) for one in self._work(state)]

    def fence(self) -> None:
        """Wait for the threads."""
        for future in self._running:
            future.result()
        self._running = []


def ways(folder: Path, step_s: float) -> dict[str, Mode]:
    """Disturbances to compare, from none to ResiHP."""

    def busy(state: State) -> list[Callable[[], object]]:
        return [lambda: _spin(step_s / 2)]

    def through(*acts: str) -> Callable[[State], list[Callable[[], object]]]:
        file = DirectFile.create(folder / "-".join(acts))
        return lambda state: _through(state, file, acts)

    return {
        "nothing": Nothing(folder),
        "a thread that computes for half of it": Beside(folder, busy),
        "checksums": Beside(folder, through("sum")),
        "writes": Beside(folder, through("write")),
        "checksums and writes": Beside(folder, through("sum", "write")),
        "ResiHP": ResiHP(folder / "ours"),
        "ResiHP, niceness 5": ResiHP(folder / "nice", 5),
    }


def breakdown(folder: Path, gib: float, step_s: float, threads: int, rounds: int) -> dict[str, Any]:
    """Rows of the table, and the seconds of an undisturbed step."""
    torch.set_num_threads(threads)
    folder.mkdir(parents=True)
    loop, control = Loop(gib, step_s), Nothing(folder)
    everything = ways(folder, step_s)
    seen: dict[str, list[tuple[Spent, Spent]]] = {name: [] for name in everything}
    for way in everything.values():
        for step in range(WARM_UP):
            spent(loop, way, step)
    for step in range(WARM_UP, WARM_UP + rounds):
        for name, way in everything.items():
            seen[name].append((spent(loop, control, step), spent(loop, way, step)))
    shutil.rmtree(folder)
    base_s = statistics.median(one.wall for pairs in seen.values() for one, _ in pairs)
    rows = [_row(name, pairs, base_s, gib) for name, pairs in seen.items()]
    return {"rows": rows, "step_s": base_s}


def spent(loop: Loop, way: Mode, step: int) -> Spent:
    """Measure one step, from `save` to the end of the optimizer's step."""
    state = loop.state
    computed, waited = _schedule()
    before, begun = time.process_time(), time.perf_counter()
    way.save(step, state)
    blocked = time.perf_counter() - begun
    blocked += loop.step(way)
    wall = time.perf_counter() - begun
    computing, ready = (b - a for a, b in zip((computed, waited), _schedule(), strict=True))
    way.settle()
    late = time.perf_counter() - begun - wall
    others = time.process_time() - before - computing
    return Spent(wall, computing, ready, wall - computing - ready, blocked, late, others)


def _row(name: str, pairs: list[tuple[Spent, Spent]], base_s: float, gib: float) -> list[str]:
    """Format medians of the differences between neighbouring steps."""
    changes = [disturbed - alone for alone, disturbed in pairs]
    middle = Spent(
        *(statistics.median(column) for column in zip(*map(astuple, changes), strict=True))
    )
    low, _, high = statistics.quantiles([change.wall for change in changes], n=4)
    cells = (middle.computing, middle.ready, middle.sleeping, middle.blocked, middle.late)
    return [
        name,
        f"{100 * middle.wall / base_s:+.1f}%",
        f"{100 * low / base_s:+.0f}..{100 * high / base_s:+.0f}%",
        *(f"{1e3 * cell:+.1f} ms" for cell in cells),
        f"{1e3 * middle.others / gib:.0f} ms/GiB",
    ]


def _schedule() -> tuple[float, float]:
    """Seconds that the calling thread has computed, and has waited for a core."""
    text = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text()
    computed, waited, _ = map(int, text.split())
    return computed / 1e9, waited / 1e9


def _spin(seconds: float) -> None:
    """Compute in the cache, without the interpreter lock."""
    values, until = np.ones(1 << 16), time.perf_counter() + seconds
    while time.perf_counter() < until:
        np.sqrt(values, out=values)


def _through(state: State, file: DirectFile, acts: Acts) -> list[Callable[[], object]]:
    """Checksum and write runs of chunks of the state in several threads, as a checkpoint does."""
    runs = iter(list(_runs(state)))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                at, view = next(runs, (0, None))
            if view is None:
                return
            if "sum" in acts:
                checksum([view])
            if "write" in acts:
                file.write([view], at)

    return [work] * WRITERS


def _runs(state: State) -> Iterator[tuple[int, memoryview]]:
    """Rows of memory of one tensor alone, and their file offsets."""
    at, most = 0, RUN_CHUNKS * CHUNK_BYTES
    for tensor in tensors_of(state):
        content = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
        low = -tensor.data_ptr() % ROW_BYTES
        high = low + (len(content) - low) // ROW_BYTES * ROW_BYTES
        for start in range(low, high, most):
            view = content[start : min(start + most, high)]
            yield at, view
            at += len(view)
