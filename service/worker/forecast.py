"""What a step should take under a plan, in the milliseconds of this job's own devices."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from resihp.contracts import Job, Op, Plan, TelemetryBatch
from scheduler.calibration import calibrated, compute_ms

from .collective_latency import CollectiveLatency

_WARM_UP = 2
_ENOUGH = 6  # healthy steps from which on the costs are fitted
_BASELINE = 12  # and up to which they are
_PARTS = (Op.FORWARD, Op.BACKWARD)


class _Fit(NamedTuple):
    """Of one step or the middle of several; ratios are measured over modelled computing."""

    step_ms: float
    forward: float
    backward: float
    besides_ms: float
    collective_ms: float | None = None


def _ratios(took: Sequence[float], due: tuple[float, float]) -> tuple[float, float]:
    """Measured over modelled computing, forward and backward.

    A loop that times one kind of pass alone, or both in one block, has one ratio for the two.
    """
    if min(took[:2]) > 0.0:
        return took[0] / due[0], took[1] / due[1]
    both = sum(took[:2]) / sum(due)
    return both, both


class Forecast:
    """The job's cost model, fitted to its first healthy steps.

    Costs that a job was registered with are rarely exact, and often there are none. Three things
    are fitted after the warm-up, under the layout that the job started with and as long as no
    device is known to be slow: what the devices compute, over what the model says; what a step
    takes beside its microbatches; and what is left of it, of which collectives get no more than
    they were seen to take (`calibrated`). So plans are weighed,
    predicted and bounded in milliseconds of this job.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self._registered = job
        self._expected = compute_ms(job)
        self._spent: dict[int, dict[int, list[float]]] = {}  # by step and rank: `_PARTS`, the rest
        self._collective_latency = CollectiveLatency(job)
        self._steps: list[_Fit] = []
        self._fitted = False
        self._last_unfitted = 0  # newest plan that was made before

    def add(self, batch: TelemetryBatch) -> None:
        """What the ranks computed, as long as the baseline is being taken."""
        if batch.plan_version or self._is_complete():
            return
        self._collective_latency.add(batch)
        spent_ms = batch.compute_ms + np.nan_to_num(batch.wait_ms, nan=0.0)
        for part, times in enumerate((batch.compute_ms, batch.compute_ms, spent_ms)):
            rows = batch.op == _PARTS[part] if part < 2 else ~np.isin(batch.op, _PARTS)
            pairs = np.stack([batch.step[rows], batch.rank[rows]], axis=1)
            keys, index = np.unique(pairs, axis=0, return_inverse=True)
            sums = np.bincount(index.ravel(), times[rows], minlength=len(keys))
            for (step, rank), total in zip(keys.tolist(), sums.tolist(), strict=True):
                ranks = self._spent.setdefault(step, {})
                ranks.setdefault(rank, [0.0, 0.0, 0.0])[part] += total

    def learn(self, plan: Plan, step: int, observed_ms: float, *, healthy: bool) -> None:
        """A step is complete; it counts if it is one of the first and all devices are healthy."""
        ranks, collective_ms = self._spent.pop(step, {}), self._collective_latency.take(step)
        if plan.version or not healthy or self._is_complete():
            return
        ratios = [
            _ratios(ranks[rank], expected)
            for rank, expected in self._expected.items()
            if rank in ranks and min(expected) > 0.0
        ]
        if not ratios:
            return
        forward, backward = np.median(ratios, axis=0).tolist()
        besides_ms = min(besides for *_, besides in ranks.values())  # of the last to arrive
        self._steps.append(_Fit(observed_ms, forward, backward, besides_ms, collective_ms))
        if len(self._steps) >= _WARM_UP + _ENOUGH:
            self._calibrate()

    def _is_complete(self) -> bool:
        return len(self._steps) >= _WARM_UP + _BASELINE

    def _baseline(self) -> list[_Fit]:
        return self._steps[_WARM_UP:]

    def _fit(self) -> _Fit:
        steps = self._baseline()
        known = [step.collective_ms for step in steps if step.collective_ms is not None]
        return _Fit(
            median(step.step_ms for step in steps),
            median(step.forward for step in steps),
            median(step.backward for step in steps),
            median(step.besides_ms for step in steps),
            median(known) if known else None,
        )

    def _calibrate(self) -> None:
        fit = self._fit()
        if min(fit.step_ms, fit.forward, fit.backward) > 0.0:
            self.job = calibrated(self._registered, **fit._asdict())
            self._fitted = True

    def made(self, plan: Plan) -> float | None:
        """Expected step time of a plan that was made just now."""
        if not self._fitted:
            self._last_unfitted = plan.version
        return self.predict(plan)

    def told(self) -> str | None:
        """What predictions rest on, in a sentence; None before they rest on anything."""
        if not self._fitted:
            return None
        middle_ms = self._fit().step_ms
        apart = median(abs(step.step_ms / middle_ms - 1.0) for step in self._baseline())
        count = len(self._baseline())
        return f"times are fitted to {count} healthy steps, half of them within {apart:.1%}"

    def predict(self, plan: Plan) -> float | None:
        """Expected step time; None for a plan made before anything was known."""
        if not self._fitted or 0 < plan.version <= self._last_unfitted:
            return None
        return plan.step_ms if plan.version else self._fit().step_ms

    def save(self) -> dict[str, Any]:
        """Plain values from which `restore` makes an equal one."""
        spent = {
            str(step): {str(rank): parts for rank, parts in ranks.items()}
            for step, ranks in self._spent.items()
        }
        return {
            "steps": self._steps,
            "spent": spent,
            "collective_latency": self._collective_latency.save(),
            "unfitted": self._last_unfitted,
        }

    @classmethod
    def restore(cls, job: Job, saved: dict[str, Any]) -> Forecast:
        """The forecast that was saved."""
        forecast = cls(job)
        forecast._steps = [_Fit(*step) for step in saved["steps"]]
        forecast._spent = {
            int(step): {int(rank): list(parts) for rank, parts in ranks.items()}
            for step, ranks in saved["spent"].items()
        }
        forecast._collective_latency.restore(saved.get("collective_latency", []))
        forecast._last_unfitted = saved["unfitted"]
        if len(forecast._steps) >= _WARM_UP + _ENOUGH:
            forecast._calibrate()
        return forecast
