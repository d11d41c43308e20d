"""Makespan bounds from the in-flight limits of a schedule, for given layers and relaxed ones."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

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
    p2p: ArrayLike = 0.0,
    max_in_flight: int | None = None,
    schedule: Schedule | None = Schedule.ONE_F_ONE_B,
) -> Floats:
    """Lower bound of the makespan of pipelines with given stage times.

    forward, backward  [..., pipeline, stage]; microbatches [pipeline]; result [..., pipeline]
    p2p                time of a transfer between stages s and s + 1: one for all, or [pipeline, s]
    schedule           None: any order of whole passes

    Holds for any order of passes within the schedule's in-flight limits c_s. Stage s starts after
    the forwards and ends before the backwards of the stages before it, in total A_s. Its own work
    is m * w_s, w = F + B. Before its first backward it waits for the round trip D_s through the
    stages behind it, during which it may run c_s - 1 more forwards; after its last forward
    likewise, with backwards. Both waits count if m > c_s, else the longer one:

        T >= A_s + m w_s + max(0, D_s - (c_s-1) F_s) + max(0, D_s - (c_s-1) B_s)

    It equals (m + p - 1) w for equal stages. With a backward split into I + W, other stages wait
    for I only, and W of the l_s microbatches in flight can be deferred: until after the last I,
    which removes them from the work before it (second line), or into the last wait (first line).

        T >= A^F_s + m w_s + max(0, D_s - (c_s-1) F_s) + max(0, D_s - (c_s-1) I_s - (l_s-1) W_s)
        T >= A_s + W_0 + m w_s - l_s W_s + max(0, D_s - (c_s-1) F_s) + max(0, D_s - (c_s-1) I_s)

    Here A^F counts forwards only, A and D count F + I; for equal passes the bound is
    m w + (p-1)(F + I - W) (Qi et al., 2024).
    """
    f, b = np.asarray(forward, float), np.asarray(backward, float)
    m = np.asarray(microbatches, float)[:, None]
    stages = f.shape[-1]
    passes = PassTimes.of(f, b, schedule)
    trip = passes.trip
    transfers = transfers_before(np.asarray(p2p, float), stages)
    upto = np.cumsum(trip, axis=-1) + 2.0 * transfers
    before = upto - trip
    behind = upto[..., -1:] - upto
    reached = np.zeros(1)
    limits = InFlightLimits.of(schedule, stages, max_in_flight)
    if limits.split:
        reached = np.cumsum(f, axis=-1) - f + transfers
        before[..., 1:] += passes.weight[..., :1]
    bounds = stage_line(passes, m, limits, reached=reached, before=before, behind=behind)
    return np.asarray((bounds * (m > 0)).max(axis=-1))


def transfers_before(p2p: Floats, stages: int) -> Floats:
    """Time of the transfers before each stage, [stage] or [pipeline, stage].

    `p2p`: one for all boundaries between stages, or [pipeline, boundary].
    """
    if not p2p.ndim:
        return np.asarray(p2p * np.arange(stages))
    return np.cumsum(np.pad(p2p, ((0, 0), (1, 0))), axis=1)


_NO_WEIGHT = np.zeros((1, 1))


class PassTimes(NamedTuple):
    """Pass times of one microbatch; the weight half is 0 unless the backward is split."""

    forward: Floats
    inputs: Floats
    weight: Floats

    @classmethod
    def of(cls, forward: Floats, backward: Floats, schedule: Schedule | None) -> PassTimes:
        """Pass times under a schedule for given forwards and whole backwards."""
        if schedule is not Schedule.ZERO_BUBBLE:
            return cls(forward, backward, _NO_WEIGHT)
        weight = backward * WEIGHT_PART
        return cls(forward, backward - weight, weight)

    @property
    def trip(self) -> Floats:
        """Forward, and the part of the backward that the previous stage waits for."""
        return self.forward + self.inputs


class InFlightLimits(NamedTuple):
    """In-flight limits: microbatches with pending input gradient, and with held activations."""

    owed: NDArray[np.intp]
    held: NDArray[np.intp]
    split: bool

    @classmethod
    @cache
    def of(
        cls, schedule: Schedule | None, stages: int, max_in_flight: int | None
    ) -> InFlightLimits:
        """Limits of all stages."""
        owed = np.array(most_ahead(schedule, stages, max_in_flight))
        held = np.array(most_in_flight(schedule, stages, max_in_flight))
        return cls(owed, held, schedule is Schedule.ZERO_BUBBLE)

    def at(self, stage: int) -> InFlightLimits:
        """Limits of one stage."""
        return InFlightLimits(self.owed[stage], self.held[stage], self.split)


def stage_line(
    passes: PassTimes,
    m: Floats,
    limits: InFlightLimits,
    *,
    reached: Floats,
    before: Floats,
    behind: Floats,
) -> Floats:
    """Bound of `in_flight_bound` from one stage, or from each stage of an array.

    reached  forwards of the stages before it: A^F_s
    before   round trip through the stages before it, plus W_0 if there are any: A_s + W_0
    behind   round trip through the stages behind it: D_s
    """
    owed, held, split = limits
    forward, inputs, weight = passes
    more, apart = np.minimum(owed, m) - 1, m > owed
    filling = np.maximum(0.0, behind - more * forward)
    draining = np.maximum(0.0, behind - more * inputs)
    work = m * (forward + inputs + weight)
    bounds = before + work + np.where(apart, filling + draining, np.maximum(filling, draining))
    if not split:
        return np.asarray(bounds)
    held = np.minimum(held, m)
    draining = np.maximum(0.0, behind - more * inputs - (held - 1) * weight)
    waits = np.where(apart, filling + draining, np.maximum(filling, draining))
    return np.maximum(reached + work + waits, bounds - held * weight)


def relaxed_factors(
    speeds: ArrayLike,
    microbatches: ArrayLike,
    schedule: Schedule | None = Schedule.ONE_F_ONE_B,
    forward_part: tuple[float, float] = (0.0, 1.0),
    chunks: int = 1,
) -> Floats:
    """Makespan bound per unit of work of one microbatch, over all fractional layer partitions.

    speeds        work per millisecond, [pipeline, stage]
    microbatches  [pipeline]
    forward_part  least and largest fraction of a stage's time taken by its forward, for a split
                  backward
    chunks        model chunks that share the layers of an interleaved stage evenly; only the trip
                  through the first chunks of the stages before counts

    With Σ_s speed_s w_s = work, any weights λ >= 0 of sum 1 give `T >= Σ_s λ_s (line s)`, where
    line s is the bound of `in_flight_bound` without its max(0, ·), for 1F1B
    `A_s + (m - c_s + 1) w_s + 2 D_s`. It is linear in w, so its least ratio to the work is a bound.
    The λ of equal ratios make it tight; negative ones are set to 0, which keeps the bound valid.
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
    m: Floats,
    stages: int,
    schedule: Schedule | None,
    forward_part: tuple[float, float],
    chunks: int,
) -> tuple[float, Floats, Floats | float]:
    """Coefficients in line s of stages before s, of s, and behind s, [., s, .]."""
    if schedule is Schedule.INTERLEAVED:
        return 1.0 / chunks, m, 0.0
    owed = np.array(most_ahead(schedule, stages))[None, :, None]
    if schedule is Schedule.ZERO_BUBBLE:
        least, most = forward_part
        returning = least + (1.0 - least) * (1.0 - WEIGHT_PART)
        return least, m - (np.minimum(owed, m) - 1) * most, returning
    apart = m > owed
    return 1.0, np.where(apart, m - owed + 1, m), np.where(apart, 2.0, 0.0)
