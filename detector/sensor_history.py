"""Latest sensor readings of every rank: a few samples, each with the steps that it covers."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from resihp.contracts import SensorSample

from .arrays import Bools, Floats, Ints, positions
from .persistence import Persistent

_KEPT = 12
"""Samples kept of a rank. One a step where steps are long, else one a heartbeat."""
_PAST = 5
"""Samples from before the onset that are kept of a rank that is not healthy."""


class SensorHistory(Persistent):
    """Samples of all ranks of a layout; empty until the first one arrives.

    steps     first and last step that a sample covers, shape (2, ranks, `_KEPT`), oldest first, -1
              where there is none. A sample begins within the first, that of the sample before
    readings  by sensor, shape (sensors, ranks, `_KEPT`); NaN where not measured
    """

    _saved = ("_steps", "_seconds", "_numbers", "_readings")
    _numbers: dict[str, int]

    def __init__(self, ranks: Ints) -> None:
        self._follow(ranks)
        self._allocate(0)

    def _follow(self, ranks: Ints) -> None:
        self._ranks = ranks
        self._at = {rank: at for at, rank in enumerate(ranks.tolist())}

    def _allocate(self, size: int) -> None:
        self._steps = np.full((2, size, _KEPT), -1, np.int64)
        self._seconds = np.zeros((size, _KEPT), np.float32)
        self._numbers, self._readings = {}, np.empty((0, size, _KEPT), np.float32)

    @property
    def names(self) -> list[str]:
        """Sensors that any rank has."""
        return list(self._numbers)

    def position(self, rank: int) -> int:
        """Position of a rank; -1 if it is not in the layout."""
        return self._at.get(rank, -1)

    def observe(self, at: int, step: int, sample: SensorSample, onset: int | None) -> None:
        """Add a sample of the rank at a position, which is in `step` and has been slow since the
        step `onset`, -1 for the first one; None if it is healthy. Samples of one step are
        merged."""
        if not len(self._seconds):
            self._allocate(self._ranks.size)
        if step < int(self._steps[1, at, -1]):
            self._empty(np.array([at]))
        if is_new := step != int(self._steps[1, at, -1]):
            self._append(at, step, onset)
        seconds = float(self._seconds[at, -1]) + sample.seconds
        self._seconds[at, -1], share = seconds, sample.seconds / seconds
        for name, value in sample.readings().items():
            if name not in self._numbers:
                self._add(name)
            readings = self._readings[self._numbers[name], at]
            before = float(readings[-1])
            if is_new or not np.isfinite(before):
                readings[-1] = value
            elif name == "xid":  # a code, not a quantity
                readings[-1] = value or before
            else:
                readings[-1] = before + share * (value - before)

    def _add(self, name: str) -> None:
        """Make room for the readings of a sensor."""
        self._numbers[name] = len(self._numbers)
        column = np.full((1, *self._seconds.shape), np.nan, np.float32)
        self._readings = np.concatenate([self._readings, column])

    def _append(self, at: int, step: int, onset: int | None) -> None:
        """Make room for a sample: the oldest one goes, or of a slow rank the oldest one since the
        onset where few are left from before it."""
        gone, known = 0, self._steps[1, at]
        if onset is not None and known[0] >= 0:
            past = int(np.count_nonzero(known < onset))
            gone = past if past <= _PAST else 0
        last = int(known[-1])
        for table in (self._steps, self._seconds, self._readings):
            table[..., at, gone:-1] = table[..., at, gone + 1 :]
        self._steps[:, at, -1] = last, step
        self._seconds[at, -1], self._readings[:, at, -1] = 0.0, np.nan

    def forget(self, ranks: Collection[int]) -> None:
        """Drop the samples of ranks, as their processes were replaced."""
        if len(self._seconds):
            at = positions(self._ranks, np.array(list(ranks), np.int64))
            self._empty(at[at >= 0])

    def _empty(self, at: Ints) -> None:
        self._steps[:, at] = -1
        self._readings[:, at] = np.nan

    def clear(self) -> None:
        """Drop all samples."""
        self._allocate(0)

    def move(self, ranks: Ints) -> None:
        """Follow the job to a layout of other ranks, which are sorted."""
        steps, seconds, readings = self._steps, self._seconds, self._readings
        at, numbers = positions(self._ranks, ranks), self._numbers
        self._follow(ranks)
        self._allocate(ranks.size if len(seconds) else 0)
        if len(seconds):
            stay, rows = at >= 0, at[at >= 0]
            self._steps[:, stay], self._seconds[stay] = steps[:, rows], seconds[rows]
            for name in numbers:
                self._add(name)
            self._readings[:, stay] = readings[:, rows]

    def version(self, at: int) -> tuple[int, float]:
        """A value that changes with each sample of the rank at a position, which has some."""
        return int(self._steps[1, at, -1]), float(self._seconds[at, -1])

    def is_known(self, at: int) -> bool:
        """Return whether the rank at a position has samples."""
        return len(self._seconds) > 0 and bool(self._steps[1, at, -1] >= 0)

    @property
    def known(self) -> Bools:
        """Ranks with samples."""
        if not len(self._seconds):
            return np.zeros(self._ranks.size, bool)
        found: Bools = self._steps[1, :, -1] >= 0
        return found

    def since(self, name: str, rows: Ints, onset: int) -> Floats:
        """Readings of a sensor of the ranks at some positions, in samples that begin no earlier
        than in the step before `onset`; with -1, in all."""
        first, last = self._steps[:, rows]
        late = (first >= onset - 1) | (onset < 0)
        return self._finite(name, rows, late & (last >= 0))

    def before(self, name: str, at: int, onset: int) -> Floats:
        """Readings of a sensor of the rank at a position, in samples that end before the step
        before `onset`; without that of the start."""
        rows = np.array([at])
        first, last = self._steps[:, rows]
        return self._finite(name, rows, (first >= 0) & (last < onset - 1))

    def _finite(self, name: str, rows: Ints, cells: Bools) -> Floats:
        values: Floats = self._readings[self._numbers[name], rows][cells].astype(np.float64)
        return values[np.isfinite(values)]
