"""Process groups of several ranks on one device: built, used, aborted, and built again.

NCCL refuses two ranks on one device of one host, so each rank tells a host of its own and reaches
the others through loopback sockets. A kernel of NCCL waits on the device for its peers: with more
blocks than the device runs at once, or behind other kernels, ranks on one device wait for each
other forever. So there are few blocks, small messages, and a synchronize around each exchange.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from benchmarks._gpu_ranks import WAIT_S, held, meet, synchronize
from benchmarks._gpu_rows import NotRunError, Row
from benchmarks._resize_live import first_device
from resihp.contracts import PeerLostError
from resihp.elastic.process_groups.abortable import (
    AbortableProcessGroup,
    ProcessGroupFactory,
    WaitClock,
    close_groups,
)
from resihp.elastic.process_groups.communicators import Communicators
from resihp.elastic.process_groups.gloo import GlooCommunicators
from resihp.elastic.process_groups.nccl import NcclCommunicators
from resihp.elastic.process_groups.reconfigure import ReconfigurableCommunicators
from resihp.elastic.rendezvous import keys
from resihp.elastic.rendezvous.liveness import ProcessHistory
from resihp.elastic.rendezvous.store import Timeouts, connect
from resihp.testing.local_ranks import LocalRanks
from resihp.testing.ordinary_loops import SHARED_DEVICE

MAKERS: dict[str, type[Communicators]] = {
    maker.name: maker
    for maker in (GlooCommunicators, ReconfigurableCommunicators, NcclCommunicators)
}
JOB, LIMIT = "nccl", timedelta(seconds=WAIT_S)
WARM = 4
"""Cycles after which what a rank holds is that of any later one."""
VICTIM, SURVIVORS, ALL = 2, (0, 1), (0, 1, 2)


@dataclass(frozen=True)
class GroupJob:
    """Groups of `maker`, so many `times`; exchanges of `nbytes`."""

    maker: str
    device: str
    ranks: tuple[int, ...]
    times: int
    nbytes: int


def cycles(device: str, small: bool, maker: str, world: int, times: int) -> Iterator[Row]:
    """Build, exchange, abort and close, so many times."""
    _need(maker, device)
    job = GroupJob(maker, device, tuple(range(world)), times, 1 << (16 if small else 24))
    with tempfile.TemporaryDirectory() as folder, LocalRanks(JOB, Path(folder)) as ranks:
        ranks.start(job.ranks, run_cycles, job, Path(folder))
        codes = ranks.wait(WAIT_S + times)
        assert set(codes.values()) == {0}, ranks.logs()
        yield from _rows(f"{maker}, {world} ranks", Path(folder), times)


def kills(device: str, small: bool, maker: str, times: int) -> Iterator[Row]:
    """One of three ranks is killed in an exchange, so many times; the others abort and go on."""
    _need(maker, device)
    job = GroupJob(maker, device, ALL, times, 1 << (16 if small else 24))
    with tempfile.TemporaryDirectory() as folder, LocalRanks(JOB, Path(folder)) as ranks:
        ranks.start(ALL, run_kills, job, Path(folder))
        started, end = 1, time.monotonic() + WAIT_S + 5 * times
        while set(ranks.poll(0.02)) & set(SURVIVORS):
            assert time.monotonic() < end, ranks.logs()
            if VICTIM in ranks.exit_codes and started < times:
                ranks.start((VICTIM,), run_kills, job, Path(folder))
                started += 1
        assert [ranks.exit_codes[rank] for rank in SURVIVORS] == [0, 0], ranks.logs()
        yield from _rows(f"{maker}, 1 of 3 killed", Path(folder), times)


def _need(maker: str, device: str) -> None:
    """Set what the ranks inherit. Raises `NotRunError` if there are no such communicators."""
    reason = MAKERS[maker].refusal(first_device(device))
    if reason is not None:
        raise NotRunError(f"not possible: {reason}")
    os.environ |= SHARED_DEVICE


def _rows(name: str, folder: Path, times: int) -> Iterator[Row]:
    """Medians of rank 0's times, and what it holds at the end beyond what it held when warm."""
    seen: dict[str, Any] = json.loads((folder / "seen-0.json").read_text())
    yield Row(f"{name}: times without a hang", seen["times"], "", times, "all")
    for what, measured in seen["ms"].items():
        yield Row(f"{name}: {what}", statistics.median(measured), "ms")
    if seen["gb_s"]:
        best = max(seen["gb_s"])
        yield Row(f"{name}: all-reduce", best, "GB/s", note="through loopback sockets")
    left = {kind: seen["last"][kind] - seen["first"][kind] for kind in seen["last"]}
    warm = f"held after {WARM + 1} times"
    yield Row(f"{name}: memory more than when warm", left["bytes"] / 2**20, "MiB", 0.0, warm)
    yield Row(f"{name}: open files more than when warm", left["files"], "", 0.0, warm)


