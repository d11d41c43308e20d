"""Means and order statistics over some axes that pass over NaN; NaN where nothing is left."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .ops import Floats

Axes = int | tuple[int, ...]


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
