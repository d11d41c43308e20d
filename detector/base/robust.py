"""Robust location and scale, for many groups at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .arrays import Floats, Ints

MAD_TO_SIGMA = 1.4826
"""Median absolute deviation to standard deviation, for a normal distribution."""

_PADDED = 3
"""Cells for each value up to which groups are laid out as rows: sorting those is ten times faster
than sorting all values by group."""


def group_median(values: Floats, groups: Ints, size: int) -> Floats:
    """Median of each of `size` groups; NaN where a group has no value.

    >>> group_median(np.array([1.0, 9.0, 2.0, 5.0]), np.array([0, 0, 0, 2]), 3).tolist()
    [2.0, nan, 5.0]
    """
    counts = np.bincount(groups, minlength=size)
    start = np.concatenate([[0], np.cumsum(counts)[:-1]])
    longest = int(counts.max(initial=0))
    if size * longest <= _PADDED * values.size:  # groups of about equal size are rows
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
    low, high = (counts[some] - 1) // 2, counts[some] // 2
    result[some] = 0.5 * (ordered[start[some] + low] + ordered[start[some] + high])
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


def column_median(values: NDArray[np.floating]) -> Floats:
    """Median of the finite values of each column; NaN where there are none.

    >>> column_median(np.array([[1.0, np.nan], [4.0, np.nan], [2.0, np.nan]])).tolist()
    [2.0, nan]
    """
    ordered = np.sort(values.T, axis=1)  # NaN sorts last; rows lie together in memory
    counts = np.isfinite(ordered).sum(axis=1)
    row = np.arange(counts.size)
    low, high = np.maximum(counts - 1, 0) // 2, np.minimum(counts // 2, values.shape[0] - 1)
    result: Floats = 0.5 * (ordered[row, low] + ordered[row, high]).astype(np.float64)
    return result


def mad_sigma(values: NDArray[np.floating], centre: float | None = None) -> float:
    """Robust standard deviation of the finite values; 0 where there are none.

    >>> round(mad_sigma(np.array([1.0, 2.0, 3.0, 100.0])), 3)
    1.483
    """
    finite = values[np.isfinite(values)]
    if not finite.size:
        return 0.0
    middle = float(np.median(finite)) if centre is None else centre
    return MAD_TO_SIGMA * float(np.median(np.abs(finite - middle)))
