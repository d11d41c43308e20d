"""What a step says of every rank: observed over expected compute time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .arrays import MAD_TO_SIGMA, Bools, Floats, Ints, column_median, group_median, mad_sigma


@dataclass(frozen=True)
class FixedShare:
    """The part of the expected time that does not grow with the work; arrays over ranks.

    mean     share of the expected time, over the rank's records
    unsure   standard error of that share
    both     sum over the records of (share - mean) * residual
    square   sum over the records of (share - mean)**2
    noise    standard deviation of a record's residual
    """

    mean: Floats
    unsure: Floats
    both: Floats
    square: Floats
    noise: float


@dataclass(frozen=True)
class StepResidual:
    """What one step says of every rank; arrays over ranks.

    value   log of observed over expected compute time; NaN where there is none
    error   standard error that the expectation and the number of records leave
    records number of records behind it
    spread  robust standard deviation of single records around their rank's value
    wider   how much further apart healthy ranks lie than devices: witnesses bring their own offsets
    fixed   what of it does not grow with the work; None where lengths tell
    """

    value: Floats
    error: Floats
    records: Ints
    spread: float
    wider: float = 1.0
    fixed: FixedShare | None = None


_NEAR = 4.0
"""Standard deviations within which a rank has stayed."""
_GAP = 3.0
"""Standard deviations between those that stayed and those that moved."""
_LEAST_STEPS = 3
"""Steps of a past that can be stayed at."""
_STAYERS = 0.2
"""Share of a class that stayed from which the movers are slow or fast by themselves; the word of
fewer clears them alone."""
MAJORITY = 3


def common_change(
    change: Floats, classes: Ints, trusted: Bools, past: Floats, noise: Floats
) -> Floats:
    """What is to be taken off each rank's residual.

    change   of every rank against its past (log), NaN where it has no record
    trusted  ranks that are not under suspicion; a class without any is judged by all of its ranks
    past     steps that each rank's past rests on; noise: standard deviation of its residual

    Classes of fewer than three take the median over the job.
    """
    seen = np.isfinite(change)
    size = int(classes.max()) + 1
    counts = np.bincount(classes[seen], minlength=size)
    sound = np.bincount(classes[seen & trusted], minlength=size) > 0
    use = seen & (trusted | ~sound[classes])
    middle = group_median(change[use], classes[use], size)
    many = counts >= MAJORITY
    result: Floats = np.where(many[classes], middle[classes], float(np.median(change[use])))
    usual = float(np.median(noise))
    moved = many & (np.abs(np.nan_to_num(middle)) > _NEAR * usual)
    if not moved.any() or not usual:
        return result
    way = np.abs(np.nan_to_num(change))
    near = seen & (way <= _NEAR * noise)
    unknown = np.bincount(classes[seen & (past < _LEAST_STEPS)], minlength=size)
    stayed = np.bincount(classes[near], minlength=size)
    nearest, least = np.zeros(size), np.full(size, np.inf)
    np.maximum.at(nearest, classes[near], way[near])
    np.minimum.at(least, classes[seen & ~near], way[seen & ~near])
    clear = moved & (stayed > 0) & (unknown == 0) & (least - nearest > _GAP * usual)
    by_themselves = clear & (stayed >= _STAYERS * counts)
    result[by_themselves[classes] | (clear[classes] & near)] = 0.0
    return result


_GAPS = (1, 4, 8)
"""Steps between the residuals of a difference; one that is not small against the window is not
used, for a change of level would then enter too many of its differences."""
_PERIODS = 4
_LATEST = 3
"""Steps whose differences over a gap are left out, so that an onset does not hide itself."""
_ENOUGH = 8
"""Differences of all ranks from which their noise is known."""
_OWN = 6
"""Differences of one rank from which its own noise counts."""
_POOL = 8.0
"""Differences' worth of trust in the noise of all ranks."""


def noise_of(window: NDArray[np.float32]) -> Floats:
    """Standard deviation of one step's residual of each rank; 0 where it is not known.

    window   residuals (log), shape (steps, ranks), oldest first, NaN where there is none

    >>> level = np.repeat([0.0, 0.05], 10)[:, None] + np.zeros(4)
    >>> noisy = level + 0.01 * np.random.default_rng(0).normal(size=(20, 4))
    >>> noise_of(noisy.astype(np.float32)).round(2).tolist()
    [0.01, 0.01, 0.01, 0.01]
    """
    steps, ranks = window.shape
    result: Floats = np.zeros(ranks)
    for gap in _GAPS:
        if gap == 1:
            result = _over(window, gap)
        elif steps >= _PERIODS * gap:
            np.maximum(result, _over(window[:-_LATEST], gap), out=result)
    return result


def _over(window: NDArray[np.float32], gap: int) -> Floats:
    """The noise told by differences over `gap` steps: each rank's own, shrunk towards that of
    all of them."""
    change = np.abs(window[gap:] - window[:-gap]) / np.sqrt(2.0)
    counts = np.isfinite(change).sum(axis=0)
    number = int(counts.sum())
    if number < _ENOUGH:
        return np.zeros(window.shape[1])
    pooled = mad_sigma(change, 0.0) * (1.0 + 4.0 / number)
    own = np.where(counts >= _OWN, MAD_TO_SIGMA * column_median(change), pooled)
    result: Floats = np.sqrt((_POOL * pooled**2 + counts * own**2) / (_POOL + counts))
    return result
