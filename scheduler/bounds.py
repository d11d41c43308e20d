"""Lower bounds of a step, each of which holds for every plan of the class that it names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from resihp.contracts import Schedule
from resihp.pipeline.orders import most_ahead, most_in_flight
from resihp.pipeline.replay import WEIGHT_PART

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
    """Lower bound of the span of given pipelines under any order that holds the schedule's limits.

    forward, backward  [pipeline, stage]; microbatches [pipeline]

    Stage s is reached after the forwards before it and left before the backwards before it, A_s.
    It works m * w_s, w = F + B. Before its first backward it waits for a trip through the stages
    behind, D_s, during which it may run c_s - 1 more forwards; after its last forward likewise,
    with backwards. The two waits are apart as soon as m > c_s; else only one counts:

        T >= A_s + m w_s + max(0, D_s - (c_s-1) F_s) + max(0, D_s - (c_s-1) B_s)

    It equals (m + p - 1) w when all stages are alike. Where the backward is split into I + W, only
    I is waited for, and W of the l_s microbatches in flight can be put off: until after the last
    I, which takes those off the work before it (second line), or into the last wait (first line).

        T >= A^F_s + m w_s + max(0, D_s - (c_s-1) F_s) + max(0, D_s - (c_s-1) I_s - (l_s-1) W_s)
        T >= A_s + W_0 + m w_s - l_s W_s + max(0, D_s - (c_s-1) F_s) + max(0, D_s - (c_s-1) I_s)

    Here A^F counts forwards alone, A and D count F + I; it is m w + (p-1)(F + I - W) for equal
    passes (Qi et al., 2024).
    """
    f, b = np.asarray(forward, float), np.asarray(backward, float)
    m = np.asarray(microbatches, float)[:, None]
    stages = f.shape[1]
    weight = b * (WEIGHT_PART if schedule is Schedule.ZERO_BUBBLE else 0.0)
    inputs = b - weight
    trip = f + inputs
    index = np.arange(stages)
    before = np.cumsum(trip, axis=1) - trip + 2 * p2p * index
    behind = trip.sum(axis=1, keepdims=True) + 2 * p2p * (stages - 1) - before - trip
    owed = np.array(most_ahead(schedule, stages, max_in_flight))
    more = np.minimum(owed, m) - 1
    filling = np.maximum(0.0, behind - more * f)
    draining = np.maximum(0.0, behind - more * inputs)
    apart = m > owed
    waits = np.where(apart, filling + draining, np.maximum(filling, draining))
    spans = before + m * (f + b) + waits
    if schedule is Schedule.ZERO_BUBBLE:
        held = np.minimum(most_in_flight(schedule, stages, max_in_flight), m)
        draining = np.maximum(0.0, behind - more * inputs - (held - 1) * weight)
        waits = np.where(apart, filling + draining, np.maximum(filling, draining))
        reached = np.cumsum(f, axis=1) - f + p2p * index
        own = reached + m * (f + b) + waits
        spans = np.maximum(own, spans - held * weight + weight[:, :1] * (index > 0))
    return np.asarray(np.where(m > 0, spans, 0.0).max(axis=1))


def chain_factors(
    speeds: ArrayLike,
    microbatches: ArrayLike,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
    forward_part: tuple[float, float] = (0.0, 1.0),
) -> Floats:
    """Least span per unit of work of one microbatch, however the layers are spread.

    speeds  [pipeline, stage], work per millisecond; microbatches [pipeline]

    The schedule is any but the interleaved one; `forward_part` holds the least and the largest
    part of a stage's time that its forward takes, which matters for a split backward. With
    Σ_s speed_s w_s = work, any weights λ >= 0 that sum to one give `T >= Σ_s λ_s (line s)`, where
    line s is a bound of `in_flight_bound` without its max(0, ·): `A_s + (m - c_s + 1) w_s + 2 D_s`
    for 1F1B. That is linear in w, so its least ratio to the work is a bound. The λ that make all
    ratios equal make it tight; where one of them would be negative it is set to 0, which keeps the
    bound valid. Fractional layers are allowed.
    """
    p = np.asarray(speeds, float)
    m = np.asarray(microbatches, float)[:, None, None]
    stages = p.shape[1]
    row, column = np.indices((stages, stages))
    before, own, behind = _line(m, stages, schedule, forward_part)
    gain = np.where(column < row, before, np.where(column == row, own, behind))
    transposed = np.swapaxes(gain, 1, 2)
    weights = np.linalg.solve(transposed, p[:, :, None])
    weights = np.maximum(weights, 0.0)
    weights /= weights.sum(axis=1, keepdims=True)
    ratios = (transposed @ weights)[:, :, 0] / p
    floor = m[:, 0, 0] / p.sum(axis=1)
    return np.asarray(np.maximum(ratios.min(axis=1), floor))


def _line(
    m: Floats, stages: int, schedule: Schedule, forward_part: tuple[float, float]
) -> tuple[float, Floats, Floats | float]:
    """What the times of stages before s, of s itself and behind it count in its line, [., s, .]."""
    owed = np.array(most_ahead(schedule, stages))[None, :, None]
    if schedule is Schedule.ZERO_BUBBLE:
        least, most = forward_part
        returning = least + (1.0 - least) * (1.0 - WEIGHT_PART)
        return least, m - (np.minimum(owed, m) - 1) * most, returning
    apart = m > owed
    return 1.0, np.where(apart, m - owed + 1, m), np.where(apart, 2.0, 0.0)


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


def least_span(
    pipelines: Sequence[Pipelines],
    schedule: Schedule = Schedule.ONE_F_ONE_B,
    forward_part: tuple[float, float] = (0.0, 1.0),
) -> float:
    """Least step time in which these pipelines can run as many microbatches as they do.

    Holds for every layer partition (fractional ones too) and every whole quota with the same sum,
    with the groups where they are. Every pipeline adds one microbatch after the other at the times
    that `chain_factors` names; the least time is the one at which all of them together have the
    total. Only numbers of microbatches near `quotas` are looked at, and more as far as needed.
    """
    low, high = 2, 2
    while True:
        tables = [_times(part, low, high, schedule, forward_part) for part in pipelines]
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
    part: Pipelines, low: int, high: int, schedule: Schedule, forward_part: tuple[float, float]
) -> tuple[Floats, NDArray[np.int64]]:
    """Times at which each further microbatch fits, [offset, pipeline]; and how many came before."""
    first = np.maximum(part.quotas - low, 0)
    counts = first + np.arange(1, low + high + 1)[:, None]
    factors = [chain_factors(part.speeds, row, schedule, forward_part) for row in counts]
    times = np.stack(factors) * part.work
    return np.maximum.accumulate(times, axis=0), first
