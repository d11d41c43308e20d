"""Array types, and robust statistics over arrays in which NaN marks a missing value."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def positions(ordered: Ints, wanted: NDArray[np.integer]) -> Ints:
    """Positions of values in `ordered`, which is sorted, without repetitions and not empty; -1
    where they are absent.

    >>> positions(np.array([2, 5, 7]), np.array([7, 3, 2])).tolist()
    [2, -1, 0]
    """
    first, size = int(ordered[0]), ordered.size
    if int(ordered[-1]) - first == size - 1:  # without gaps, as most ranks are
        at = wanted.astype(np.int64) - first
        inside = at.view(np.uint64) < size
        return at if inside.all() else np.where(inside, at, -1)
    found = np.minimum(np.searchsorted(ordered, wanted), size - 1)
    return np.where(ordered[found] == wanted, found, -1)


def appended(window: Any, row: Any, most: int) -> Any:
    """The `most` latest rows of a window, oldest first, with a new one.

    >>> appended(np.array([1, 2, 3]), 4, 3).tolist()
    [2, 3, 4]
    """
    return np.concatenate([window[max(len(window) + 1 - most, 0) :], np.array([row], window.dtype)])


ODD = np.uint64(0x9E37_79B9_7F4A_7C15)
"""Multiplier of a hash, whose upper bits depend on all bits of the factor (Knuth)."""


def distinct_rows(matrix: Floats) -> tuple[Ints, Ints]:
    """Positions of rows of which no two are equal, and for each row the number of its equal among
    them.

    >>> rows, equal = distinct_rows(np.array([[1.0, 2.0], [3.0, 2.0], [1.0, 2.0]]))
    >>> rows.size, equal[0] == equal[2] != equal[1]
    (2, np.True_)
    """
    key = np.zeros(len(matrix), np.uint64)
    for column in matrix.astype(np.float64).view(np.uint64).T:
        key = (key ^ (key >> np.uint64(32)) ^ column) * ODD
    _, rows, equal = np.unique(key, return_index=True, return_inverse=True)
    if not np.array_equal(matrix[rows][equal], matrix):  # two rows with one hash
        rows = equal = np.arange(len(matrix))
    return rows, equal


MAD_TO_SIGMA = 1.4826
"""Median absolute deviation to standard deviation, for a normal distribution."""

_FEW, _PADDED = 512, 3
"""Values up to which all are sorted by group, and cells per value up to which groups of more are
laid out as rows: sorting rows is ten times faster then."""


def group_median(values: Floats, groups: Ints, size: int) -> Floats:
    """Median of each of `size` groups; NaN where a group has no value.

    >>> group_median(np.array([1.0, 9.0, 2.0, 5.0]), np.array([0, 0, 0, 2]), 3).tolist()
    [2.0, nan, 5.0]
    """
    counts = np.bincount(groups, minlength=size)
    start = np.cumsum(counts) - counts
    longest = int(counts.max(initial=0))
    if values.size > _FEW and size * longest <= _PADDED * values.size:  # of about equal size
        order = np.argsort(groups, kind="stable")
        rows = np.full((size, longest), np.nan)
        member = groups[order]
        rows[member, np.arange(order.size) - start[member]] = values[order]
        ordered = np.sort(rows, axis=1).reshape(-1)
        start = np.arange(size) * longest
    else:
        ordered = values[np.lexsort((values, groups))]
    result = np.full(size, np.nan)
    some = counts > 0
    low, high = start + (counts - 1) // 2, start + counts // 2
    result[some] = 0.5 * (ordered[low[some]] + ordered[high[some]])
    return result


def group_location(
    values: Floats, groups: Ints, size: int, scale: float, weights: Floats | None = None
) -> tuple[Floats, Floats]:
    """Weighted Huber location of each group, and the sum of the weights that were left.

    One reweighting from the median: values further than two `scale` from it count less, values
    beyond six not at all, so that one interrupted microbatch moves nothing (Huber 1964; the
    rejection after Hampel 1974).
    """
    centre = group_median(values, groups, size)
    distance = np.abs(values - centre[groups]) / max(scale, 1e-12)
    trust = np.where(distance <= 2.0, 1.0, 2.0 / np.maximum(distance, 2.0))
    trust = np.where(distance > 6.0, 0.0, trust)
    if weights is not None:
        trust = trust * weights
    total = np.bincount(groups, trust, size)
    mean = np.bincount(groups, trust * (values - centre[groups]), size)
    result: Floats = centre + mean / np.maximum(total, 1e-12)
    return result, total.astype(np.float64)


def mad_sigma(values: NDArray[np.floating], centre: float | None = None) -> float:
    """Robust standard deviation of the finite values; 0 where there are none.

    >>> round(mad_sigma(np.array([1.0, 2.0, 3.0, 100.0])), 3)
    1.483
    """
    finite = values[np.isfinite(values)]
    if not finite.size:
        return 0.0
    middle = _middle(finite) if centre is None else centre
    return MAD_TO_SIGMA * _middle(np.abs(finite - middle))


def _middle(finite: NDArray[np.floating]) -> float:
    """Median of some values: as numpy's, which takes several times as long for a few of them."""
    low, high = (finite.size - 1) // 2, finite.size // 2
    ordered = np.partition(finite, (low, high))
    return 0.5 * float(ordered[low] + ordered[high])


