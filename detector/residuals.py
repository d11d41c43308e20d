"""Residuals of a step, observed over expected compute time; their common mode and their noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .arrays import MAD_TO_SIGMA, Bools, Floats, Ints, group_median, mad_sigma, median


@dataclass(frozen=True)
class FixedShare:
    """Share of the expected time that does not grow with the work; arrays over ranks.

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
class Misfit:
    """Largest errors (log) of the predictions of a step, 0 where the work is known; over ranks.

    from_peers, from_past   of a rank's level against that of its peers, against its own past
    moved                   whether its past is no longer a reference
    """

    from_peers: Floats
    from_past: Floats
    moved: Bools


@dataclass(frozen=True)
class StepResidual:
    """Residuals of one step; arrays over ranks.

    value   log of observed over expected compute time; NaN where there is none
    error   standard error by the expectation and the number of records
    records number of records behind it
    spread  robust standard deviation of single records around their rank's value
    wider   spread of healthy ranks over that of devices: reference ranks add their own offsets
    fixed   its variation with the fixed share; None where lengths are known
    passes  those of the forward and of the backward passes alone; None without lengths
    misfit  how far the predictions may be wrong for work unlike any before; None without lengths
    expected_ms
            predicted time of each record on a healthy device; NaN where nothing predicts it
    """

    value: Floats
    error: Floats
    records: Ints
    spread: float
    wider: float = 1.0
    fixed: FixedShare | None = None
    passes: Sequence[StepResidual] | None = None
    misfit: Misfit | None = None
    expected_ms: Floats | None = None


_NEAR = 4.0
"""Standard deviations within which a rank counts as unchanged."""
_GAP = 3.0
"""Standard deviations between unchanged and changed ranks."""
_LEAST_STEPS = 3
"""Steps of a past from which a rank can count as unchanged."""
_STAYERS = 0.2
"""Share of unchanged ranks in a class from which the others changed by themselves; fewer only count
as unchanged."""
MAJORITY = 3


def common_change(
    change: Floats, classes: Ints, trusted: Bools, past: Floats, noise: Floats
) -> Floats:
    """Common-mode change of each rank's peers, to be removed from its residual.

    As a rule that is the median change of the class against its past: a map or a class of records
    has changed. Where most ranks have moved and some have stayed exactly where they were, it is
    zero: a common cause would have moved those too.

    change   of every rank against its past (log), NaN where it has no record
    trusted  ranks that are not under suspicion; all of a class that has none
    past     number of steps in each rank's past; noise: standard deviation of its residual

    Classes of fewer than three take the median over the job, or no change where half of the job
    has none: what befalls one half alone is no common cause.
    """
    seen = np.isfinite(change)
    size = int(classes.max()) + 1
    counts = np.bincount(classes[seen], minlength=size)
    sound = np.bincount(classes[seen & trusted], minlength=size) > 0
    use = seen & (trusted | ~sound[classes])
    middle = group_median(change[use], classes[use], size)
    many = counts >= MAJORITY
    ordered = np.sort(change[use])
    below, above = ordered[(ordered.size - 1) // 2], ordered[ordered.size // 2]
    result: Floats = np.where(many[classes], middle[classes], min(max(below, 0.0), above))
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
"""Steps between the residuals of a difference; only those that are small against the window are
used, or a change of level would enter too many of the differences."""
_PERIODS = 4
_LATEST = 3
"""Latest steps left out of differences over a gap, so that an onset does not mask itself."""
_ENOUGH = 8
"""Least number of differences of all ranks; fewer count where no other ranks tell the noise."""
FEW_RANKS = 4
"""Ranks whose distances in one step tell its noise; fewer have only differences between steps."""
_OWN = 6
"""Least number of differences of one rank for a noise of its own."""
_POOL = 8.0
"""Weight of the noise of all ranks, in differences."""


def noise_of(window: NDArray[np.float32]) -> Floats:
    """Standard deviation of one step's residual of each rank; 0 where it is not known.

    Measured on differences between steps: a change of level enters one difference, not all that
    follow, so that the records of a slow device do not raise its noise. Differences over several
    steps separate lasting noise, such as a slow swing, from noise of single steps; the largest
    counts.

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


def is_noise_uncertain(window: NDArray[np.float32]) -> bool:
    """Return whether the noise of few ranks rests on fewer differences than it should."""
    known = np.isfinite(window[1:] - window[:-1])
    return window.shape[1] < FEW_RANKS and int(np.count_nonzero(known)) < _ENOUGH


def _over(window: NDArray[np.float32], gap: int) -> Floats:
    """Noise by differences over `gap` steps: each rank's own, shrunk towards that of all."""
    change = np.abs(window[gap:] - window[:-gap]) / np.sqrt(2.0)
    counts = np.isfinite(change).sum(axis=0)
    number = int(counts.sum())
    if number < (_ENOUGH if window.shape[1] >= FEW_RANKS else 1):
        return np.zeros(window.shape[1])
    pooled = mad_sigma(change, 0.0) * (1.0 + 4.0 / number if number >= _ENOUGH else 1.0)
    own = np.where(counts >= _OWN, MAD_TO_SIGMA * median(change, 0)[0], pooled)
    result: Floats = np.sqrt((_POOL * pooled**2 + counts * own**2) / (_POOL + counts))
    return result
