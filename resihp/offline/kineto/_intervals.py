"""Sets of intervals on a time axis."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]


class Intervals:
    """A union of intervals, as disjoint ones in ascending order."""

    def __init__(self, start: Times, stop: Times) -> None:
        order = np.argsort(start, kind="stable")
        start, reach = start[order], np.maximum.accumulate(stop[order])
        first = np.ones(start.size, bool)
        first[1:] = start[1:] > reach[:-1]
        self.start: Times = start[first]
        self.stop: Times = reach[np.append(first[1:], True)] if start.size else reach
        self._sum = np.concatenate([[0.0], np.cumsum(self.stop - self.start)])

    @property
    def length(self) -> float:
        """Length of all intervals."""
        return float(self._sum[-1])

    def within(self, start: Times | float, stop: Times | float) -> float:
        """Length of the part that lies within other disjoint intervals."""
        return float(np.sum(self._until(stop) - self._until(start)))

    def gap(self, at: Times) -> tuple[Times, Times]:
        """Edges of the gap in which each moment lies; both NaN within an interval."""
        index = np.searchsorted(self.start, at, side="right")
        before = np.concatenate([[-np.inf], self.stop])[index]
        after = np.concatenate([self.start, [np.inf]])[index]
        inside = at < before
        return np.where(inside, np.nan, before), np.where(inside, np.nan, after)

    def _until(self, at: Times | float) -> Times:
        """Length of the part before each moment."""
        if not self.start.size:
            return np.zeros(np.shape(at))
        index = np.searchsorted(self.start, at, side="right")
        beyond = np.maximum(self.stop[np.maximum(index - 1, 0)] - at, 0.0)
        result: Times = self._sum[index] - np.where(index > 0, beyond, 0.0)
        return result
