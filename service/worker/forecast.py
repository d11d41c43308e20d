"""What a step should take under a plan, in the milliseconds of this job's own devices."""

from __future__ import annotations

from statistics import median
from typing import Any

import numpy as np

from resihp.contracts import Job, Op, Plan, TelemetryBatch
from scheduler.calibration import calibrated, compute_ms

_WARM_UP = 2
_ENOUGH = 6  # healthy steps from which on the costs are fitted
_BASELINE = 12  # and up to which they are
_PARTS = (Op.FORWARD, Op.BACKWARD)


class Forecast:
    """The job's cost model, fitted to its first healthy steps.

    Costs that a job was registered with are rarely exact, and often there are none. Two things are
    fitted after the warm-up, under the layout that the job started with and as long as no device
    is known to be slow: what the devices compute, over what the model says, and what a step takes
    besides. So plans are weighed, predicted and bounded in milliseconds of this job.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self._registered = job
        self._expected = compute_ms(job)
        self._computed: dict[int, dict[int, list[float]]] = {}  # by step and rank, of `_PARTS`
        self._steps: list[tuple[float, float, float]] = []  # observed, and the ratios of `_PARTS`
        self._fitted = False
        self._last_unfitted = 0  # newest plan that was made before

    def add(self, batch: TelemetryBatch) -> None:
        """What the ranks computed, as long as the baseline is being taken."""
        if batch.plan_version or self._is_complete():
            return
        for part, op in enumerate(_PARTS):
            rows = batch.op == op
            pairs = np.stack([batch.step[rows], batch.rank[rows]], axis=1)
            keys, index = np.unique(pairs, axis=0, return_inverse=True)
            sums = np.bincount(index.ravel(), batch.compute_ms[rows], minlength=len(keys))
            for (step, rank), total in zip(keys.tolist(), sums.tolist(), strict=True):
                ranks = self._computed.setdefault(step, {})
                ranks.setdefault(rank, [0.0, 0.0])[part] += total

    def learn(self, plan: Plan, step: int, observed_ms: float, *, healthy: bool) -> None:
        """A step is complete; it counts if it is one of the first and all devices are healthy."""
        ranks = self._computed.pop(step, {})
        if plan.version or not healthy or self._is_complete():
            return
        ratios = [
            [took / due for took, due in zip(ranks[rank], expected, strict=True)]
            for rank, expected in self._expected.items()
            if rank in ranks and min(expected) > 0.0
        ]
        if not ratios:
            return
        forward, backward = np.median(ratios, axis=0).tolist()
        self._steps.append((observed_ms, forward, backward))
        if len(self._steps) >= _WARM_UP + _ENOUGH:
            self._calibrate()

    def _is_complete(self) -> bool:
        return len(self._steps) >= _WARM_UP + _BASELINE

    def _baseline(self) -> list[tuple[float, float, float]]:
        return self._steps[_WARM_UP:]

    def _fit(self) -> tuple[float, float, float]:
        observed, forward, backward = (median(v) for v in zip(*self._baseline(), strict=True))
        return observed, forward, backward

    def _calibrate(self) -> None:
        observed_ms, forward, backward = self._fit()
        if min(observed_ms, forward, backward) > 0.0:
            self.job = calibrated(
                self._registered, forward=forward, backward=backward, step_ms=observed_ms
            )
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
        middle_ms = self._fit()[0]
        apart = median(abs(observed / middle_ms - 1.0) for observed, *_ in self._baseline())
        count = len(self._baseline())
        return f"times are fitted to {count} healthy steps, half of them within {apart:.1%}"

    def predict(self, plan: Plan) -> float | None:
        """Expected step time; None for a plan made before anything was known."""
        if not self._fitted or 0 < plan.version <= self._last_unfitted:
            return None
        return plan.step_ms if plan.version else self._fit()[0]

    def save(self) -> dict[str, Any]:
        """Plain values from which `restore` makes an equal one."""
        computed = {
            str(step): {str(rank): parts for rank, parts in ranks.items()}
            for step, ranks in self._computed.items()
        }
        return {"steps": self._steps, "computed": computed, "unfitted": self._last_unfitted}

    @classmethod
    def restore(cls, job: Job, saved: dict[str, Any]) -> Forecast:
        """The forecast that was saved."""
        forecast = cls(job)
        forecast._steps = [(observed, *ratios) for observed, *ratios in saved["steps"]]
        forecast._computed = {
            int(step): {int(rank): list(parts) for rank, parts in ranks.items()}
            for step, ranks in saved["computed"].items()
        }
        forecast._last_unfitted = saved["unfitted"]
        if len(forecast._steps) >= _WARM_UP + _ENOUGH:
            forecast._calibrate()
        return forecast
