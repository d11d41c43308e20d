"""Which plan is published, which one the job works under, and who said so."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from resihp.contracts import Plan, from_json, to_json


class Rollout:
    """Plans of a job from publication to application.

    newest   the last one published
    active   the one that the ranks work under, as far as they said
    current  what the next plan starts from: the newest, unless a rank refused it
    """

    def __init__(self, plan: Plan) -> None:
        self._plans = {plan.version: plan}
        self._active = plan.version
        self._acks: dict[int, str] = {}

    @property
    def newest(self) -> Plan:
        return self._plans[max(self._plans)]

    @property
    def active(self) -> Plan:
        return self._plans[self._active]

    @property
    def current(self) -> Plan:
        return self.active if "refused" in self._acks.values() else self.newest

    def publish(self, plan: Plan) -> None:
        """A new plan, which the ranks have still to take on."""
        self._plans[plan.version] = plan
        self._acks = {}

    def take_over(self, plan: Plan) -> bool:
        """The job works by a plan of its own; True if that is new. Later ones still stand."""
        if self._active == plan.version and self.active.digest == plan.digest:
            return False
        later = {version: known for version, known in self._plans.items() if version > plan.version}
        self._plans, self._active, self._acks = {plan.version: plan, **later}, plan.version, {}
        return True

    def saw(self, version: int) -> bool:
        """Records made under a plan show that it was taken on; True if that is new."""
        return version in self._plans and self._activate(version)

    def has_work_for(self, ranks: Iterable[int]) -> bool:
        """Whether the active layout holds any of the ranks."""
        return not set(self.active.layout.ranks).isdisjoint(ranks)

    def ack(self, version: int, rank: int, state: str) -> bool:
        """What a rank says of a plan; True if now all of its ranks have taken it on."""
        plan = self._plans.get(version)
        if plan is None or version != self.newest.version:
            return False
        self._acks[rank] = state
        done = all(self._acks.get(member) == "applied" for member in plan.layout.ranks)
        return done and self._activate(version)

    def _activate(self, version: int) -> bool:
        if version <= self._active:
            return False
        self._active = version
        for old in [known for known in self._plans if known < version]:
            del self._plans[old]
        return True

    def describe(self) -> dict[str, Any]:
        """For people and dashboards."""
        return {
            "newest": self.newest.version,
            "active": self._active,
            "acks": {str(rank): state for rank, state in sorted(self._acks.items())},
        }

    def save(self) -> dict[str, Any]:
        """Plain values from which `restore` makes an equal one."""
        return {
            "plans": [to_json(plan) for plan in self._plans.values()],
            "active": self._active,
            "acks": {str(rank): state for rank, state in self._acks.items()},
        }

    @classmethod
    def restore(cls, saved: dict[str, Any]) -> Rollout:
        """The roll-out that was saved."""
        plans = [from_json(Plan, plan) for plan in saved["plans"]]
        rollout = cls(plans[0])
        rollout._plans = {plan.version: plan for plan in plans}
        rollout._active = saved["active"]
        rollout._acks = {int(rank): state for rank, state in saved["acks"].items()}
        return rollout
