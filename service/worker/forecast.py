"""What a step should take under a plan, in the milliseconds of this machine."""

from __future__ import annotations

from statistics import median
from typing import Any

from resihp.contracts import Plan

_WARM_UP = 2
_BASELINE = 12


class Forecast:
    """The scheduler's prediction, scaled by the first steps that were observed.

    Costs that a job was registered with are rarely exact, and often there are none; the ratio
    between two layouts is what the scheduler knows well. The first steps after the warm-up, under
    the layout the job started with, give the scale.
    """

    def __init__(self, first_ms: float) -> None:
        self._first_ms = first_ms
        self._observed: list[float] = []

    def learn(self, plan_version: int, observed_ms: float) -> None:
        """Take a step into account, if it is one of the first."""
        if plan_version == 0 and len(self._observed) < _WARM_UP + _BASELINE:
            self._observed.append(observed_ms)

    def predict(self, plan: Plan) -> float | None:
        """Expected step time; None before anything is known."""
        if len(self._observed) < _WARM_UP + _BASELINE // 2 or self._first_ms <= 0:
            return None
        scale = median(self._observed[_WARM_UP:]) / self._first_ms
        return scale * (plan.step_ms if plan.version else self._first_ms)

    def save(self) -> dict[str, Any]:
        """Plain values from which `restore` makes an equal one."""
        return {"first_ms": self._first_ms, "observed": self._observed}

    @classmethod
    def restore(cls, saved: dict[str, Any]) -> Forecast:
        """The forecast that was saved."""
        forecast = cls(saved["first_ms"])
        forecast._observed = list(saved["observed"])
        return forecast
