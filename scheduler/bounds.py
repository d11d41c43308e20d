"""Lower bounds of a step, each of which holds for every plan of the class that it names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from resihp.contracts import Schedule
from resihp.pipeline.orders import most_in_flight

Floats = NDArray[np.float64]


def in_flight_bound(
    forward: ArrayLike,
    backward: ArrayLike,
    microbatches: ArrayLike,
    *,
    p2p: float = 0.0,
    max_in_flight: int | None = None,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
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
    limit = np.array(most_in_flight(schedule, stages, max_in_flight))
    more = np.minimum(limit, m) - 1
    filling = np.maximum(0.0, behind - more * f)
    draining = np.maximum(0.0, behind - more * b)
    apart = m > limit
    waits = np.where(apart, filling + draining, np.maximum(filling, draining))
    return np.asarray(np.where(m > 0, before + m * w + waits, 0.0).max(axis=1))


def chain_factors(
    speeds: ArrayLike, microbatches: ArrayLike, schedule: Schedule = Schedule.ONE_F_ONE_B
) -> Floats:
    """Least span per unit of work of one microbatch, however the layers are spread.

    speeds  [pipeline, stage], work per millisecond; microbatches [pipeline]

    The schedule is 1F1B or its eager kind. With Σ_s speed_s w_s = work, any weights λ >= 0 that sum
    to one give `T >= Σ_s λ_s (A_s + (m - c_s + 1) w_s + 2 D_s)`, which is linear in w, so its least
    ratio to the work is a bound. The λ that make all ratios equal make it tight; where one of them
    would be negative it is set to 0, which keeps the bound valid. Fractional layers are allowed.
    """
    p = np.asarray(speeds, float)
    m = np.asarray(microbatches, float)[:, None, None]
    stages = p.shape[1]
    row, column = np.indices((stages, stages))
    limit = np.array(most_in_flight(schedule, stages))[None, :, None]
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


@dataclass(frozen=True, eq=False)
class Pipelines:
    """Pipelines of equally many stages.

    speeds  [pipeline, stage] in work per millisecond
    work    [pipeline] of one microbatch
    quotas  [pipeline] microbatches, where the search of the bound starts
    """

    speeds: Floats
    work: Floats
    quotas: NDArray[np.int64]


def least_span(pipelines: Sequence[Pipelines], schedule: Schedule = Schedule.ONE_F_ONE_B) -> float:
    """Least step time in which these pipelines can run as many microbatches as they do.

    Holds for every layer partition (fractional ones too) and every whole quota with the same sum,
    with the groups where they are. Every pipeline adds one microbatch after the other at the times
    that `chain_factors` names; the least time is the one at which all of them together have the
    total. Only numbers of microbatches near `quotas` are looked at, and more as far as needed.
    """
    low, high = 2, 2
    while True:
        tables = [_times(part, low, high, schedule) for part in pipelines]
        times = np.concatenate([table.ravel() for table, _ in tables])
        base = sum(int(first.sum()) for _, first in tables)
        total = sum(int(part.quotas.sum()) for part in pipelines)
        span = float(np.sort(times)[total - base - 1])
        if any((table[-1] <= span).any() for table, _ in tables):
            high *= 2
        elif any(((table[0] > span) & (first > 0)).any() for table, first in tables):
            low *= 2
        else:
            return span


def _times(
    part: Pipelines, low: int, high: int, schedule: Schedule
) -> tuple[Floats, NDArray[np.int64]]:
    """Times at which each further microbatch fits, [offset, pipeline]; and how many came before."""
    first = np.maximum(part.quotas - low, 0)
    counts = first + np.arange(1, low + high + 1)[:, None]
    factors = [chain_factors(part.speeds, row, schedule) * part.work for row in counts]
    return np.maximum.accumulate(np.stack(factors), axis=0), first
