"""Observed step times from microbatch records."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from resihp.contracts import TelemetryBatch


class StepTimes:
    """Sums what each rank spent in each step; a step's time is that of its busiest rank.

    A step is closed when every expected rank has reported a later one, or when records of
    `patience` later steps have come (a rank may be dead or its messages lost).
    """

    def __init__(self, patience: int = 8) -> None:
        self._patience = patience
        self.restart()

    @property
    def last_step(self) -> int:
        """Newest step of which any rank has reported; -1 before the first."""
        return max(self._newest.values(), default=-1)

    def add(self, batch: TelemetryBatch) -> None:
        """Count the records of a batch."""
        if not len(batch):
            return
        spent = batch.compute_ms + np.nan_to_num(batch.wait_ms, nan=0.0)
        pairs, index = np.unique(
            np.stack([batch.step, batch.rank.astype(np.int64)], axis=1), axis=0, return_inverse=True
        )
        sums = np.bincount(index.ravel(), weights=spent)
        if int(pairs[-1, 0]) + self._patience < self._closed:
            self.restart()  # training went back to an earlier step
        for (step, rank), total in zip(pairs.tolist(), sums.tolist(), strict=True):
            self._newest[rank] = max(step, self._newest.get(rank, -1))
            if step > self._closed:
                ranks = self._spent.setdefault(step, {})
                ranks[rank] = ranks.get(rank, 0.0) + total

    def close(self, expected: Collection[int]) -> Iterator[tuple[int, float, int]]:
        """The steps that are complete now: (step, observed_ms, ranks that reported)."""
        reached = min((self._newest.get(rank, -1) for rank in expected), default=-1)
        reached = max(reached, self.last_step - self._patience)
        for step in sorted(step for step in self._spent if step < reached):
            ranks = self._spent.pop(step)
            self._closed = step
            yield step, max(ranks.values()), len(ranks)

    def restart(self) -> None:
        """Forget everything."""
        self._spent: dict[int, dict[int, float]] = {}
        self._newest: dict[int, int] = {}
        self._closed = -1

    def save(self) -> dict[str, Any]:
        """Plain values from which `restore` makes an equal clock."""
        return {
            "spent": {str(s): {str(r): ms for r, ms in v.items()} for s, v in self._spent.items()},
            "newest": {str(rank): step for rank, step in self._newest.items()},
            "closed": self._closed,
        }

    @classmethod
    def restore(cls, saved: dict[str, Any]) -> StepTimes:
        """The clock that was saved."""
        clock = cls()
        clock._spent = {
            int(s): {int(r): ms for r, ms in v.items()} for s, v in saved["spent"].items()
        }
        clock._newest = {int(rank): step for rank, step in saved["newest"].items()}
        clock._closed = saved["closed"]
        return clock
