"""Levels that store each rank's file by itself keep what all ranks have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Barrier, Event
from typing import TypeVar

import pytest
import torch

from resihp.checkpoint import Checkpointer, Level, LocalDisk
from resihp.checkpoint.staging.in_flight import InFlightCheckpoint

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
        assert self.may_write.wait(60)
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
