"""Means and order statistics over some axes that pass over NaN; NaN where nothing is left."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .ops import Floats

Axes = int | tuple[int, ...]
_TO_SIGMA = ((0.5, 1.4826), (0.8, 0.7803))  # quantiles of absolute deviations to a standard one


def mean(values: Floats, axis: Axes) -> NDArray[np.float64]:
    """Mean; the axes stay, with length 1."""
    finite = np.isfinite(values)
    count = finite.sum(axis=axis, keepdims=True)
    total = np.where(finite, values, 0.0).sum(axis=axis, keepdims=True)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def median(values: Floats, axis: Axes) -> NDArray[np.float64]:
    """Median; the axes stay, with length 1."""
    ordered, count, shape = _ordered(values, axis)
    low, high = (count - 1) // 2, count // 2
    return (0.5 * (_pick(ordered, low) + _pick(ordered, high))).reshape(shape)


def quantile(values: Floats, q: float, axis: Axes) -> NDArray[np.float64]:
    """The value at rank `q * (n - 1)`, rounded down; the axes stay, with length 1.

    With `q` 0.5 this is the median, or the lower of the two middle values.
    """
    ordered, count, shape = _ordered(values, axis)
    return _pick(ordered, ((count - 1) * q).astype(np.intp)).reshape(shape)


def deviation(away: Floats) -> float:
    """Standard deviation of what values are away from their middle by; 0 if there are none.

    The larger of two robust ones: half of the values may be away by nothing, since each of them is
    the middle of its peers.
    """
    size, every = np.abs(away), tuple(range(away.ndim))
    if not np.isfinite(size).any():
        return 0.0
    return max(times * float(quantile(size, q, every).item()) for q, times in _TO_SIGMA)


def running_median(values: Floats, axis: int, window: int) -> NDArray[np.float64]:
    """Median over a window along an axis; the window is cut off at the two ends."""
    half = window // 2
    width = [(0, 0)] * values.ndim
    width[axis] = (half, half)
    padded = np.pad(values, width, constant_values=np.nan)
    views = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1, axis=axis)
    return median(views, axis=-1)[..., 0]


def _ordered(
    values: Floats, axis: Axes
) -> tuple[NDArray[np.float64], NDArray[np.intp], tuple[int, ...]]:
    """The axes merged into the last one and sorted, NaN last; how many are not NaN."""
    axes = (axis,) if isinstance(axis, int) else axis
    axes = tuple(a % values.ndim for a in axes)
    kept = [a for a in range(values.ndim) if a not in axes]
    moved = values.transpose(*kept, *axes).reshape(*(values.shape[a] for a in kept), -1)
    ordered = np.sort(np.where(np.isfinite(moved), moved, np.nan), axis=-1)
    shape = tuple(1 if a in axes else size for a, size in enumerate(values.shape))
    return ordered, np.isfinite(ordered).sum(axis=-1), shape


def _pick(ordered: NDArray[np.float64], index: NDArray[np.intp]) -> NDArray[np.float64]:
    """The value at an index; NaN where there is none, since then all are NaN."""
    at = np.clip(index, 0, ordered.shape[-1] - 1)
    return np.take_along_axis(ordered, at[..., None], axis=-1)[..., 0]
