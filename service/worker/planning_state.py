"""Plans of one job from publication to application, and everything the next plan depends on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from resihp.contracts import Plan
from scheduler import SkiRental

_RETRY_S = 5.0
_LONGEST_RETRY_S = 600.0


@dataclass(frozen=True)
class PlanningRetry:
    """Exponential backoff of planning that failed, while the device speeds are unchanged.

    >>> PlanningRetry().after_failure(100.0).after_failure(105.0)
    PlanningRetry(failures=2, due_s=115.0)
    """

    failures: int = 0
    due_s: float | None = None

    def is_due(self, now_s: float) -> bool:
        """True if planning failed and the waiting time is over."""
        return self.due_s is not None and now_s >= self.due_s

    def after_failure(self, now_s: float) -> PlanningRetry:
        """The state after one more failure: twice the waiting time, 10 minutes at most."""
        wait_s = min(_RETRY_S * 2.0**self.failures, _LONGEST_RETRY_S)
        return PlanningRetry(self.failures + 1, now_s + wait_s)


@dataclass
class PlanningState:
    """Planning state of one job: plain values, saved and restored as one document.

    plans           the active plan and all later ones, by version
    active_version  version of the plan that the ranks work under, as far as they reported it
    acks            answers of the ranks to the newest plan: `applied` or `refused`
    speeds          relative speeds of the devices that are not healthy (0.0: stopped), for which
                    the last plan was made
    joiners         ranks outside the layout that are ready to work
    rental          ski-rental account: cost of staying in the layout, and the plan not yet due
    retry           time of the next attempt after planning failed
    fail_stops      devices that stopped since the job was registered
    step_ms         newest observed step time; 0.0 before the first
    outcome         result of the last planning, as the API shows it: `state` is `idle`, `planned`,
                    `kept`, `infeasible` or `taken_over`
    """

    plans: dict[int, Plan]
    active_version: int
    acks: dict[int, str] = field(default_factory=dict)
    speeds: dict[int, float] = field(default_factory=dict)
    joiners: tuple[int, ...] = ()
    rental: SkiRental = field(default_factory=SkiRental)
    retry: PlanningRetry = field(default_factory=PlanningRetry)
    fail_stops: int = 0
    step_ms: float = 0.0
    outcome: dict[str, Any] = field(default_factory=lambda: {"state": "idle"})

    @property
    def newest(self) -> Plan:
        """The plan published last."""
        return self.plans[max(self.plans)]

    @property
    def active(self) -> Plan:
        """The plan that the ranks work under."""
        return self.plans[self.active_version]

    @property
    def current(self) -> Plan:
        """Starting point of the next plan: the newest plan, unless a rank refused it."""
        return self.active if "refused" in self.acks.values() else self.newest

    def rollout(self) -> dict[str, Any]:
        """Versions and acknowledgements, as the API shows them."""
        return {
            "newest": self.newest.version,
            "active": self.active_version,
            "acks": {str(rank): answer for rank, answer in sorted(self.acks.items())},
        }

    def publish(self, plan: Plan) -> None:
        """Add a new plan, which the ranks have still to apply."""
        self.plans[plan.version] = plan
        self.acks = {}
        self.outcome = {"state": "planned", "version": plan.version}

    def take_over(self, plan: Plan, lost: Iterable[int]) -> bool:
        """Activate a plan that the job made by itself; False if it is active already.

        Later plans stay. The job's plan accounts for the lost ranks and for no other device.
        """
        if self.active_version == plan.version and self.active.digest == plan.digest:
            return False
        later = {version: known for version, known in self.plans.items() if version > plan.version}
        self.plans, self.active_version, self.acks = {plan.version: plan, **later}, plan.version, {}
        dead = {*lost, *(rank for rank, speed in self.speeds.items() if speed == 0.0)}
        self.speeds = dict.fromkeys(sorted(dead), 0.0)
        self.rental, self.retry = SkiRental(), PlanningRetry()
        self.outcome = {"state": "taken_over", "version": plan.version}
        self.remove_joiners({*lost, *plan.layout.ranks})
        return True

    def activate(self, version: int) -> bool:
        """Record that the ranks work under a plan; True if it is a later one than before."""
        if version <= self.active_version or version not in self.plans:
            return False
        self.active_version = version
        self.plans = {known: plan for known, plan in self.plans.items() if known >= version}
        self.remove_joiners(self.active.layout.ranks)
        return True

    def acknowledge(self, version: int, rank: int, answer: str) -> bool:
        """Record the answer of a rank; True if all ranks have now applied the newest plan."""
        if version != self.newest.version:
            return False
        self.acks[rank] = answer
        members = self.newest.layout.ranks
        return all(self.acks.get(m) == "applied" for m in members) and self.activate(version)

    def add_joiners(self, ranks: Iterable[int]) -> None:
        """Record ranks that are ready to work, whatever their verdicts were before."""
        outside = set(ranks) - set(self.active.layout.ranks)
        self.joiners = tuple(sorted({*self.joiners, *outside}))

    def remove_joiners(self, ranks: Iterable[int]) -> None:
        """Drop ranks that work now, or are gone."""
        self.joiners = tuple(rank for rank in self.joiners if rank not in set(ranks))

    def forget_joiners(self) -> None:
        """Drop all joiners after a loss: the job announces those that are left before a step."""
        self.speeds = {rank: v for rank, v in self.speeds.items() if rank not in self.joiners}
        self.joiners = ()

    def refuse_newest(self) -> None:
        """Prepare to plan again after a rank refused the newest plan.

        A plan that counted on joiners may have been refused because they are gone.
        """
        if self.joiners:
            self.forget_joiners()
            self.speeds = {}

    def count_step(self) -> Plan | None:
        """Charge a step in the newest plan's layout; the candidate plan, once it is due."""
        self.rental = self.rental.after_step()
        if self.rental.candidate is None or not self.rental.due:
            return None
        plan, self.rental = self.rental.candidate.plan, SkiRental()
        return plan
