"""Levels that store each rank's file by itself keep what all ranks have."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Barrier, Event, Timer
from typing import TypeVar

import pytest
import torch

from resihp.checkpoint import Checkpointer, Level, LocalDisk, vote
from resihp.checkpoint.counters import ProblemLog
from resihp.checkpoint.levels import local_disk
from resihp.checkpoint.ranks import SaveItem
from resihp.checkpoint.staging.in_flight import InFlightCheckpoint
from resihp.contracts import CheckpointError
from tests.checkpoint.helpers import run_python

T = TypeVar("T")
RANKS = (0, 1)


class Exchange:
    """Values that the ranks exchange; every wait is bounded."""

    def __init__(self) -> None:
        self._values: dict[int, object] = {}
        self._barrier = Barrier(len(RANKS))

    def gather(self, rank: int, value: T) -> list[T]:
        self._values[rank] = value
        self._barrier.wait(60)
        found = [self._values[each] for each in RANKS]
        self._barrier.wait(60)
        return found  # type: ignore[return-value]


class RankOfThread:
    """`Ranks` between the threads of one process."""

    all, run = RANKS, "run"

    def __init__(self, rank: int, called: Exchange, background: Exchange) -> None:
        self.rank, self._called, self._background = rank, called, background

    def gather(self, value: T) -> list[T]:
        return self._called.gather(self.rank, value)

    def gather_in_background(self, value: T) -> list[T]:
        return self._background.gather(self.rank, value)

    def common_bits(self, bits: int) -> int:
        mine, others = self.gather_in_background(bits)
        return mine & others


class Disk(LocalDisk):
    """Disk of one rank's node, which writes nothing while it is held."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(folder / str(rank), ranks=[rank])
        self.may_write = Event()
        self.may_write.set()

    def put(self, checkpoint: InFlightCheckpoint) -> None:
        assert self.may_write.wait(300)  # it is held for several saves of the other rank
        super().put(checkpoint)


class Pair:
    """Two ranks, each with levels of its own, which train in lock step."""

    def __init__(self, levels: Callable[[int], list[Level]], stack: ExitStack) -> None:
        called, background = Exchange(), Exchange()
        self._threads = stack.enter_context(ThreadPoolExecutor(len(RANKS)))
        self.savers = [
            Checkpointer(
                levels(rank),
                ranks=RankOfThread(rank, called, background),
                host_cache_bytes=1 << 26,
            )
            for rank in RANKS
        ]
        self.state = [{f"weight-{rank}": torch.zeros(3000)} for rank in RANKS]
        stack.callback(lambda: list(self._threads.map(Checkpointer.close, self.savers)))

    def save(self, step: int, waiting: Sequence[int] = RANKS) -> None:
        """Save on both ranks; those of `waiting` wait until it is put."""

        def run(rank: int) -> None:
            saver = self.savers[rank]
            for value in self.state[rank].values():
                value.fill_(step)
            saver.save(step, self.state[rank])
            saver.fence()
            assert rank not in waiting or saver.wait(60)

        list(self._threads.map(run, RANKS))

    def until_put(self, rank: int, level: Level) -> bool:
        """Wait for one level alone."""
        workers = self.savers[rank]._pipeline._first
        return next(worker for worker in workers if worker.level is level).wait(60)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def test_a_node_whose_disk_is_behind_finds_its_step_on_the_others(
    tmp_path: Path, stack: ExitStack
) -> None:
    """Rank 1 cannot take part for a while: rank 0 drops nothing for checkpoints of its own."""
    disks = [Disk(tmp_path, rank) for rank in RANKS]
    pair = Pair(lambda rank: [disks[rank]], stack)
    pair.save(0)
    pair.save(1)
    disks[1].may_write.clear()
    for step in range(2, 7):
        pair.save(step, waiting=(0,))
    assert [disk.steps() for disk in disks] == [[1, 2], [0, 1]]
    disks[1].may_write.set()
    assert pair.savers[1].wait(60)
    assert disks[1].steps() == [1, 2]
    assert [saver.counters.vetoed for saver in pair.savers] == [4, 0]


