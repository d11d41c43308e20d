"""From residuals of records to one level per rank: in a step, and over the past steps."""

from __future__ import annotations

import numpy as np

from ..arrays import Bools, Floats, Ints, group_location, group_median, mad_sigma
from ..persistence import Persistent

_APART = 6.0
"""Distance of the two kinds of passes from which they count as apart, in standard deviations."""
_ODD = 4.0
"""The same where each kind has one record: from there on a robust mean rejects both."""
_VARIES = 0.1
"""Relative change of that distance from one step to the next that is tolerated."""
_NEAR = 3.0
"""Standard deviations within which a record agrees with the others of its kind."""
_LEAST = 2
"""Least number of records of each kind that agree: a single one may have been interrupted."""


_ENOUGH = 4.0
"""Microbatches of a step from which it separates a rank's level from their work."""
_FADE = 0.2
_LEVEL_STEPS = 6
"""Steps in which the level of a class is still learned; later only its shape is."""


class RankLevels(Persistent):
    """Level (log) of each rank: in a step, and over the past steps.

    A rank has one level for all its passes of a step, unless forward and backward passes are
    clearly apart, as where a fault slows one kind of kernel only. With one record of each kind,
    they are apart if they were so in the step before, by as much.

    The level is removed from a rank's records before anything is learned from them, so that a slow
    device does not become the norm. With many microbatches in a step, that is the level of the
    step. With one, level and work cannot be separated in a step, and the usual level of the rank's
    past steps is used instead.

    spread  robust standard deviation of single records around their rank's level
    usual   level of each rank over the past steps
    steps   number of past steps
    """

    _saved = ("spread", "usual", "_apart", "_trusted", "steps", "_before")

    def __init__(self, classes: Ints) -> None:
        self._classes = classes
        self.usual, self._apart, self._trusted = np.zeros((3, classes.size))
        self.spread = 0.0
        self.steps = 0
        self._between = self._before = np.full(classes.size, np.nan)

    def locate(
        self, residual: Floats, expected: Floats, rank: Ints, backward: Bools, weights: Floats
    ) -> tuple[Floats, Floats, Ints, Floats]:
        """Log of observed over expected time of each rank, NaN where there is none; the effective
        and the actual number of its records; the same log by kind of pass, shape (2, ranks).

        Arguments are arrays over records. Where the two kinds of passes are apart, each gets its
        level, weighted by its expected time.
        """
        size = self._classes.size
        seen = mad_sigma(residual - group_median(residual, rank, size)[rank], 0.0)
        self.spread = 0.8 * self.spread + 0.2 * seen if self.steps else seen
        spread = max(self.spread, 1e-4)
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
        records = np.bincount(rank, minlength=size)
        by_pass = np.where(counts > 0, level, np.nan).reshape(size, 2).T
        return np.where(records > 0, value, np.nan), left, records, by_pass

    def of(self, value: Floats, microbatches: Floats) -> Floats:
        """Level of each rank in a step with the residuals `value` (NaN where there is none)."""
        by_step = _by_step(microbatches)
        return by_step * np.nan_to_num(value) + (1.0 - by_step) * self.usual

    def scatter(self, left: Floats, microbatches: Floats) -> float:
        """Scatter of healthy records beyond their own noise: where levels are not known from the
        step, that of all remaining residuals; else 0."""
        untold = 1.0 - float(np.median(_by_step(microbatches[microbatches > 0])))
        return untold * mad_sigma(left, 0.0)

    def beyond_class(self, own: Floats, trusted: Bools) -> Floats:
        """`own` without the level of the class, as long as that is still learned."""
        if self.steps >= _LEVEL_STEPS:
            return own
        return own - self._common(own, trusted)

    def _common(self, own: Floats, trusted: Bools) -> Floats:
        """Level of each class: the median over its trusted ranks of their difference from their
        usual offset, so that it does not move when a rank is no longer trusted."""
        size = int(self._classes.max()) + 1
        change = (own - self._apart)[trusted]
        common: Floats = np.nan_to_num(group_median(change, self._classes[trusted], size))
        return common[self._classes]

    def observe(self, value: Floats, trusted: Bools) -> None:
        """Ends a step: adds its levels to the usual ones, and those of trusted ranks to their
        offsets in their class."""
        known = np.isfinite(value)
        trusted = trusted & known
        if self.steps < _LEVEL_STEPS and trusted.any():
            offset = value - self._common(value, trusted)
            self._trusted[trusted] += 1.0
            step = (offset - self._apart) / np.maximum(self._trusted, 1.0)
            self._apart[trusted] += step[trusted]
        self.steps += 1
        self.usual[known] += max(_FADE, 1.0 / self.steps) * (value - self.usual)[known]
        self._before = self._between


def _by_step(microbatches: Floats) -> Floats:
    """Weight of the level of a step with so many microbatches, 0 to 1."""
    return np.clip((microbatches - 1.0) / (_ENOUGH - 1.0), 0.0, 1.0)
