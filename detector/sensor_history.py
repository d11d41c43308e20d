"""Latest sensor readings of every rank: a few samples, each with the steps that it covers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

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

    first, step  steps that a sample covers, shape (ranks, `_KEPT`), oldest first, -1 where there is
                 none. A sample begins within the step `first`, that of the sample before
    readings     by sensor, of the same shape; NaN where not measured
    """

    _saved = ("_first", "_step", "_seconds", "_readings")
    _readings: dict[str, Any]

    def __init__(self, ranks: Ints) -> None:
        self._ranks = ranks
        self._allocate(0)

    def _allocate(self, size: int) -> None:
        shape = (size, _KEPT)
        self._first, self._step = np.full(shape, -1, np.int64), np.full(shape, -1, np.int64)
        self._seconds = np.zeros(shape, np.float32)
        self._readings = {}

    @property
    def names(self) -> list[str]:
        """Sensors that any rank has."""
        return list(self._readings)

    def position(self, rank: int) -> int:
        """Position of a rank; -1 if it is not in the layout."""
        return int(positions(self._ranks, np.array([rank]))[0])

    def observe(self, at: int, step: int, sample: SensorSample, onset: int | None) -> None:
        """Add a sample of the rank at a position, which is in `step` and has been slow since the
        step `onset`, -1 for the first one; None if it is healthy. Samples of one step are
        merged."""
        if not len(self._step):
            self._allocate(self._ranks.size)
        if step < int(self._step[at, -1]):
            self._empty(np.array([at]))
        weight = sample.seconds
        if step == int(self._step[at, -1]):
            share = weight / (weight + float(self._seconds[at, -1]))
            self._seconds[at, -1] += weight
        else:
            share = 1.0
            self._append(at, step, weight, onset)
        for name, value in sample.readings().items():
            if name not in self._readings:
                self._readings[name] = np.full(self._step.shape, np.nan, np.float32)
            cell = self._readings[name][at]
            before = float(cell[-1])
            known = share < 1.0 and np.isfinite(before)
            if name == "xid":  # a code, not a quantity
                cell[-1] = value or (before if known else 0.0)
            else:
                cell[-1] = before + share * (value - before) if known else value

    def _append(self, at: int, step: int, seconds: float, onset: int | None) -> None:
        """Make room for a sample: the oldest one goes, or of a slow rank the oldest one since the
        onset where few are left from before it."""
        gone = 0
        if onset is not None:
            past = int(np.count_nonzero((self._step[at] >= 0) & (self._step[at] < onset)))
            free = int(np.count_nonzero(self._step[at] < 0))
            gone = past if not free and past <= _PAST else 0
        last = int(self._step[at, -1])
        for column in (self._first, self._step, self._seconds, *self._readings.values()):
            column[at, gone:-1] = column[at, gone + 1 :]
        self._first[at, -1], self._step[at, -1], self._seconds[at, -1] = last, step, seconds
        for column in self._readings.values():
            column[at, -1] = np.nan

    def forget(self, ranks: Collection[int]) -> None:
        """Drop the samples of ranks, as their processes were replaced."""
        if len(self._step):
            at = positions(self._ranks, np.array(list(ranks), np.int64))
            self._empty(at[at >= 0])

    def _empty(self, at: Ints) -> None:
        self._first[at] = self._step[at] = -1
        for column in self._readings.values():
            column[at] = np.nan

    def clear(self) -> None:
        """Drop all samples."""
        self._allocate(0)

    def move(self, ranks: Ints) -> None:
        """Follow the job to a layout of other ranks, which are sorted."""
        columns = (self._first, self._step, self._seconds, self._readings)
        at, size = positions(self._ranks, ranks), ranks.size if len(self._step) else 0
        self._ranks = ranks
        self._allocate(size)
        if size:
            first, step, seconds, readings = columns
            stay, rows = at >= 0, at[at >= 0]
            self._first[stay], self._step[stay] = first[rows], step[rows]
            self._seconds[stay] = seconds[rows]
            for name, column in readings.items():
                self._readings[name] = np.full(self._step.shape, np.nan, np.float32)
                self._readings[name][stay] = column[rows]

    def version(self, at: int) -> tuple[int, float]:
        """A value that changes with each sample of the rank at a position, which has some."""
        return int(self._step[at, -1]), float(self._seconds[at, -1])

    def is_known(self, at: int) -> bool:
        """Return whether the rank at a position has samples."""
        return len(self._step) > 0 and bool(self._step[at, -1] >= 0)

    @property
    def known(self) -> Bools:
        """Ranks with samples."""
        if not len(self._step):
            return np.zeros(self._ranks.size, bool)
        found: Bools = self._step[:, -1] >= 0
        return found

    def since(self, name: str, rows: Ints, onset: int) -> Floats:
        """Readings of a sensor of the ranks at some positions, in samples that begin no earlier
        than in the step before `onset`; with -1, in all."""
        late = (self._first[rows] >= onset - 1) | (onset < 0)
        return self._finite(name, rows, late & (self._step[rows] >= 0))

    def before(self, name: str, at: int, onset: int) -> Floats:
        """Readings of a sensor of the rank at a position, in samples that end before the step
        before `onset`; without that of the start."""
        rows = np.array([at])
        return self._finite(name, rows, (self._first[rows] >= 0) & (self._step[rows] < onset - 1))

    def _finite(self, name: str, rows: Ints, cells: Bools) -> Floats:
        values: Floats = self._readings[name][rows][cells].astype(np.float64)
        return values[np.isfinite(values)]
