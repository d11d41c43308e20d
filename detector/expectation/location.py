"""Where the residuals of each rank lie in a step: one level for all its passes, unless its forward
and its backward passes clearly lie apart, as where a fault slows one kind of kernel only."""

from __future__ import annotations

import numpy as np

from ..base.arrays import Bools, Floats, Ints
from ..base.robust import group_location

_APART = 6.0
"""Standard deviations of a record between the two kinds from which they lie apart."""
_NEAR = 3.0
"""Standard deviations within which a record agrees with the others of its kind."""
_LEAST = 2
"""Records of each kind that must agree: a single one may have been interrupted."""


def rank_location(
    residual: Floats,
    expected: Floats,
    rank: Ints,
    backward: Bools,
    size: int,
    spread: float,
    weights: Floats,
) -> tuple[Floats, Floats]:
    """Log of observed over expected time of each of `size` ranks, NaN where there is none, and the
    number of records that it rests on.

    Arguments are arrays over records; `spread` is their standard deviation. Where the two kinds of
    passes lie apart each gets its level, and counts by its share of the expected time.
    """
    value, left = group_location(residual, rank, size, spread, weights)
    kind = 2 * rank + backward
    level, kept = group_location(residual, kind, 2 * size, spread, weights)
    near = np.abs(residual - level[kind]) <= _NEAR * spread
    agree = np.bincount(kind[near], minlength=2 * size)
    sound = (agree >= _LEAST) & (2 * agree > np.bincount(kind, minlength=2 * size))
    low, high = level.reshape(size, 2).T
    apart = sound.reshape(size, 2).all(axis=1) & (np.abs(high - low) > _APART * spread)
    if apart.any():
        time = np.bincount(kind, expected, 2 * size).reshape(size, 2)[apart]
        share = time / time.sum(axis=1, keepdims=True)
        value[apart] = np.log((share * np.exp(level.reshape(size, 2)[apart])).sum(axis=1))
        left[apart] = 1.0 / (share**2 / kept.reshape(size, 2)[apart]).sum(axis=1)
    return value, left
