"""Lower bounds of a step, each of which holds for every plan of the class that it names."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


def in_flight_bound(
    forward: ArrayLike,
    backward: ArrayLike,
    microbatches: ArrayLike,
    *,
    p2p: float = 0.0,
    max_in_flight: int | None = None,
) -> Floats:
    """Lower bound of the span of given pipelines under any order that holds the in-flight limit.

    forward, backward  [pipeline, stage]; microbatches [pipeline]

    Stage s, with w = F + B, is reached after the forwards before it and left before the backwards
    before it: A_s. It works m * w_s. Before its first backward it waits for a trip through the
    stages behind, D_s, during which it may run c_s - 1 more forwards; after its last forward
    likewise, with backwards. The two waits are apart as soon as m > c_s; else only one counts:

        T >= A_s + m w_s + max(0, D_s - (c_s-1) F_s) + max(0, D_s - (c_s-1) B_s)

    It equals (m + p - 1) w when all stages are alike.
    """
    f, b = np.asarray(forward, float), np.asarray(backward, float)
    m = np.asarray(microbatches, float)[:, None]
    stages = f.shape[1]
    w = f + b
    index = np.arange(stages)
    before = np.cumsum(w, axis=1) - w + 2 * p2p * index
    behind = w.sum(axis=1, keepdims=True) + 2 * p2p * (stages - 1) - before - w
    limit = np.minimum(stages - index, max_in_flight or stages)
    more = np.minimum(limit, m) - 1
    filling = np.maximum(0.0, behind - more * f)
    draining = np.maximum(0.0, behind - more * b)
    apart = m > limit
    waits = np.where(apart, filling + draining, np.maximum(filling, draining))
    return np.asarray(np.where(m > 0, before + m * w + waits, 0.0).max(axis=1))


def chain_factors(speeds: ArrayLike, microbatches: ArrayLike) -> Floats:
    """Least span of 1F1B per unit of work of one microbatch, however the layers are spread.

    speeds  [pipeline, stage], work per millisecond; microbatches [pipeline]

    With Σ_s speed_s w_s = work, any weights λ >= 0 that sum to one give
    `T >= Σ_s λ_s (A_s + (m - c_s + 1) w_s + 2 D_s)`, which is linear in w, so its least ratio to
    the work is a bound. The λ that make all ratios equal make it tight; where one of them would be
    negative it is set to 0, which keeps the bound valid. Fractional layers are allowed.
    """
    p = np.asarray(speeds, float)
    m = np.asarray(microbatches, float)[:, None, None]
    stages = p.shape[1]
    row, column = np.indices((stages, stages))
    limit = (stages - row)[None]
    apart = m > limit
    own = np.where(apart, m - limit + 1, m)
    behind = np.where(apart, 2.0, 0.0)
    gain = np.where(column < row, 1.0, np.where(column == row, own, behind))
    transposed = np.swapaxes(gain, 1, 2)
    weights = np.linalg.solve(transposed, p[:, :, None])
    weights = np.maximum(weights, 0.0)
    weights /= weights.sum(axis=1, keepdims=True)
    ratios = (transposed @ weights)[:, :, 0] / p
    floor = m[:, 0, 0] / p.sum(axis=1)
    return np.asarray(np.maximum(ratios.min(axis=1), floor))


def least_span(
    speeds: Floats, work: float, total: int, *, upper_ms: float, tolerance: float = 1e-4
) -> float:
    """Least step time with which pipelines of these speeds can run `total` microbatches.

    speeds [pipeline, stage] in work per millisecond; `work` of one microbatch. The bound holds for
    every layer partition (fractional ones too), every share and every whole quota, with the
    devices where they are. `upper_ms` is a step time that was reached.
    """
    low, high = 0.0, upper_ms
    while high - low > tolerance * upper_ms:
        middle = (low + high) / 2
        if _most(speeds, work, total, middle) >= total:
            high = middle
        else:
            low = middle
    return low


def _most(speeds: Floats, work: float, total: int, span: float) -> int:
    """Microbatches that all pipelines together can finish within `span`."""
    low = np.zeros(len(speeds), int)
    high = np.full(len(speeds), total)
    while (low < high).any():
        middle = (low + high + 1) // 2
        fits = chain_factors(speeds, middle) * work <= span * (1 + 1e-12)
        low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
    return int(low.sum())
