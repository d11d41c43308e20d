"""How far a healthy rank's residual scatters from step to step, whatever its level does.

Measured on differences between steps, not on distances from what is usual: a change of level, as
when a device slows or what expects it changes, enters one difference and not all that follow. So
a slow device's own records do not make it seem noisy. Differences over several steps tell noise
that lasts, such as a slow swing, from noise of single steps; the largest counts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..base.arrays import Floats
from ..base.robust import MAD_TO_SIGMA, column_median, mad_sigma

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
