"""Decomposition of compute times into the effects of work, stage and device.

A pass takes `device factor * stage map(work)`. The work of a microbatch is the same in all of its
passes, so that it follows from other stages where no lengths are recorded. A stage maps it
affinely; a device multiplies. Times have the axes [direction 2, stage C, replica D, step T,
microbatch M], NaN where nothing was recorded. With interleaved chunks every chunk counts as a
stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import factorial

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import Cause

from ..arrays import deviation, mean, median, quantile, running_median
from .operations import Floats, Ints
from .places import HeldParts

EFFECTS = (Cause.DEVICE, Cause.STAGE_IMBALANCE, Cause.SEQUENCE_IMBALANCE)
SETS = tuple(frozenset(c) for size in range(4) for c in combinations(EFFECTS, size))
"""Every set of effects that can be removed together."""

_MICROBATCHES = (2, 3, 4)  # axes of all microbatches of the job
_MEMBERS = 0.03  # largest distance of healthy members of a group (log)
_SHIFT_SIGMAS = 4.0  # least shift of a device from its usual level, in standard deviations
_SHIFT_LEAST = 0.02  # least shift of a device from its usual level (log)
_UNSURE = 4.0  # standard errors of a usual level within which it counts as equal to the peers'


@dataclass(frozen=True, eq=False)
class Effects:
    """The effects in compute times, and the times with one of them removed.

    `work` [K, D, T, M] holds what is known of every microbatch's size, up to a factor each;
    None where nothing is recorded. `mates` are the times of another rank that computes the same
    microbatches; None where there is none. `known` [1, C, D, T, 1] are the factors of devices that
    are known to be slow: they are removed first, the rest is estimated. `by_host` are those of them
    that are slow because of their hosts. `parts` is what every place holds of the model; None where
    all replicas of a stage hold as much.
    """

    times: Floats
    work: Floats | None = None
    mates: NDArray[np.float64] | None = None
    known: NDArray[np.float64] | float = 1.0
    by_host: NDArray[np.float64] | None = None
    parts: HeldParts | None = None

    @property
    def separates_devices(self) -> bool:
        """True where slow devices can be separated from more work: by lengths, another stage or a
        mate."""
        return self.work is not None or self.times.shape[1] > 1 or self.mates is not None

    @cached_property
    def device(self) -> NDArray[np.float64]:
        """Factor [1, C, D, T, 1] by which a device is slower at that step than its peers, which
        hold as much of the model."""
        times, expected = self._times, self._expected
        residual = _relative(times) if expected is None else np.log(times / expected)
        level = median(residual, axis=(0, 4))[0, :, :, :, 0]
        found = np.exp(np.nan_to_num(_steady(level, self._kind, among_mates=self._among_mates)))
        return np.asarray(found[None, :, :, :, None] * self.known, np.float64)

    def without(self, gone: Collection[Cause]) -> NDArray[np.float64]:
        """The times without some effects.

        Without the device effect, every device is as fast as its peers in every step. Without the
        sequence effect, every microbatch of every replica holds the same work: each device takes
        its own mean, less what is expected of its lasting work beyond that of others. Without
        the stage effect, every stage takes as long as the median one.
        """
        times = self._evenly if Cause.SEQUENCE_IMBALANCE in gone else self._alike
        if Cause.STAGE_IMBALANCE in gone:
            times = times * self._stage
        return times if Cause.DEVICE in gone else times * self.device

    def host_share(self, step: Callable[[Floats], float]) -> float:
        """Share of the cost of slow devices that their hosts cause, by the mean saving over both
        orders of removal; `step` is the mean step with some compute times."""
        if self.by_host is None:
            return 0.0
        both, neither = step(self.times), step(self._alike)
        devices, hosts = step(self.times / self.by_host), step(self._alike * self.by_host)
        of_hosts = max(both - devices + hosts - neither, 0.0)
        of_devices = max(both - hosts + devices - neither, 0.0)
        total = of_hosts + of_devices
        return of_hosts / total if total > 0 else 0.0

    @property
    def of_equal_parts(self) -> NDArray[np.float64]:
        """The times if all devices were equally fast, of places of a stage that hold as much."""
        return np.asarray(self._alike / self._size, np.float64)

    @cached_property
    def _alike(self) -> NDArray[np.float64]:
        """The times if all devices were equally fast."""
        return np.asarray(self.times / self.device, np.float64)

    @cached_property
    def _evenly(self) -> NDArray[np.float64]:
        """The times if all devices were equally fast and all microbatches held the same work."""
        times = self._alike
        there = np.isfinite(times)
        own = mean(times, axis=(3, 4))
        if self._expected is not None:
            expected = np.where(there, self._expected, np.nan)
            held, usual = mean(expected, axis=(3, 4)), mean(expected, axis=_MICROBATCHES)
            away = mean((expected - held) ** 2, axis=(3, 4))
            unsure = _UNSURE * np.sqrt(away / np.maximum(there.sum(axis=(3, 4), keepdims=True), 1))
            own = own * np.where(np.abs(held - usual) > unsure, usual / held, 1.0)
        return np.where(there, own, np.nan)

    @cached_property
    def _stage(self) -> NDArray[np.float64]:
        """Factor [2, C, 1, 1, 1] from a stage to the median one."""
        stage = quantile(mean(self._alike, axis=(3, 4)), 0.5, axis=2)
        return np.asarray(median(stage, axis=1) / stage, np.float64)

    @cached_property
    def shared_work(self) -> float:
        """Share of the variation within a stage that the work explains, 0 to 1.

        With lengths, that is the squared correlation of the times with the expected ones. Without,
        work shows in every pass of a microbatch and noise only in one: it is the squared
        correlation of a pass with the mean of the microbatch's other passes.
        """
        logs = np.log(self.of_equal_parts)
        logs -= mean(logs, axis=_MICROBATCHES)
        if self.work is not None and self._expected is not None:
            told = np.log(np.where(np.isnan(logs), np.nan, self._expected))
            return _shared(logs, told - mean(told, axis=_MICROBATCHES))
        passes = logs.reshape(logs.shape[0] * logs.shape[1], -1)
        count = np.isfinite(passes).sum(axis=0)
        total = np.nansum(passes, axis=0)
        others = (total - passes) / np.maximum(count - 1, 1)
        return _shared(passes, np.where(count > 1, others, np.nan))

    @cached_property
    def _times(self) -> NDArray[np.float64]:
        """The times without the factors of known slow devices, of places that hold as much."""
        return np.asarray(self.times / (self.known * self._size), np.float64)

    @property
    def _size(self) -> Floats | float:
        return 1.0 if self.parts is None else self.parts.size

    @property
    def _kind(self) -> Ints:
        """Equal numbers [C, D] for places that are peers."""
        kind = np.zeros(self.times.shape[1:3], np.int64)
        return kind if self.parts is None else self.parts.kind

    @property
    def _among_mates(self) -> bool:
        """True where a device has no peers but the members of its tensor-parallel group."""
        return self.mates is not None and self.times.shape[2] == 1

    @cached_property
    def _expected(self) -> NDArray[np.float64] | None:
        """Times of a healthy device of the stage for the same work; None where they are unknown."""
        mates = None if self.mates is None else np.asarray(self.mates / self._size, np.float64)
        usual = mates if self._among_mates and mates is not None else self._times
        if self.work is not None:
            return by_lengths(usual, self.work)
        return by_other_passes(usual) if self.times.shape[1] > 1 else mates


def fair_costs(steps: Mapping[frozenset[Cause], float]) -> dict[Cause, float]:
    """Cost of each effect, from the mean step without each of `SETS`.

    Effects mask each other: of two heavy stages, or a slow device and a long sequence, both must be
    removed before the step gets shorter. So the cost of each is its Shapley value (Shapley 1953),
    the mean saving by its removal over all orders of removal; the costs sum to that of all effects.
    """
    count = len(EFFECTS)
    costs = dict.fromkeys(EFFECTS, 0.0)
    for gone, step in steps.items():
        for cause in gone:
            before = len(gone) - 1
            orders = factorial(before) * factorial(count - before - 1) / factorial(count)
            costs[cause] += orders * (steps[gone - {cause}] - step)
    return costs


def _shared(one: Floats, other: Floats) -> float:
    """Squared correlation of deviations, where both are known; 0 where they are opposed."""
    use = np.isfinite(one) & np.isfinite(other)
    x, y = one[use], other[use]
    spread = float((x @ x) * (y @ y))
    return max(float(x @ y), 0.0) ** 2 / spread if spread > 0 else 0.0


def _relative(times: Floats) -> NDArray[np.float64]:
    """Log of the times relative to the peers in the same step, where the work is unknown."""
    level = median(np.log(times), axis=4)
    peers = median(level, axis=2 if level.shape[2] > 1 else 3)
    return running_median(level - peers, axis=3, window=9)


def _steady(level: Floats, kind: Ints, *, among_mates: bool) -> NDArray[np.float64]:
    """Log factor [C, D, T] of every device: its usual level, or the present one where it differs
    for a few steps, or by far for one.

    The zero is the median of the peers of a stage, which are of one kind [C, D]; without peers, the
    faster steps of the device itself. What all places share in a step is no one's. With
    `among_mates`, the level is the distance of the slowest member of a group from the median one,
    and a zero above the usual distance of members is limited to that.
    """
    level = level - _common(level - median(level, axis=2))
    usual = median(level, axis=2)
    sigma = deviation(np.diff(level, axis=2)) / np.sqrt(2.0)  # a lasting change is not noise
    fast = np.fmin.reduce(running_median(level, axis=2, window=3), axis=2, keepdims=True)
    alone = np.where(usual - fast > max(2.0 * _SHIFT_LEAST, _SHIFT_SIGMAS * sigma), fast, usual)
    zero = _zero(usual, alone, kind)
    if among_mates:
        zero = np.minimum(zero, _MEMBERS)
    away = level - usual
    unsure = _UNSURE * sigma / np.sqrt(level.shape[2])
    usual = np.where(np.abs(usual - zero) > unsure, usual, zero)
    smooth = running_median(away, axis=2, window=3)
    left = np.abs(smooth) > max(_SHIFT_LEAST, _SHIFT_SIGMAS * sigma)
    alone = np.abs(away) > 2.0 * max(_SHIFT_LEAST, _SHIFT_SIGMAS * sigma)
    shift = np.where(alone, away, np.where(left, smooth, 0.0))
    return np.asarray(usual + shift - zero, np.float64)


def _common(away: Floats) -> NDArray[np.float64]:
    """Distance [1, 1, T] from their usual levels that nine in ten places share at least; 0 where
    fewer than two were recorded."""
    away = np.where(np.isfinite(away).sum(axis=(0, 1), keepdims=True) > 1, away, np.nan)
    low, high = quantile(away, 0.1, axis=(0, 1)), -quantile(-away, 0.1, axis=(0, 1))
    return np.asarray(np.nan_to_num(np.maximum(low, 0.0) + np.minimum(high, 0.0)), np.float64)


def _zero(usual: Floats, alone: Floats, kind: Ints) -> NDArray[np.float64]:
    """Level [C, D, 1] of healthy devices."""
    zero = np.empty(usual.shape)
    for place, kinds in enumerate(kind):
        for peers in (kinds == number for number in np.unique(kinds)):
            if np.isfinite(usual[place, peers]).sum() > 1:
                zero[place, peers] = quantile(usual[place, peers], 0.5, axis=0)
            else:
                zero[place, peers] = alone[place, peers]
    return zero


_STALL_LEAST = 0.25
"""Least excess (log) of a stalled pass over the expected time."""
_STALL_SIGMAS = 8.0
"""Least excess of a stalled pass, in standard deviations of usual differences."""
_SHORT = 0.5
"""Floor of the expected time, as a share of the usual one: maps are least exact for short
passes."""
_WINDOW = 9
_FEW = 3


def without_stalls(times: Floats) -> NDArray[np.float64]:
    """Times with those of stalled passes replaced by the expected ones; NaN stays NaN.

    A stall is a pause of a host that falls into one pass. "Understanding Stragglers in Large Model
    Training Using What-if Analysis" (OSDI'25, section 5.4) found garbage collection to prolong
    single passes of a rank, in other ranks at other steps. An excess in both passes of a microbatch
    on a device, or in that microbatch of every replica, is work that the maps do not fit.
    """
    logs = np.log(np.asarray(times, np.float64))
    joined = times.reshape(1, -1, *times.shape[2:])
    expected = by_other_passes(joined).reshape(times.shape)
    expected = np.maximum(expected, _SHORT * quantile(times, 0.5, axis=(2, 3, 4)))
    away = logs - np.log(expected)
    away = away - _usual(away)
    away = away - quantile(away, 0.5, axis=(2, 3))
    least = max(_STALL_LEAST, _STALL_SIGMAS * deviation(away))
    late = away - np.maximum(away[::-1], 0.0)
    return np.asarray(np.exp(logs - np.where(late > least, late, 0.0)), np.float64)


def _usual(away: Floats) -> NDArray[np.float64]:
    """Usual excess of the passes of every device in each direction, [2, C, D, T, 1].

    That of the step, so that a device that is slow for some steps does not count as stalled; with
    few microbatches, that of the steps around it.
    """
    level = quantile(away, 0.5, axis=4)
    few = np.isfinite(away).sum(axis=4, keepdims=True) < _FEW
    return np.where(few, running_median(level, axis=3, window=_WINDOW), level)


def by_other_passes(times: Floats) -> NDArray[np.float64]:
    """Expected times by those of the other stages for the same microbatch, in the same direction.

    The lower median over the stages is used, so that a slow device is not mistaken for work.
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
    """Expected times by a fit of each stage's times to the sizes of its microbatches."""
    terms = np.concatenate([np.ones_like(work[:1]), work])
    expected = np.empty(times.shape)
    for index in np.ndindex(times.shape[:2]):
        expected[index] = _fit(terms, times[index])
    return expected


def _affine(work: Floats, times: Floats) -> tuple[float, float]:
    """Offset and slope of `times` against `work`; no offset where they hardly correlate."""
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
    """Times fitted by the terms [K, …], by least squares of the relative error, outliers
    removed."""
    use = np.isfinite(times) & (times > 0) & np.isfinite(terms).all(axis=0)
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
