"""Expected step times of plans, in milliseconds of the job's own devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from math import isfinite
from statistics import fmean, median
from typing import Any

import numpy as np

from detector.arrays import positions
from detector.step_time import StepExpectation
from resihp.contracts import ContractError, Job, Op, Plan, Schedule, TelemetryBatch
from scheduler.calibration import calibrated, compute_ms

from .step_times import StepTime

_WARM_UP_STEPS = 2
_ENOUGH_STEPS = 6  # healthy steps from which on the costs are fitted
_BASELINE_STEPS = 12  # and up to which they are
_ERRORS = 32  # steps whose expectation is compared with their time
_MOST_TURNS = 1 << 16  # of a calculation of a step: about 2 s of the worker, which has other jobs
_MOST_OPEN = 64  # steps of which waits are kept: far more than are open until the costs are fitted


LeastWaits = dict[int, dict[int, dict[int, float]]]
"""Shortest wait of any rank per layer in ms, by step, group and microbatch."""


@dataclass
class CollectiveLatency:
    """Latency of the collectives of one layer in one direction, step by step.

    The forward passes of a replica's first layers and the backward passes of its last ones depend
    on no other stage, so that their ranks wait only for each other. The rank with the shortest
    wait in a pass arrived last: its wait is the latency of the collectives without the lateness
    of other ranks.

    Waits are kept of the first few steps that are not taken yet, and of microbatches that the job
    has, whatever steps and microbatches ranks send records of.
    """

    job: Job
    least_ms: LeastWaits = field(default_factory=dict)

    def __post_init__(self) -> None:
        passes = sorted(
            (_pass_key(rank, op, chunk), number, layers)
            for number, (ranks, op, chunk, layers) in enumerate(_independent_passes(self.job))
            for rank in ranks
        )
        self._keys, self._numbers, self._layers = np.array(passes, np.int64).reshape(-1, 3).T.copy()

    def add(self, batch: TelemetryBatch) -> None:
        """Add the waits of a batch."""
        if not self._keys.size:
            return
        kinds = (column.astype(np.int64) for column in (batch.rank, batch.op, batch.chunk))
        at = positions(self._keys, _pass_key(*kinds))
        rows = (at >= 0) & ~np.isnan(batch.wait_ms) & (batch.microbatch < self.job.microbatches)
        at = at[rows]
        wait_ms = batch.wait_ms[rows] / self._layers[at]
        passes = np.stack([batch.microbatch[rows], self._numbers[at], batch.step[rows]])
        order = np.lexsort((wait_ms, *passes))
        passes = passes[:, order]
        shortest = np.diff(passes, axis=1, prepend=-2).any(axis=0)
        columns = (*passes[:, shortest], wait_ms[order][shortest])
        for microbatch, number, step, ms in zip(*(c.tolist() for c in columns), strict=True):
            least = self.least_ms.setdefault(step, {}).setdefault(number, {})
            least[microbatch] = min(least.get(microbatch, np.inf), ms)
        for step in sorted(self.least_ms)[_MOST_OPEN:]:
            del self.least_ms[step]

    def take(self, step: int) -> float | None:
        """Median over the groups for a complete step; None where nothing was measured. What came
        late of earlier ones is dropped."""
        groups = self.least_ms.pop(step, {})
        for late in [known for known in self.least_ms if known < step]:
            del self.least_ms[late]
        return median(fmean(waits.values()) for waits in groups.values()) if groups else None


@dataclass(frozen=True)
class HealthyStep:
    """One healthy step, or the median of several.

    step_ms           observed step time
    forward, backward measured over modelled computing time
    besides_ms        time outside forward and backward passes
    collective_ms     latency of tensor-parallel collectives; None where not measured
    """

    step_ms: float
    forward: float
    backward: float
    besides_ms: float
    collective_ms: float | None = None


@dataclass
class ForecastState:
    """Plain values from which a `Forecast` is made again.

    steps          the first healthy steps under plan 0
    least_waits    of the collectives in steps that are still open
    last_unfitted  version of the newest plan made before the costs were fitted
    errors         of the times that were expected of the last steps (relative)
    """

    steps: tuple[HealthyStep, ...] = ()
    least_waits: LeastWaits = field(default_factory=dict)
    last_unfitted: int = 0
    errors: tuple[float, ...] = ()


class Forecast:
    """The job's cost model, fitted to its first healthy steps.

    Registered costs are rarely exact and often missing. After the warm-up, under plan 0 and as long
    as no device is known to be slow, three things are fitted: the devices' computing time over the
    modelled one; the time of a step outside its microbatches; and the remainder, of which at most
    the measured latency is attributed to collectives (`scheduler.calibration.calibrated`). Plans
    are then compared, predicted and bounded in milliseconds of this job. Jobs of so many
    microbatches that this would hold up the worker keep their registered costs.
    """

    def __init__(self, job: Job, state: ForecastState | None = None) -> None:
        self.job = job
        self.state = state or ForecastState()
        self._registered = job
        self._expected = compute_ms(job)
        self._collectives = CollectiveLatency(job, self.state.least_waits)
        self._fit: HealthyStep | None = None
        self._fit_if_enough()

    def add(self, batch: TelemetryBatch) -> None:
        """Add records of plan 0 while the baseline is incomplete."""
        if batch.plan_version == 0 and not self._is_complete():
            self._collectives.add(batch)

    def learn(self, plan: Plan, step: StepTime, *, healthy: bool) -> None:
        """Add a complete step to the baseline if all devices were healthy in it."""
        collective_ms = self._collectives.take(step.step)
        if plan.version or not healthy or self._is_complete():
            return
        ratios = list(self._ratios(step))
        if not ratios:
            return
        forward, backward = np.median(ratios, axis=0).tolist()
        besides_ms = min(other for *_, other in step.ranks.values())  # of the last rank to arrive
        observed = HealthyStep(step.observed_ms, forward, backward, besides_ms, collective_ms)
        self.state.steps = (*self.state.steps, observed)
        self._fit_if_enough()

    def note_error(self, step: StepExpectation) -> None:
        """Add the error of what was expected of a step by its own work. One that no saved state can
        hold, as of a step that took next to no time, is left out."""
        if step.expected_ms is not None and step.measured_ms > 0.0:
            error = abs(step.expected_ms / step.measured_ms - 1.0)
            if isfinite(error):
                self.state.errors = (*self.state.errors, error)[-_ERRORS:]

    def _ratios(self, step: StepTime) -> Iterator[tuple[float, float]]:
        """Measured over modelled computing time of each rank, forward and backward.

        A loop that times only one kind of pass, or both as one, has a single ratio for the two.
        """
        for rank, (due_forward, due_backward) in self._expected.items():
            if rank not in step.ranks or min(due_forward, due_backward) <= 0.0:
                continue
            forward, backward, *_ = step.ranks[rank]
            if min(forward, backward) > 0.0:
                yield forward / due_forward, backward / due_backward
            else:
                both = (forward + backward) / (due_forward + due_backward)
                yield both, both

    def _is_complete(self) -> bool:
        return len(self.state.steps) >= _WARM_UP_STEPS + _BASELINE_STEPS

    def _baseline(self) -> tuple[HealthyStep, ...]:
        return self.state.steps[_WARM_UP_STEPS:]

    def _fit_if_enough(self) -> None:
        steps = self._baseline()
        if len(steps) < _ENOUGH_STEPS or _turns(self._registered) > _MOST_TURNS:
            return
        known = [step.collective_ms for step in steps if step.collective_ms is not None]
        fit = HealthyStep(
            median(step.step_ms for step in steps),
            median(step.forward for step in steps),
            median(step.backward for step in steps),
            median(step.besides_ms for step in steps),
            median(known) if known else None,
        )
        if min(fit.step_ms, fit.forward, fit.backward) > 0.0:
            try:
                self.job = calibrated(self._registered, **asdict(fit))
            except ContractError:  # times that no layer has, next to nothing or without end
                return
            self._fit = fit

    def for_new_plan(self, plan: Plan) -> float | None:
        """Expected step time of a plan made just now; None before the costs are fitted."""
        if self._fit is None:
            self.state.last_unfitted = plan.version
        return self.predict(plan)

    def predict(self, plan: Plan) -> float | None:
        """Expected step time; None for a plan made before the costs were fitted."""
        if self._fit is None or 0 < plan.version <= self.state.last_unfitted:
            return None
        return plan.step_ms if plan.version else self._fit.step_ms

    def basis(self) -> str | None:
        """The basis of the predictions in a sentence; None before the costs are fitted."""
        if self._fit is None:
            return None
        steps, fit_ms = self._baseline(), self._fit.step_ms
        spread = median(abs(step.step_ms / fit_ms - 1.0) for step in steps)
        basis = f"times are fitted to {len(steps)} healthy steps, half of them within {spread:.1%}"
        if len(self.state.errors) < _ENOUGH_STEPS:
            return basis
        error = median(self.state.errors)
        return f"{basis}; half of the last ones within {error:.1%} of what their own work takes"


def _turns(job: Job) -> int:
    """Turns of a calculation of a step: one for each microbatch of all replicas together or, with
    several chunks, for each of its passes in one direction."""
    if job.chunks == 1 and job.schedule is not Schedule.INTERLEAVED:
        return max(job.quotas)
    return job.microbatches * job.layout.pp * job.chunks


def _pass_key(rank: Any, op: Any, chunk: Any) -> Any:
    """One number for the passes of one kind of a rank."""
    return (rank << 20) | (op << 16) | chunk


def _independent_passes(job: Job) -> Iterator[tuple[tuple[int, ...], Op, int, int]]:
    """(ranks, op, chunk, layers) of each group of several ranks with such a pass."""
    for replica in job.layout.replicas:
        ends = (
            (replica.stages[0], Op.FORWARD, 0),
            (replica.stages[-1], Op.BACKWARD, replica.chunks - 1),
        )
        for stage, op, chunk in ends:
            if stage.tp > 1:
                start, stop = stage.chunks[chunk]
                yield stage.ranks, op, chunk, stop - start
