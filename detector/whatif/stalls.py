"""Passes that were held up: by garbage collection or whatever else stops a host for a moment.

The passes of a microbatch tell its work, each by an affine map. A pause falls into one of them:
"Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI'25, section 5.4)
found garbage collection to prolong single passes of a rank, in other ranks at other steps.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .expected import by_other_passes
from .ops import Floats
from .order import deviation, quantile, running_median

_LEAST = 0.25
"""A pass was held up if it took longer (log) than the others let expect by this much."""
_SIGMAS = 8.0
"""And by this many standard deviations of what passes usually differ by."""
_SHORT = 0.5
"""Passes that should take less than this share of the usual one are where maps are off most."""
_WINDOW = 9
_FEW = 3


def without_stalls(times: Floats) -> NDArray[np.float64]:
    """Times [direction 2, stage C, replica D, step T, microbatch M], those of passes that were
    held up as the others of the microbatch let expect. NaN stays NaN.

    What both passes on a device show is no pause but work that the maps do not fit. Nor is what
    every replica shows in a microbatch of that number.
    """
    logs = np.log(np.asarray(times, np.float64))
    joined = times.reshape(1, -1, *times.shape[2:])
    expected = by_other_passes(joined).reshape(times.shape)
    expected = np.maximum(expected, _SHORT * quantile(times, 0.5, axis=(2, 3, 4)))
    away = logs - np.log(expected)
    away = away - _usual(away)
    away = away - quantile(away, 0.5, axis=(2, 3))
    least = max(_LEAST, _SIGMAS * deviation(away))
    late = away - np.maximum(away[::-1], 0.0)
    return np.asarray(np.exp(logs - np.where(late > least, late, 0.0)), np.float64)


def _usual(away: Floats) -> NDArray[np.float64]:
    """What the passes of every device usually are away by, in each direction, [2, C, D, T, 1].

    It is that of the step, so that a device that is slow for some steps is not held up; with few
    microbatches, that of the steps around it.
    """
    level = quantile(away, 0.5, axis=4)
    few = np.isfinite(away).sum(axis=4, keepdims=True) < _FEW
    return np.where(few, running_median(level, axis=3, window=_WINDOW), level)
