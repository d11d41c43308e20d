"""Over how many steps a change of layout has to pay: until the job's next fault."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from resihp.contracts import Job, Status, Verdict


class FaultHorizon:
    """Faults of one job, counted on top of what it was registered with, and its newest step."""

    def __init__(self, job: Job, *, faults: int = 0, step_ms: float = 0.0) -> None:
        self._protection = job.protection
        self._faults, self._step_ms = faults, step_ms

    def stepped(self, observed_ms: float) -> None:
        """A step took so long."""
        self._step_ms = observed_ms

    def heard(self, verdict: Verdict) -> None:
        """A verdict that is new; a device that stopped is a fault."""
        self._faults += verdict.status is Status.FAIL_STOP

    def steps(self, observed_s: float) -> int | None:
        """After the job has been watched for so long; None: nobody knows."""
        known = self._protection
        if known is None or self._step_ms <= 0.0:
            return None
        rate = known.faults.seen(self._faults, observed_s)
        return replace(known, faults=rate).horizon_steps(self._step_ms / 1e3)

    def save(self) -> dict[str, Any]:
        """Arguments that make an equal one."""
        return {"faults": self._faults, "step_ms": self._step_ms}