def test_without_a_vote_every_rank_keeps_its_own(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection of the votes is broken for good by a rank that came too late once."""
    disks = [Disk(tmp_path, rank) for rank in RANKS]
    pair = Pair(lambda rank: [disks[rank]], stack)
    pair.save(0)

    def broken(self: RankOfThread, bits: int) -> int:
        raise RuntimeError("timed out")

    monkeypatch.setattr(RankOfThread, "common_bits", broken)
    pair.save(1)
    pair.save(2)
    assert [disk.steps() for disk in disks] == [[1, 2], [1, 2]]


def test_a_level_that_one_rank_is_behind_with_goes_without(
    tmp_path: Path, stack: ExitStack
) -> None:
    """Another level takes the checkpoint on both ranks."""
    held = [Disk(tmp_path / "held", rank) for rank in RANKS]
    free = [Disk(tmp_path / "free", rank) for rank in RANKS]
    pair = Pair(lambda rank: [held[rank], free[rank]], stack)
    pair.save(0)
    pair.save(1)
    held[1].may_write.clear()
    for step in range(2, 7):
        pair.save(step, waiting=(0,))
        assert pair.until_put(1, free[1])
    assert [disk.steps() for disk in free] == [[5, 6], [5, 6]]
    assert [disk.steps() for disk in held] == [[1, 2], [0, 1]]
    held[1].may_write.set()


def test_a_full_disk_keeps_the_step_that_the_other_node_has(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has room for two: it makes none for checkpoints that rank 1 does not take part in."""
    disks, write_file = [Disk(tmp_path, rank) for rank in RANKS], local_disk.write_file
    pair = Pair(lambda rank: [disks[rank]], stack)
    pair.save(0)
    pair.save(1)

    def full(checkpoint: InFlightCheckpoint, target: Path, level: str) -> None:
        if level == disks[0].name and len(disks[0].steps()) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_file(checkpoint, target, level)

    monkeypatch.setattr(local_disk, "write_file", full)
    monkeypatch.setattr(local_disk, "_free_bytes", lambda folder: 0)
    pair.save(2)
    assert [disk.steps() for disk in disks] == [[0, 1], [1, 2]]
    disks[1].may_write.clear()
    pair.save(3, waiting=(0,))
    pair.save(4, waiting=(0,))
    assert [disk.steps() for disk in disks] == [[1, 3], [1, 2]], "both have step 1"
    disks[1].may_write.set()
    assert pair.savers[1].wait(60)
    pair.save(5)
    assert [disk.steps() for disk in disks] == [[3, 5], [3, 5]]


def test_close_keeps_what_a_lost_rank_has_not_voted_on(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    disks, over, waited = [Disk(tmp_path, rank) for rank in RANKS], Event(), []
    pair = Pair(lambda rank: [disks[rank]], stack)
    pair.save(0)

    def unanswered(self: RankOfThread, bits: int) -> int:
        if not over.wait(60):
            waited.append(self.rank)
        return bits

    monkeypatch.setattr(RankOfThread, "common_bits", unanswered)
    monkeypatch.setattr(vote, "PATIENCE_S", 0.2)
    pair.save(1, waiting=())
    pair.savers[0].close(300)
    assert disks[0].steps() == [0, 1]
    over.set()
    pair.savers[1].close(300)
    assert not waited, "closed while the vote stood still"


LEFT_ALONE = """
import sys, threading, torch
from resihp.checkpoint import Checkpointer, LocalDisk, vote
class Ranks:
    rank, all, run = 0, (0, 1), "run"
    def gather(self, value):
        return [value, value]
    gather_in_background = gather
    def common_bits(self, bits):
        threading.Event().wait()
vote.PATIENCE_S = 0.2
saver = Checkpointer([LocalDisk(sys.argv[1], ranks=[0])], ranks=Ranks())
state = {"a": torch.ones(1000)}
saver.prepare(state)
saver.save(7, state)
print("the end")
"""


def test_a_program_whose_peer_is_lost_ends(tmp_path: Path) -> None:
    assert run_python(LEFT_ALONE, tmp_path) == "the end\n"
    assert LocalDisk(tmp_path).steps() == [7]


class LateRanks:
    """`Ranks` of which the other one takes part in no vote before `has_come`."""

    rank, all, run = 0, RANKS, "run"

    def __init__(self) -> None:
        self.has_come = Event()

    def gather(self, value: T) -> list[T]:
        return [value, value]

    gather_in_background = gather

    def common_bits(self, bits: int) -> int:
        assert self.has_come.wait(300)
        return bits


def test_new_shapes_wait_for_a_late_rank_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, is_over = LateRanks(), Event()
    votes = vote.VoteQueue(ranks, ["disk"], ProblemLog(), InFlightCheckpoint.uploaded)
    timer = Timer(60, is_over.set)
    timer.start()
    items = [SaveItem("w", (0,), (3,), (3,), 12)]

    def gathered() -> Sequence[Sequence[SaveItem]]:
        mine = vote.Vote(lambda: items, None)
        mine.begun.set_result(None)
        return votes.submit_and_gather(mine).items

    try:
        monkeypatch.setattr(vote, "PATIENCE_S", 0.1)
        with pytest.raises(CheckpointError, match="not reached the same save"):
            gathered()
        monkeypatch.setattr(vote, "PATIENCE_S", 120.0)
        with pytest.raises(CheckpointError, match="not reached the same save"):
            gathered()
        assert not is_over.is_set(), "training stands still once alone"
        ranks.has_come.set()
        assert votes._late is not None
        assert votes._late.result(60).version == 2, "the exchange of both calls"
        assert gathered() == [items, items]
    finally:
        ranks.has_come.set()
        timer.cancel()
        votes.close(60)
