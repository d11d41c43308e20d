"""A lower bound of pipelines over every way to spread work, parts of layers among it."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from resihp.contracts import Schedule
from resihp.pipeline.orders import most_ahead
from resihp.pipeline.replay import WEIGHT_PART

Floats = NDArray[np.float64]


def chain_factors(
    speeds: ArrayLike,
    microbatches: ArrayLike,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
    forward_part: tuple[float, float] = (0.0, 1.0),
    chunks: int = 1,
) -> Floats:
    """Least span per unit of work of one microbatch, however the layers are spread.

    speeds  [pipeline, stage], work per millisecond; microbatches [pipeline]

    `forward_part` holds the least and the largest part of a stage's time that its forward takes,
    which matters for a split backward; `chunks` how many model chunks share the layers of an
    interleaved stage evenly: a stage waits for a trip through the first ones before it, and no more
    is certain. With
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
    before, own, behind = _line(m, stages, schedule, forward_part, chunks)
    gain = np.where(column < row, before, np.where(column == row, own, behind))
    transposed = np.swapaxes(gain, 1, 2)
    weights = np.linalg.solve(transposed, p[:, :, None])
    weights = np.maximum(weights, 0.0)
    weights /= weights.sum(axis=1, keepdims=True)
    ratios = (transposed @ weights)[:, :, 0] / p
    floor = m[:, 0, 0] / p.sum(axis=1)
    return np.asarray(np.maximum(ratios.min(axis=1), floor))


def _line(
    m: Floats, stages: int, schedule: Schedule, forward_part: tuple[float, float], chunks: int
) -> tuple[float, Floats, Floats | float]:
    """What the times of stages before s, of s itself and behind it count in its line, [., s, .]."""
    if schedule is Schedule.INTERLEAVED:
        return 1.0 / chunks, m, 0.0
    owed = np.array(most_ahead(schedule, stages))[None, :, None]
    if schedule is Schedule.ZERO_BUBBLE:
        least, most = forward_part
        returning = least + (1.0 - least) * (1.0 - WEIGHT_PART)
        return least, m - (np.minimum(owed, m) - 1) * most, returning
    apart = m > owed
    return 1.0, np.where(apart, m - owed + 1, m), np.where(apart, 2.0, 0.0)
