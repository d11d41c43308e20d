"""Observed step times from microbatch records."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import numpy as np

from resihp.contracts import Op, TelemetryBatch

_PATIENCE_STEPS = 8

RankTime = tuple[float, float, float, float]
"""Milliseconds of one rank in one step: forward and backward computing, waiting in both, and all
other operations."""


@dataclass(frozen=True)
class StepTime:
    """A complete step; `observed_ms` is the time of its busiest rank."""

    step: int
    observed_ms: float
    ranks: dict[int, RankTime]


@dataclass
class StepTimes:
    """Sums the time of each rank in each step, and closes the steps that are complete.

    A step is closed when each expected rank has reported a later one, or when records of
    `_PATIENCE_STEPS` later steps have come (a rank may be dead or its messages lost). The detector
    decides a step earlier, with its last backward pass; the optimizer and the collectives behind
    it, which arrive in a later message as a rule, belong to the step time as well.

    open_steps  times by step and rank
    newest      newest step reported by each rank
    closed      newest closed step; -1 before the first
    """

    open_steps: dict[int, dict[int, RankTime]] = field(default_factory=dict)
    newest: dict[int, int] = field(default_factory=dict)
    closed: int = -1

    @property
    def last_step(self) -> int:
        """Newest step reported by any rank; -1 before the first."""
        return max(self.newest.values(), default=-1)

    def add(self, batch: TelemetryBatch) -> None:
        """Add the records of a batch; steps that are closed stay as they are."""
        if not len(batch):
            return
        keys, sums = _rank_times(batch)
        if int(keys[-1, 0]) + _PATIENCE_STEPS < self.closed:
            # Training restarted from an earlier step.
            self.open_steps, self.newest, self.closed = {}, {}, -1
        for (step, rank), times in zip(keys.tolist(), sums.tolist(), strict=True):
            self.newest[rank] = max(step, self.newest.get(rank, -1))
            if step > self.closed:
                ranks = self.open_steps.setdefault(step, {})
                a, b, c, d = ranks.get(rank, (0.0, 0.0, 0.0, 0.0))
                ranks[rank] = (a + times[0], b + times[1], c + times[2], d + times[3])

    def close(self, expected: Collection[int]) -> Iterator[StepTime]:
        """Close the steps that all `expected` ranks have left, in order."""
        reached = min((self.newest.get(rank, -1) for rank in expected), default=-1)
        reached = max(reached, self.last_step - _PATIENCE_STEPS)
        for step in sorted(step for step in self.open_steps if step < reached):
            self.closed = step
            ranks = self.open_steps.pop(step)
            yield StepTime(step, max(map(sum, ranks.values())), ranks)


def _rank_times(batch: TelemetryBatch) -> tuple[np.ndarray, np.ndarray]:
    """Distinct (step, rank) pairs [P, 2] in order, and their times in ms [P, 4]."""
    pairs = np.stack([batch.step, batch.rank.astype(np.int64)], axis=1)
    keys, index = np.unique(pairs, axis=0, return_inverse=True)
    wait_ms = np.nan_to_num(batch.wait_ms, nan=0.0)
    forward, backward = batch.op == Op.FORWARD, batch.op == Op.BACKWARD
    passes = forward | backward
    parts = (
        np.where(forward, batch.compute_ms, 0.0),
        np.where(backward, batch.compute_ms, 0.0),
        np.where(passes, wait_ms, 0.0),
        np.where(passes, 0.0, batch.compute_ms + wait_ms),
    )
    return keys, np.stack(
        [np.bincount(index.ravel(), part, minlength=len(keys)) for part in parts], axis=1
    )
