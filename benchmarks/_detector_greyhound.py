"""Greyhound's detector (USENIX ATC'25), reconstructed from its description; parameters are ours.

1. The period of a rank's communication calls, by autocorrelation, and so the time of every
   iteration, without a word from the trainer.
2. Bayesian online change-point detection (Adams and MacKay, 2007) on the iteration times, those of
   the pipelines alone. A change counts if the mean has become longer by 5%.
3. Validation: the job pauses and all devices measure a matrix product. The devices that are slower
   than the median by 2% are named; a measurement errs by 0.5%. Of the measurements of links, only
   that they find nothing here is assumed.

The parameters are those, of a few, that find most in the recorded jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lgamma

import numpy as np
from numpy.typing import NDArray

from detector.rank_table import RankTable
from detector.step_time import PipelineTime
from resihp.contracts import Job, Op, TelemetryBatch
from resihp.pipeline.orders import job_orders

Floats = NDArray[np.float64]

_HAZARD = 0.05  # of a change at an iteration
_LONGER = 0.05
_REMEASURED, _SLOWER = 0.005, 0.02
_SAME = 0.95  # autocorrelation from which on a lag is a period
_NEW = 8  # iterations of a run that is new
_SETTLED = 2  # iterations before the first alarm


def call_period(codes: Sequence[int]) -> int:
    """Smallest lag at which a sequence of calls repeats itself, by autocorrelation; 0 if none does.

    >>> call_period([1, 1, 2, 1, 2, 2, 9] * 5)
    7
    """
    values = np.asarray(codes, float) - np.mean(codes)
    for lag in range(1, len(values) // 2):
        ahead, behind = values[lag:], values[:-lag]
        spread = np.sqrt((ahead @ ahead) * (behind @ behind))
        if spread > 0.0 and (ahead @ behind) / spread >= _SAME:
            return lag
    return 0


def iteration_times(codes: Sequence[int], stamps_ms: Sequence[float]) -> Floats:
    """Times between calls that are a period apart: those of the iterations after the first."""
    period = call_period(codes)
    return np.diff(np.asarray(stamps_ms, float)[period - 1 :: period])


def call_log(job: Job, steps_ms: Sequence[float]) -> tuple[list[int], list[float]]:
    """Calls of the first rank of the job: a transfer for each pass, a reduction at the end."""
    order = job_orders(job, job.quotas)[0][0]
    step = [int(item.op) for item in order] + [int(Op.COLLECTIVE)]
    ends = np.cumsum(steps_ms)
    parts = np.arange(1, len(step) + 1) / len(step)
    stamps = (ends - np.asarray(steps_ms))[:, None] + np.asarray(steps_ms)[:, None] * parts
    return step * len(ends), stamps.ravel().tolist()


class PipelineSteps:
    """Times of the pipelines of recorded steps, with one rank slowed."""

    def __init__(self, job: Job, batches: Sequence[TelemetryBatch]) -> None:
        self._times = PipelineTime(job, RankTable.of(job.layout))
        self._passes = [b.select((b.op == Op.FORWARD) | (b.op == Op.BACKWARD)) for b in batches]
        self.recorded_ms = [self._ms(at, {}) for at in range(len(batches))]

    def slowed_ms(self, rank: int, factor: float, onset: int) -> list[float]:
        """Times with one rank slowed from the step at position `onset` on."""
        steps = range(onset, len(self._passes))
        return self.recorded_ms[:onset] + [self._ms(at, {rank: factor}) for at in steps]

    def _ms(self, at: int, slowdowns: dict[int, float]) -> float:
        passes = self._passes[at]
        return self._times.ms(passes, passes.compute_ms, slowdowns)[0]


def alarms(times_ms: Floats) -> list[int]:
    """Iterations at which a run is found to be new, and longer than what was before."""
    model, found, last = _RunLengths(times_ms[0]), [], 0
    for at, value in enumerate(times_ms):
        start = at + 1 - model.observe(float(value))
        before = times_ms[max(0, start - 4 * _NEW) : start]
        is_new = _SETTLED < start != last and at < start + _NEW
        if is_new and times_ms[start : at + 1].mean() > (1.0 + _LONGER) * before.mean():
            found.append(at)
            last = start
    return found


def validated(ranks: int, slow: int, factor: float, random: np.random.Generator) -> set[int]:
    """Devices, by index, that are slower than the median in a matrix product on all of them."""
    measured = np.exp(random.normal(0.0, _REMEASURED, ranks))
    measured[slow] *= factor
    return set(np.flatnonzero(measured > (1.0 + _SLOWER) * np.median(measured)).tolist())


class _RunLengths:
    """Posterior of the run length: iterations since the last change, of a normal distribution whose
    mean and variance are unknown (normal-gamma prior).

    A state has the rows mean, weight, shape and scale, and a column for each length.
    """

    def __init__(self, usual: float) -> None:
        self._usual = usual
        self._prior = np.array([[0.0], [0.1], [1.0], [1e-3]])
        self._state, self._log_mass = np.empty((4, 0)), np.empty(0)

    def observe(self, value: float) -> int:
        """Take an iteration; return the most likely length of the run that it is in."""
        x = value / self._usual - 1.0
        kept = self._log_mass + _log_density(self._state, x) + np.log1p(-_HAZARD)
        begun = np.log(_HAZARD if kept.size else 1.0) + _log_density(self._prior, x)
        self._log_mass = np.concatenate([begun, kept])
        self._log_mass -= np.logaddexp.reduce(self._log_mass)
        states = np.concatenate([self._prior, self._state], axis=1)
        self._state = _updated(states, x)
        return int(self._log_mass.argmax()) + 1


def _log_density(state: Floats, x: float) -> Floats:
    """Log of the predictive density, a Student distribution, for each length."""
    mean, weight, shape, scale = state
    variance = scale * (weight + 1.0) / (shape * weight)
    gammas = np.array([lgamma(a + 0.5) - lgamma(a) for a in shape.tolist()])
    tail = (shape + 0.5) * np.log1p((x - mean) ** 2 / (2.0 * shape * variance))
    return np.asarray(gammas - 0.5 * np.log(2.0 * np.pi * shape * variance) - tail)


def _updated(state: Floats, x: float) -> Floats:
    mean, weight, shape, scale = state
    scale = scale + weight * (x - mean) ** 2 / (2.0 * (weight + 1.0))
    return np.array([(weight * mean + x) / (weight + 1.0), weight + 1.0, shape + 0.5, scale])
