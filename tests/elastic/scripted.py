"""A source of plans for jobs whose changes are known beforehand."""

from __future__ import annotations

import time
from collections.abc import Collection

from resihp.contracts import InfeasibleError, Layout, Plan, even_quotas


class Scripted:
    """Offers the scripted plans; after a loss, keeps the replicas that lost nobody."""

    def __init__(
        self, plans: tuple[Plan, ...], welcome: tuple[Plan, ...], rescues: tuple[Plan, ...]
    ) -> None:
        self._plans, self._welcome, self._rescues = plans, welcome, rescues

    def wait(self, after: int, seconds: float) -> Plan | None:
        for offered in self._plans:
            if offered.version > after:
                return offered
        time.sleep(min(seconds, 0.1))
        return None

    def after_loss(self, current: Plan, survivors: Collection[int], step: int) -> Plan:
        whole = [r for r in current.layout.replicas if set(r.ranks) <= set(survivors)]
        for rescue in self._rescues:
            if not whole and set(rescue.layout.ranks) <= set(survivors):
                return rescue
        if not whole:
            raise InfeasibleError("replicas", "no replica is whole")
        return Plan(
            version=current.version + 100,
            layout=Layout(tuple(whole)),
            quotas=even_quotas(sum(current.quotas), len(whole)),
            schedule=current.schedule,
        )

    def joined(self, current: Plan, joiners: Collection[int], step: int) -> Plan | None:
        return next((p for p in self._welcome if p.version == current.version + 1), None)

    def applied(self, plan: Plan, rank: int, step: int, pause_ms: float) -> None:
        pass

    def refused(self, plan: Plan, rank: int, why: str) -> None:
        pass
