"""Where the residuals of each rank lie in a step: one level for all its passes, unless its forward
and its backward passes clearly lie apart, as where a fault slows one kind of kernel only."""

from __future__ import annotations

import numpy as np

from ..base.arrays import Bools, Floats, Ints, State
from ..base.robust import group_location

_APART = 6.0
"""Standard deviations of a record between the two kinds from which they lie apart."""
_ODD = 4.0
"""The same where each kind has one record: from there on their mean trusts neither."""
_VARIES = 0.1
"""Share of what lies between them that it may change by from one step to the next."""
_NEAR = 3.0
"""Standard deviations within which a record agrees with the others of its kind."""
_LEAST = 2
"""Records of each kind that must agree: a single one may have been interrupted."""


class Locations:
    """Locates the residuals of `size` ranks, step after step.

    A rank with one record of each kind has no others to agree with: its kinds lie apart if they
    did so in the step before, by as much.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._between = self._before = np.full(size, np.nan)

    def of(
        self,
        residual: Floats,
        expected: Floats,
        rank: Ints,
        backward: Bools,
        spread: float,
        weights: Floats,
    ) -> tuple[Floats, Floats]:
        """Log of observed over expected time of each rank, NaN where there is none, and the number
        of records that it rests on.

        Arguments are arrays over records; `spread` is their standard deviation. Where the two
        kinds of passes lie apart each gets its level, and counts by its share of the expected time.
        """
        size = self._size
        value, left = group_location(residual, rank, size, spread, weights)
        kind = 2 * rank + backward
        level, kept = group_location(residual, kind, 2 * size, spread, weights)
        near = kind[np.abs(residual - level[kind]) <= _NEAR * spread]
        counts, agree = (np.bincount(which, minlength=2 * size) for which in (kind, near))
        sound = (agree >= _LEAST) & (2 * agree > counts)
        self._between = np.subtract(*level.reshape(size, 2).T)
        distance = np.abs(self._between)
        apart = sound.reshape(size, 2).all(axis=1) & (distance > _APART * spread)
        single = (counts.reshape(size, 2) == 1).all(axis=1) & (distance > _ODD * spread)
        change = np.abs(self._between - self._before)
        apart |= single & (change < _APART * spread + _VARIES * distance)
        if apart.any():
            time = np.bincount(kind, expected, 2 * size).reshape(size, 2)[apart]
            share = time / time.sum(axis=1, keepdims=True)
            value[apart] = np.log((share * np.exp(level.reshape(size, 2)[apart])).sum(axis=1))
            left[apart] = 1.0 / (share**2 / kept.reshape(size, 2)[apart]).sum(axis=1)
        return value, left

    def close(self) -> None:
        """A step is over: what lay between the kinds in it is what did before the next."""
        self._before = self._between

    def state(self) -> State:
        """What `load` needs."""
        return {"before": self._before}

    def load(self, state: State) -> None:
        """Takes up what `state` returned."""
        self._before = state["before"]
