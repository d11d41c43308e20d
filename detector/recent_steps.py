"""The records of the last steps, for the diagnosis: only what it looks at, and narrow.

The steps of a job look alike: the same ranks, microbatches and ops in the same order. So that
frame is kept once, and each step keeps its times (as 32-bit floats) and its microbatches' work.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import Op, TelemetryBatch

from .arrays import Ints, State
from .rank_table import RankTable

_FRAME = ("rank", "microbatch", "chunk", "op", "peer")
_COMPUTE = (int(Op.FORWARD), int(Op.BACKWARD))


@dataclass(frozen=True, eq=False)
class _Frame:
    """What the records of a step have in common with those of the next; arrays over records.

    work   position of the microbatch among those of the step; -1 for records of none
    """

    columns: dict[str, NDArray[np.integer]]
    work: NDArray[np.int32]

    @classmethod
    def of(cls, batch: TelemetryBatch, places: RankTable) -> _Frame:
        replica = places.dp[places.index(batch.rank.astype(np.int64))]
        some = (batch.microbatch >= 0) & np.isin(batch.op, _COMPUTE)
        key = np.where(some, (replica << 32) | batch.microbatch, -1)
        distinct, work = np.unique(key, return_inverse=True)
        work = work.reshape(-1) - int(distinct[0] == -1)
        columns = {name: getattr(batch, name) for name in _FRAME}
        return cls(columns, work.astype(np.int32))

    def fits(self, batch: TelemetryBatch) -> bool:
        return all(np.array_equal(self.columns[name], getattr(batch, name)) for name in _FRAME)


@dataclass(frozen=True, eq=False)
class _Step:
    """One step: `times` and `known` (whether work was told) over records, the work [2, M]."""

    frame: _Frame
    number: int
    plan_version: int
    times: NDArray[np.float32]
    known: NDArray[np.uint8]
    work: NDArray[np.int64]

    @classmethod
    def of(cls, batch: TelemetryBatch, frame: _Frame) -> _Step:
        told = (frame.work >= 0) & (batch.tokens >= 0) & (batch.sum_sq_len >= 0)
        work = np.full((2, int(frame.work.max(initial=-1)) + 1), -1, np.int64)
        work[:, frame.work[told]] = batch.tokens[told], batch.sum_sq_len[told]
        times = batch.compute_ms.astype(np.float32)
        known = np.packbits(told) if told.any() else np.empty(0, np.uint8)
        return cls(frame, int(batch.step[0]), batch.plan_version, times, known, work)

    def batch(self) -> TelemetryBatch:
        work = np.full((2, self.times.size), -1, np.int64)
        if self.known.size:
            told = np.unpackbits(self.known, count=self.times.size).astype(bool)
            work[:, told] = self.work[:, self.frame.work[told]]
        return TelemetryBatch(
            step=np.full(self.times.size, self.number, np.int64),
            compute_ms=self.times.astype(np.float64),
            tokens=work[0],
            sum_sq_len=work[1],
            plan_version=self.plan_version,
            **self.frame.columns,  # type: ignore[arg-type]
        )


class RecentSteps:
    """The last steps, at most `steps` of them with at most `records` records together."""

    def __init__(self, steps: int = 64, records: int = 2_000_000) -> None:
        self._most_records = records
        self._steps: deque[_Step] = deque(maxlen=steps)

    def add(self, step: TelemetryBatch, places: RankTable) -> None:
        """Keeps a step of at least one record, in the order of its records."""
        frame = self._steps[-1].frame if self._steps else None
        if frame is None or not frame.fits(step):
            frame = _Frame.of(step, places)
        self._steps.append(_Step.of(step, frame))
        while len(self._steps) > 1 and self._records() > self._most_records:
            self._steps.popleft()

    def _records(self) -> int:
        return sum(step.times.size for step in self._steps)

    def clear(self) -> None:
        """Forgets all steps."""
        self._steps.clear()

    def batches(self) -> tuple[TelemetryBatch, ...]:
        """The steps as records; times are rounded, and what the diagnosis needs not is unknown."""
        return tuple(step.batch() for step in self._steps)

    def state(self) -> State:
        """What `load` needs."""
        steps = list(self._steps)
        fresh = [True, *(one.frame is not other.frame for one, other in pairwise(steps))]
        return {
            "frames": [
                {**step.frame.columns, "work": step.frame.work}
                for step, new in zip(steps, fresh, strict=False)
                if new
            ],
            "steps": [
                {
                    "frame": at,
                    "number": step.number,
                    "plan_version": step.plan_version,
                    "times": step.times,
                    "known": step.known,
                    "work": step.work,
                }
                for step, at in zip(steps, _positions(fresh), strict=False)
            ],
        }

    def load(self, state: State) -> None:
        """Takes up what `state` returned."""
        frames = []
        for saved in state["frames"]:
            columns = dict(saved)
            frames.append(_Frame(work=columns.pop("work"), columns=columns))
        self._steps.clear()
        for saved in state["steps"]:
            fields = dict(saved)
            frame = frames[fields.pop("frame")]
            self._steps.append(_Step(frame=frame, **fields))


def _positions(fresh: list[bool]) -> Ints:
    """Which of the frames each step has."""
    positions: Ints = np.cumsum(fresh, dtype=np.int64) - 1
    return positions
