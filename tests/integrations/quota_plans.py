"""A plan that a training gets at a known step."""

from __future__ import annotations

import threading

import torch.distributed as dist

from resihp.contracts import Layout, Plan
from resihp.elastic import NoPlans

WAIT_S = 120.0


class OnePlan(NoPlans):
    """Offers one plan."""

    def __init__(self, *quotas: int) -> None:
        layout = Layout.grid(dp=len(quotas), pp=1, tp=1, layers=1)
        self.plan = Plan(version=1, layout=layout, quotas=quotas)
        self.told: list[str] = []
        self._is_read, self._is_applied = threading.Event(), threading.Event()

    def wait(self, after: int, seconds: float) -> Plan | None:
        if after:
            self._is_read.set()
            return super().wait(after, seconds)
        return self.plan

    def applied(self, plan: Plan, rank: int, step: int, pause_ms: float) -> None:
        self.told.append(f"applied {plan.quotas}")
        self._is_applied.set()

    def refused(self, plan: Plan, rank: int, why: str) -> None:
        self.told.append(f"refused: {why}")
        self._is_read.set()
        self._is_applied.set()

    def until_read(self) -> None:
        """Let the first rank wait until the plan was read: it is proposed in the next step."""
        assert dist.get_rank() or self._is_read.wait(WAIT_S)

    def until_told(self) -> None:
        """Let the first rank wait until it was told what became of the plan."""
        assert dist.get_rank() or self._is_applied.wait(WAIT_S)
