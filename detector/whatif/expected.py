"""What a pass is expected to take for the work of its microbatch.

Times have the axes [direction, stage C, replica D, step T, microbatch M], NaN where nothing was
recorded.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .ops import Floats
from .order import median, quantile


def by_other_passes(times: Floats) -> NDArray[np.float64]:
    """By what the other stages took for the same microbatch, in the same direction.

    The lower median over the stages' opinions, so that a slow device does not pass for work.
    """
    middle = median(times, axis=1)
    maps = np.array(
        [
            [_affine(middle[direction, 0], stage) for stage in stages]
            for direction, stages in enumerate(times)
        ]
    )
    offset, slope = maps[:, :, 0, None, None, None], maps[:, :, 1, None, None, None]
    work = quantile((times - offset) / slope, 0.5, axis=1)
    floor = 0.05 * median(times, axis=(2, 3, 4))
    return np.asarray(np.maximum(offset + slope * work, floor), np.float64)


def by_lengths(times: Floats, work: Floats) -> NDArray[np.float64]:
    """By a fit of the stage's times on the sizes of its microbatches."""
    terms = np.concatenate([np.ones_like(work[:1]), work])
    expected = np.empty(times.shape)
    for index in np.ndindex(times.shape[:2]):
        expected[index] = _fit(terms, times[index])
    return expected


def _affine(work: Floats, times: Floats) -> tuple[float, float]:
    """Offset and slope of `times` against `work`; no offset where the two hardly go together."""
    use = np.isfinite(work) & np.isfinite(times)
    x, y = work[use], times[use]
    if x.size < 8:
        return 0.0, float(y.mean() / x.mean()) if x.size else 1.0
    for _ in range(2):
        dx, dy = x - x.mean(), y - y.mean()
        both, of_x, of_y = float(dx @ dy), float(dx @ dx), float(dy @ dy)
        if of_x <= 0 or both <= 0 or both**2 < 0.5 * of_x * of_y:
            return 0.0, float(np.median(y / x))
        slope = both / of_x
        offset = float(y.mean() - slope * x.mean())
        error = np.abs(y - offset - slope * x) / y
        usual = error <= max(5.0 * float(np.median(error)), 1e-6)
        x, y = x[usual], y[usual]
    return offset, slope


def _fit(terms: Floats, times: Floats) -> NDArray[np.float64]:
    """Times that the terms [K, …] explain, in least squares of the relative error, twice."""
    use = np.isfinite(times) & np.isfinite(terms).all(axis=0)
    fitted = np.full(times.shape, np.nan)
    if not use.any():
        return fitted
    x, y = terms[:, use], times[use]
    scale = np.maximum(np.abs(x).mean(axis=1, keepdims=True), 1e-12)
    rows = np.ones(y.size, bool)
    for _ in range(2):
        a = (x / scale / y)[:, rows].T
        weights = np.linalg.lstsq(a, np.ones(a.shape[0]), rcond=1e-6)[0]
        predicted = weights @ (x / scale)
        error = np.abs(y / np.maximum(predicted, 1e-12) - 1.0)
        rows = error <= max(5.0 * float(np.median(error)), 1e-6)
    fitted[use] = np.maximum(predicted, 0.05 * float(np.median(y)))
    return fitted