Axes = int | tuple[int, ...]
_TO_SIGMA = ((0.5, 1.4826), (0.8, 0.7803))  # quantiles of absolute deviations to a standard one


def mean(values: NDArray[np.floating], axis: Axes) -> NDArray[np.float64]:
    """Mean; the axes stay, with length 1."""
    finite = np.isfinite(values)
    count = finite.sum(axis=axis, keepdims=True)
    total = np.where(finite, values, 0.0).sum(axis=axis, keepdims=True)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def median(values: NDArray[np.floating], axis: Axes) -> NDArray[np.float64]:
    """Median; the axes stay, with length 1."""
    ordered, count, shape = _ordered(values, axis)
    low, high = (count - 1) // 2, count // 2
    return (0.5 * (_pick(ordered, low) + _pick(ordered, high))).reshape(shape)


def quantile(values: NDArray[np.floating], q: float, axis: Axes) -> NDArray[np.float64]:
    """The value at rank `q * (n - 1)`, rounded down; the axes stay, with length 1.

    With `q` 0.5 this is the median, or the lower of the two middle values.
    """
    ordered, count, shape = _ordered(values, axis)
    return _pick(ordered, ((count - 1) * q).astype(np.intp)).reshape(shape)


def deviation(away: NDArray[np.floating]) -> float:
    """Standard deviation of values that are distances from their middle; 0 if there are none.

    The larger of two robust ones: half of the values may be away by nothing, since each of them is
    the middle of its peers.
    """
    size, every = np.abs(away), tuple(range(away.ndim))
    if not np.isfinite(size).any():
        return 0.0
    return max(times * float(quantile(size, q, every).item()) for q, times in _TO_SIGMA)


def running_median(values: NDArray[np.floating], axis: int, window: int) -> NDArray[np.float64]:
    """Median over a window along an axis; the window is cut off at the two ends."""
    half = window // 2
    width = [(0, 0)] * values.ndim
    width[axis] = (half, half)
    padded = np.pad(values, width, constant_values=np.nan)
    views = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1, axis=axis)
    return median(views, axis=-1)[..., 0]


def _ordered(
    values: NDArray[np.floating], axis: Axes
) -> tuple[NDArray[np.float64], NDArray[np.intp], tuple[int, ...]]:
    """The axes merged into the last one and sorted, NaN last; the number of finite values; the
    shape of the result."""
    axes = (axis,) if isinstance(axis, int) else axis
    axes = tuple(a % values.ndim for a in axes)
    kept = [a for a in range(values.ndim) if a not in axes]
    merged = math.prod(values.shape[a] for a in axes)
    moved = values.transpose(*kept, *axes).reshape(*(values.shape[a] for a in kept), merged)
    finite = np.isfinite(moved)
    ordered = np.sort(np.where(finite, moved, np.nan), axis=-1)
    shape = tuple(1 if a in axes else size for a, size in enumerate(values.shape))
    return ordered, finite.sum(axis=-1), shape


def _pick(ordered: NDArray[np.float64], index: NDArray[np.intp]) -> NDArray[np.float64]:
    """The value at an index; NaN where there is none, since then all are NaN."""
    rows = ordered.reshape(-1, ordered.shape[-1])
    at = np.maximum(index.reshape(-1), 0)
    return rows[np.arange(len(rows)), at].reshape(index.shape)
