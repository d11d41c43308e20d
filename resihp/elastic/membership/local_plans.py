"""Plans of the scheduler in this process, for a job without a sidecar, or while that is away."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

from resihp.contracts import InfeasibleError, Job, Plan

_log = logging.getLogger("resihp.elastic")


class LocalPlans:
    """A `PlanSource` that acts on what is certain: who is lost, who leaves, who joins."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def wait(self, after: int, seconds: float) -> Plan | None:
        """Nothing, after `seconds`: slow devices are found by the sidecar alone."""
        time.sleep(seconds)
        return None

    def after_loss(self, current: Plan, survivors: Collection[int], step: int) -> Plan:
        """A plan for the survivors. Raises `InfeasibleError` if there is none."""
        from scheduler import make_plan

        lost = {*self._job.layout.ranks, *current.layout.ranks} - set(survivors)
        speeds = dict.fromkeys(sorted(lost), 0.0)
        return make_plan(self._job, speeds, current.layout, version=current.version + 1)

    def joined(self, current: Plan, standbys: Collection[int], step: int) -> Plan | None:
        """A plan with the newcomers at full speed, if it uses any of them."""
        from scheduler import make_plan

        gone = set(self._job.layout.ranks) - set(current.layout.ranks) - set(standbys)
        speeds = {**dict.fromkeys(gone, 0.0), **dict.fromkeys(standbys, 1.0)}
        version = current.version + 1
        try:
            plan = make_plan(self._job, speeds, current.layout, version=version, from_step=step + 1)
        except InfeasibleError as error:
            _log.warning("standbys %s find no place: %s", sorted(standbys), error)
            return None
        return plan if set(plan.layout.ranks) & set(standbys) else None

    def applied(self, plan: Plan, rank: int, step: int, pause_ms: float) -> None:
        """Nobody to tell."""

    def refused(self, plan: Plan, rank: int, why: str) -> None:
        """Nobody to tell."""
