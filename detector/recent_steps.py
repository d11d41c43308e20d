"""The records of the last steps, for the diagnosis: only the columns that it uses, compressed.

The steps of a job are alike: the same ranks, microbatches and ops in the same order. That frame is
kept once; each step keeps its times (as 32-bit floats) and the work of its microbatches.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import TelemetryBatch

from .persistence import Persistent
from .rank_table import RankTable
from .steps.records import is_pass

_FRAME = ("rank", "microbatch", "chunk", "op", "peer")


@dataclass(frozen=True, eq=False)
class _Frame:
    """Columns that are equal in consecutive steps; arrays over records.

    work   position of the microbatch among those of the step; -1 for records of none
    """

    columns: dict[str, NDArray[np.integer]]
    work: NDArray[np.int32]

    @classmethod
    def of(cls, batch: TelemetryBatch, places: RankTable) -> _Frame:
        replica = places.dp[places.index(batch.rank)]
        some = (batch.microbatch >= 0) & is_pass(batch.op)
        key = np.where(some, (replica << 32) | batch.microbatch, -1)
        distinct, work = np.unique(key, return_inverse=True)
        work = work.reshape(-1) - int(distinct[0] == -1)
        columns = {name: getattr(batch, name) for name in _FRAME}
        return cls(columns, work.astype(np.int32))

    def fits(self, batch: TelemetryBatch) -> bool:
        return all(np.array_equal(self.columns[name], getattr(batch, name)) for name in _FRAME)


@dataclass(frozen=True, eq=False)
class _Step:
    """One step, whose frame has the number `frame`: times over records, and the work [2, M + 1] of
    its microbatches; the last column is of records of none."""

    frame: int
    number: int
    plan_version: int
    times: NDArray[np.float32]
    work: NDArray[np.int64]

    @classmethod
    def of(cls, batch: TelemetryBatch, number: int, frame: _Frame) -> _Step:
        told = (frame.work >= 0) & (batch.tokens >= 0) & (batch.sum_sq_len >= 0)
        work = np.full((2, int(frame.work.max(initial=-1)) + 2), -1, np.int64)
        work[:, frame.work[told]] = batch.tokens[told], batch.sum_sq_len[told]
        times = batch.compute_ms.astype(np.float32)
        return cls(number, int(batch.step[0]), batch.plan_version, times, work)

    def batch(self, frame: _Frame) -> TelemetryBatch:
        tokens, sum_sq_len = self.work[:, frame.work]
        return TelemetryBatch(
            step=np.full(self.times.size, self.number, np.int64),
            compute_ms=self.times.astype(np.float64),
            tokens=tokens,
            sum_sq_len=sum_sq_len,
            plan_version=self.plan_version,
            **frame.columns,  # type: ignore[arg-type]
        )


class RecentSteps(Persistent):
    """The last steps, at most `steps` of them with at most `records` records together."""

    _saved = ("_frames", "_steps")
    _frames: dict[int, _Frame]
    _steps: deque[_Step]

    def __init__(self, steps: int = 64, records: int = 2_000_000) -> None:
        self._most_records = records
        self._frames = {}
        self._steps = deque(maxlen=steps)

    def add(self, step: TelemetryBatch, places: RankTable) -> None:
        """Keeps a step of at least one record, in the order of its records."""
        number = self._steps[-1].frame if self._steps else 0
        if number not in self._frames or not self._frames[number].fits(step):
            number += 1
            self._frames[number] = _Frame.of(step, places)
        self._steps.append(_Step.of(step, number, self._frames[number]))
        while len(self._steps) > 1 and sum(s.times.size for s in self._steps) > self._most_records:
            self._steps.popleft()
        for old in range(min(self._frames), self._steps[0].frame):
            del self._frames[old]

    def clear(self) -> None:
        """Forgets all steps."""
        self._steps.clear()
        self._frames.clear()

    def batches(self) -> tuple[TelemetryBatch, ...]:
        """The steps as records; times are rounded, and columns that the diagnosis does not need
        are unknown."""
        return tuple(step.batch(self._frames[step.frame]) for step in self._steps)