class GroupRank:
    """Groups of one rank, one generation after another, and what they took."""

    def __init__(self, rank: int, host: str, port: int, job: GroupJob) -> None:
        os.environ["NCCL_HOSTID"] = f"rank{rank}"
        torch.set_num_threads(1)
        if job.device == "cuda":
            torch.cuda.set_device(0)
        timeouts = Timeouts()
        self.rank, self.job, self.store = rank, job, connect(host, port, JOB, timeouts)
        self.deaths = 0
        self.ms: dict[str, list[float]] = {}
        self.gb_s: list[float] = []
        self.counted: list[dict[str, int]] = []
        self._building = connect(host, port, JOB, timeouts)
        self._factory: ProcessGroupFactory | None = None
        self._tensor = torch.ones(job.nbytes // 4, device=first_device(job.device))

    def build(self, name: str, ranks: Sequence[int]) -> AbortableProcessGroup:
        """A group of a new generation."""
        self._factory = ProcessGroupFactory(
            self._building,
            self.rank,
            broken=self._broken,
            timeout=LIMIT,
            waited=WaitClock(),
            device=first_device(self.job.device),
            maker=MAKERS[self.job.maker],
        )
        with self._timed(f"build of {len(ranks)}"):
            return self._factory.group(name, ranks)

    def exchange(self, group: AbortableProcessGroup) -> None:
        """Sum, and check the sum."""
        self._tensor.fill_(1.0)
        synchronize(self.job.device)
        begun = time.perf_counter()
        group.wait(group.start_all_reduce(self._tensor))  # in a group of one, too
        synchronize(self.job.device)
        self.gb_s.append(self.job.nbytes / (time.perf_counter() - begun) / 1e9)
        assert self._tensor[[0, -1]].tolist() == [len(group)] * 2

    def let_go(self) -> None:
        """Abort and close the newest generation."""
        assert self._factory is not None
        with self._timed("abort"):
            self._factory.abort()
        close_groups(self._factory.groups)
        for thread in threading.enumerate():
            if thread.name == "resihp-close":
                thread.join(WAIT_S)
        assert self._factory.communicators.open_handles == 0
        self._factory = None
        gc.collect()

    def history(self) -> ProcessHistory:
        """Ends of processes, as their launcher has announced them."""
        known = self.store.check([keys.PROCESS_HISTORY])
        return ProcessHistory(self.store.get(keys.PROCESS_HISTORY) if known else b"")

    def tell(self, times: int, folder: Path) -> None:
        """Write down what was seen."""
        first, last = self.counted[min(WARM, len(self.counted) - 1)], self.counted[-1]
        seen = {"times": times, "ms": self.ms, "gb_s": self.gb_s, "first": first, "last": last}
        (folder / f"seen-{self.rank}.json").write_text(json.dumps(seen))

    def _broken(self, ranks: Sequence[int], waited_s: float) -> str | None:
        if VICTIM in ranks and self.history().ends[VICTIM] > self.deaths:
            return f"rank {VICTIM} is dead"
        return None

    def _timed(self, what: str) -> _Timed:
        return _Timed(self.ms.setdefault(what, []))


class _Timed:
    def __init__(self, into: list[float]) -> None:
        self._into = into

    def __enter__(self) -> None:
        self._begun = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._into.append((time.perf_counter() - self._begun) * 1e3)


def run_cycles(rank: int, host: str, port: int, job: GroupJob, folder: Path) -> None:
    """One rank of `cycles`."""
    own = GroupRank(rank, host, port, job)
    for number in range(job.times):
        group = own.build(f"cycle{number}", job.ranks)
        own.exchange(group)
        meet(own.store, f"exchanged/{number}", len(job.ranks))  # an abort cuts a peer's exchange
        del group
        own.let_go()
        meet(own.store, f"closed/{number}", len(job.ranks))
        own.counted.append(held(job.device))
    own.tell(job.times, folder)


def run_kills(rank: int, host: str, port: int, job: GroupJob, folder: Path) -> None:
    """One rank of `kills`; each process of the victim sees one exchange."""
    own = GroupRank(rank, host, port, job)
    begun = own.history().ends[VICTIM] if rank == VICTIM else 0
    for number in range(begun, job.times):
        own.deaths = number
        group = own.build(f"three{number}", ALL)
        own.exchange(group)
        meet(own.store, f"exchanged/{number}", len(ALL))
        if rank == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        _lose(own, group)
        del group
        own.let_go()
        pair = own.build(f"two{number}", SURVIVORS)
        own.exchange(pair)
        meet(own.store, f"went on/{number}", len(SURVIVORS))
        del pair
        own.let_go()
        own.counted.append(held(job.device))
    own.tell(job.times, folder)


def _lose(own: GroupRank, group: AbortableProcessGroup) -> None:
    try:
        group.all_reduce(torch.zeros(own.job.nbytes // 4, device=group.device))
    except PeerLostError:
        return
    raise AssertionError("an exchange with a dead rank has ended")
