"""Observed step times from microbatch records."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detector.persistence import Persistent, State
from detector.steps.digests import record_marks
from detector.steps.progress import StepProgress
from detector.steps.records import KnownRecords, by_step, is_pass
from resihp.contracts import Op, TelemetryBatch
from resihp.contracts.telemetry import MOST_STEP

RankTime = tuple[float, float, float, float]
"""Milliseconds of one rank in one step: forward and backward computing, waiting in both, and all
other operations."""


@dataclass(frozen=True)
class StepTime:
    """A whole step; `observed_ms` is the time of its busiest rank."""

    step: int
    observed_ms: float
    ranks: dict[int, RankTime]


class StepTimes(Persistent):
    """Sums the time of each rank of one layout in each step.

    `StepProgress` decides which steps are whole, here by records of later steps: the detector
    closes a step earlier, with its last backward pass, but the optimizer and the collectives behind
    it, which arrive in a later message as a rule, belong to the step time as well. A record that is
    sent twice counts once, here as there.

    last_step  newest step reported by any rank; -1 before the first
    """

    _saved = ("last_step", "_progress", "_times_ms", "_known")
    _times_ms: dict[int, NDArray[np.float64]]  # of open steps, shape (ranks, 4)
    _known: dict[int, KnownRecords]  # of the same steps

    def __init__(self, ranks: Collection[int]) -> None:
        self.last_step = -1
        self._begin(ranks)

    def _begin(self, ranks: Collection[int]) -> None:
        self._ranks = frozenset(ranks)
        self._progress = StepProgress(np.array(sorted(ranks), np.int64))
        self._times_ms, self._known = {}, {}

    def of_layout(self, ranks: Set[int]) -> Set[int]:
        """Return those of these ranks that are in the layout."""
        return self._ranks & ranks

    def expect(self, ranks: Iterable[int]) -> None:
        """Note that other processes work as these ranks from now on."""
        self._progress.expect(ranks)

    def add(self, batch: TelemetryBatch, lost: Iterable[int] = ()) -> list[StepTime]:
        """Adds records; returns the steps that became whole. `lost` ranks are not waited for."""
        found = self._add(batch, lost)
        if messages := self._progress.restart():
            self.last_step = -1
            self._begin(self._progress.ranks.tolist())
            for message in messages:
                found += self._add(message, lost)
        return found

    def _add(self, batch: TelemetryBatch, lost: Iterable[int]) -> list[StepTime]:
        if self._progress.is_begun.any():
            self._drop_attempts(batch)
        batch = self._progress.admit(batch)
        if self._progress.newest >= 0:  # may be earlier than before on another layout
            self.last_step = self._progress.newest
        lost, found = list(lost), list[StepTime]()
        for step, part in by_step(batch):
            index = self._progress.index(part.rank)
            new = self._known.setdefault(step, KnownRecords()).add(part, index)
            index, marks = index[new], record_marks(part, is_pass(part.op))[new]
            self._progress.count(step, index, marks, kept=new.size)
            size = self._progress.ranks.size
            total = self._times_ms.setdefault(step, np.zeros((size, 4)))
            for column, ms in enumerate(_times_ms(part)):
                total[:, column] += np.bincount(index, ms[new], size)
            if self._progress.is_full:
                found += map(self._close, self._progress.close(lost))
        return [*found, *map(self._close, self._progress.close(lost))]

    def _drop_attempts(self, batch: TelemetryBatch) -> None:
        """Drop what the processes before had done of the steps that others now do again."""
        index = self._progress.index(batch.rank)
        begun = (index >= 0) & self._progress.is_begun[index]
        first = np.full(self._progress.ranks.size, MOST_STEP + 1)
        np.minimum.at(first, index[begun], batch.step[begun])
        for step, times_ms in self._times_ms.items():
            times_ms[first <= step] = 0.0
            self._known[step].forget(first <= step)

    def move(self, ranks: Collection[int]) -> list[StepTime]:
        """Starts on another layout. Returns the open steps that all ranks of the old layout have
        reported; the others are dropped."""
        whole = [step for step, times in self._times_ms.items() if times.any(axis=1).all()]
        found = [self._close(step) for step in sorted(whole)]
        self._begin(ranks)
        return found

    def state(self) -> State:
        """The saved attributes, what is known of each open step joined."""
        for known in self._known.values():
            known.join()
        return super().state()

    def _close(self, step: int) -> StepTime:
        times_ms = self._times_ms.pop(step)
        del self._known[step]
        some = np.flatnonzero(times_ms.any(axis=1))
        found = zip(self._progress.ranks[some].tolist(), times_ms[some].tolist(), strict=True)
        ranks = {rank: (times[0], times[1], times[2], times[3]) for rank, times in found}
        return StepTime(step, float(times_ms.sum(axis=1).max()), ranks)


def _times_ms(batch: TelemetryBatch) -> tuple[NDArray[np.float64], ...]:
    """The parts of `RankTime` in each record. Transfers of microbatches that
    are stamped count as none: they are waiting of a pass, or lie between two."""
    wait_ms = np.nan_to_num(batch.wait_ms, nan=0.0)
    forward, backward = batch.op == Op.FORWARD, batch.op == Op.BACKWARD
    passes = forward | backward
    inner = (batch.op == Op.P2P) & (batch.microbatch >= 0) & np.isfinite(batch.start_ms)
    return (
        np.where(forward, batch.compute_ms, 0.0),
        np.where(backward, batch.compute_ms, 0.0),
        np.where(passes, wait_ms, 0.0),
        np.where(passes | inner, 0.0, batch.compute_ms + wait_ms),
    )
