"""Planning of one job: its state, and the decision when it needs another plan.

The decision is level-triggered: it compares device speeds and slow links with those of the last
plan, so that a crash in between loses nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from resihp.contracts import (
    Action,
    Advice,
    InfeasibleError,
    Job,
    LinkVerdict,
    Plan,
    Status,
    Verdict,
)
from scheduler import ReplanDecision, SkiRental

from ..store.documents import advice_json
from .adapters import Adapters

_RETRY_S = 5.0
_LONGEST_RETRY_S = 600.0
# Of what ranks report, whichever they name: as many ranks as one report may have, and more plans
# than a job can be behind with.
_MOST_RANKS, MOST_PLANS = 131_072, 16
# A slowdown estimate that moves less than this (relative) does not change the situation.
_TOLERANCE = 0.1


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

    plans           the active plan and the newest later ones, by version
    active_version  version of the plan that the ranks work under, as far as they reported it
    acks            answers of the ranks of the two plans to the newest: `applied` or `refused`
    speeds          relative speeds of the devices that are not healthy (0.0: stopped), for which
                    the last plan was made
    links           slow links and groups for which the last plan was made
    measured        ends of those that the detector named slow under the active plan
    joiners         ranks outside the layout that are ready to work
    joined_with     version of the plan with which a rank last came into the layout
    rental          ski-rental account: cost of staying in the layout, and the plan not yet due
    retry           time of the next attempt after planning failed
    fail_stops      devices that stopped since the job was registered
    is_asked        a plan was asked for, and no decision on it was taken yet
    step_ms         expected time of the newest step, by its own work; as observed where nothing is
                    expected; 0.0 before the first
    restart_ms      pause of the last restart, the longest that a rank reported; None before one
    advice          of the last planning, on the ranks to leave out; None: there is none
    outcome         result of the last planning, as the API shows it: `state` is `idle`, `planned`,
                    `kept`, `advised`, `infeasible` or `taken_over`
    """

    plans: dict[int, Plan]
    active_version: int
    acks: dict[int, str] = field(default_factory=dict)
    speeds: dict[int, float] = field(default_factory=dict)
    links: tuple[LinkVerdict, ...] = ()
    measured: tuple[tuple[int, ...], ...] = ()
    joiners: tuple[int, ...] = ()
    joined_with: dict[int, int] = field(default_factory=dict)
    rental: SkiRental = field(default_factory=SkiRental)
    retry: PlanningRetry = field(default_factory=PlanningRetry)
    fail_stops: int = 0
    is_asked: bool = False
    step_ms: float = 0.0
    restart_ms: float | None = None
    advice: Advice | None = None
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
        """Versions and the number of ranks by their answer, as the API shows them."""
        return {
            "newest": self.newest.version,
            "active": self.active_version,
            "acks": Counter(self.acks.values()),
        }

    def report(self) -> dict[str, Any]:
        """Outcome of the last planning with its advice, as the API shows it."""
        if self.advice is None:
            return self.outcome
        return {**self.outcome, "advice": advice_json(self.advice)}

    def publish(self, plan: Plan) -> None:
        """Add a new plan, which the ranks have still to apply."""
        later = sorted(self.plans.keys() - {self.active_version})
        for version in later[: 1 - MOST_PLANS]:
            del self.plans[version]
        self.plans[plan.version] = plan
        self.acks = {}
        by = {} if plan.action is None else {"action": plan.action.value}
        self.outcome = {"state": "planned", "version": plan.version, **by}

    def take_over(self, plan: Plan, lost: Iterable[int]) -> bool:
        """Activate a plan that the job made by itself; False if it is active already, or older than
        the active one: told late, after the job has gone on.

        Later plans stay; where the newest one counts on a lost rank, another is asked for. The
        job's plan accounts for the lost ranks and for no other device.
        """
        is_known = self.active_version == plan.version and self.active.digest == plan.digest
        if is_known or plan.version < self.active_version:
            return False
        self._note_joined(plan)
        later = {version: known for version, known in self.plans.items() if version > plan.version}
        self.plans, self.active_version, self.acks = {plan.version: plan, **later}, plan.version, {}
        dead = {*lost, *(rank for rank, speed in self.speeds.items() if speed == 0.0)}
        self.speeds = dict.fromkeys(sorted(dead)[:_MOST_RANKS], 0.0)
        self.is_asked |= not dead.isdisjoint(self.newest.layout.members)
        self.rental, self.retry, self.advice = SkiRental(), PlanningRetry(), None
        self.links, self.measured = (), ()
        self.outcome = {"state": "taken_over", "version": plan.version}
        self.remove_joiners({*lost, *plan.layout.ranks})
        return True

    def activate(self, version: int) -> bool:
        """Record that the ranks work under a plan; True if it is a later one than before."""
        if version <= self.active_version or version not in self.plans:
            return False
        self._note_joined(self.plans[version])
        self.active_version, self.measured = version, ()
        self.plans = {known: plan for known, plan in self.plans.items() if known >= version}
        self.remove_joiners(self.active.layout.ranks)
        return True

    def _note_joined(self, plan: Plan) -> None:
        """Record which ranks join with `plan`, which is about to be the active one."""
        joined = self.joined_with
        for rank in sorted(plan.layout.members - self.active.layout.members):
            joined.pop(rank, None)  # it becomes the last of them
            joined[rank] = plan.version
        for rank in list(joined)[: max(len(joined) - _MOST_RANKS, 0)]:
            del joined[rank]

    def works_since(self, rank: int, version: int | None) -> bool:
        """Return whether what is told of a rank under a plan can be true of it still: it has not
        joined anew with a later one. `version` is None where the plan is not known."""
        return version is None or version >= self.joined_with.get(rank, version)

    def acknowledge(
        self, version: int, rank: int, answer: str, pause_ms: float | None = None
    ) -> bool:
        """Record the answer of a rank and its pause; True if all ranks have now applied the newest
        plan."""
        if not self.awaits(version, rank):
            return False
        if answer == "applied" and self.newest.action is Action.RESTART:
            self._note_restart(pause_ms or 0.0)
        self.acks[rank] = answer
        members = self.newest.layout.members
        if len(self.acks) < len(members):
            return False
        return all(self.acks.get(m) == "applied" for m in members) and self.activate(version)

    def _note_restart(self, pause_ms: float) -> None:
        """Record the pause of a rank, before its answer."""
        if pause_ms > 0.0:
            is_first = "applied" not in self.acks.values()
            self.restart_ms = max(pause_ms, 0.0 if is_first else self.restart_ms or 0.0)

    def awaits(self, version: int, rank: int) -> bool:
        """Return whether the answer of a rank to a plan counts: it is the newest plan, and the rank
        works under it or under the active one."""
        layouts = self.newest.layout, self.active.layout
        return version == self.newest.version and any(rank in each.members for each in layouts)

    def add_joiners(self, ranks: Iterable[int]) -> None:
        """Record ranks that are ready to work, whatever their verdicts were before: those outside
        the active plan, and those that the next one leaves out, whose numbers are used again before
        all others have answered to it."""
        outside = set(ranks) - (self.active.layout.members & self.current.layout.members)
        self.joiners = tuple(sorted({*self.joiners, *outside})[:_MOST_RANKS])

    def remove_joiners(self, ranks: Iterable[int]) -> None:
        """Drop ranks that work now, or are gone."""
        gone = frozenset(ranks)
        self.joiners = tuple(rank for rank in self.joiners if rank not in gone)

    def forget_joiners(self) -> None:
        """Drop all joiners after a loss: the job announces those that are left before a step."""
        self.speeds = {rank: v for rank, v in self.speeds.items() if rank not in self.joiners}
        self.joiners = ()

    def refuse_newest(self) -> None:
        """Prepare to plan again after a rank refused the newest plan.

        A plan that counted on joiners may have been refused because they are gone.
        """
        if self.joiners:
            self.speeds, self.joiners = {}, ()

    def slow_links(self, verdicts: Iterable[LinkVerdict]) -> tuple[LinkVerdict, ...]:
        """The links and groups that are fail-slow, by their ends; updates `measured`.

        One for which the last plan was made stays slow until it was named slow under the active
        plan too, and no longer is. The detector begins anew with every plan: it measures no link
        over which nothing is sent, and may take a slow one for the usual. Without its verdict the
        next plan would undo the last one.
        """
        named = {link.ends: link for link in verdicts if link.status is Status.FAIL_SLOW}
        self.measured = tuple(sorted({*self.measured, *named}))
        kept = {link.ends: link for link in self.links if link.ends not in self.measured}
        slow = named | kept
        return tuple(slow[ends] for ends in sorted(slow))

    def count_step(self) -> Plan | None:
        """Charge a step in the newest plan's layout; the candidate plan, once it is due."""
        self.rental = self.rental.after_step()
        if self.rental.candidate is None or not self.rental.due:
            return None
        plan, self.rental = self.rental.candidate.plan, SkiRental()
        return plan


@dataclass(frozen=True)
class PlanRequest:
    """A plan that was asked for, and the state that it is asked for."""

    decision: Future[ReplanDecision]
    current: Plan
    speeds: Mapping[int, float]
    rental: SkiRental
    links: tuple[LinkVerdict, ...] = ()

    def is_for(self, state: PlanningState) -> bool:
        """Return whether plan, speeds and slow links are still those of the request."""
        current = state.current
        is_same = current is self.current or current.digest == self.current.digest
        return is_same and state.speeds == self.speeds and state.links == self.links


class Planner:
    """Asks the scheduler for plans, outside the worker's thread, and takes its decisions.

    The scheduler is given half of the time limit, in which it returns the best plan found; at the
    limit it is ended. `close` ends what is still computed.
    """

    def __init__(self, adapters: Adapters, *, time_limit_s: float) -> None:
        self._replan = adapters.replan
        self._time_limit_s = time_limit_s
        self._executor = adapters.executor(time_limit_s)

    def is_needed(
        self,
        state: PlanningState,
        verdicts: Iterable[Verdict],
        clock_s: float,
        links: Iterable[LinkVerdict] = (),
    ) -> bool:
        """Return whether a plan is to be asked for; updates speeds, links and retry.

        That is so when the speeds or the slow links have changed since the last plan, when the
        retry after a failure is due at `clock_s`, and as long as no decision on a plan asked for
        was taken.
        """
        layouts = state.active.layout, state.current.layout
        speeds = speeds_of(verdicts, state.speeds, [layout.members for layout in layouts])
        speeds |= dict.fromkeys(state.joiners, 1.0)
        slow = state.slow_links(links)
        is_new = speeds_changed(_link_speeds(state.links), _link_speeds(slow))
        if is_new or speeds_changed(state.speeds, speeds):
            state.speeds, state.retry, state.is_asked = speeds, PlanningRetry(), True
            state.links = slow if is_new else state.links
        return state.is_asked or state.retry.is_due(clock_s)

    def ask(self, state: PlanningState, job: Job, *, step: int, clock_s: float) -> PlanRequest:
        """Ask for a plan from `step` on. A dead rank in the current layout always leads to one, or
        to advice if the job takes on no other layout."""
        state.is_asked = True
        decision = self._executor.submit(
            self._replan,
            job,
            state.current,
            state.speeds,
            step=step,
            rental=state.rental,
            horizon_steps=_horizon_steps(state, job, clock_s),
            restart_ms=state.restart_ms,
            links=state.links,
            time_limit_s=self._time_limit_s / 2,
        )
        return PlanRequest(decision, state.current, state.speeds, state.rental, state.links)

    def take(self, state: PlanningState, request: PlanRequest, clock_s: float) -> Plan | None:
        """The plan of a request that is decided; updates rental, retry, advice and outcome. Raises
        what the scheduler raised, except that there is no plan or no time."""
        state.is_asked, state.retry = False, state.retry.after_failure(clock_s)
        state.advice = None
        try:
            decision = request.decision.result()
        except (InfeasibleError, TimeoutError) as error:
            constraint, detail = "time", f"planning took longer than {self._time_limit_s:g} s"
            if isinstance(error, InfeasibleError):
                constraint, detail = error.constraint, error.detail
            state.outcome = {"state": "infeasible", "constraint": constraint, "detail": detail}
            return None
        lost_ms = state.rental.lost_ms - request.rental.lost_ms  # since it was asked for
        rental = decision.rental
        state.retry, state.advice = PlanningRetry(), decision.advice
        state.rental = replace(rental, lost_ms=rental.lost_ms + lost_ms) if lost_ms else rental
        if decision.plan is None:
            kept = "kept" if decision.advice is None else "advised"
            state.outcome = {"state": kept, "detail": decision.explanation}
        return decision.plan

    def close(self) -> None:
        """End all planning."""
        self._executor.close()


def speeds_of(
    verdicts: Iterable[Verdict], known: Mapping[int, float], working: Sequence[Set[int]]
) -> dict[int, float]:
    """Relative speeds of the devices that are not healthy: 1/slowdown, 0.0 if stopped.

    A device without a verdict that is in none of the sets of `working` ranks keeps its speed in
    `known`, the speeds of the last plan; a working one without a verdict is healthy. Asked for with
    every message: nothing is done for each of the working ranks.
    """
    verdicts = list(verdicts)
    left = known.keys() - {verdict.rank for verdict in verdicts}
    left = {rank for rank in left if not any(rank in ranks for ranks in working)}
    speeds = {rank: speed for rank, speed in known.items() if rank in left}
    for verdict in verdicts:
        if verdict.status is Status.FAIL_STOP:
            speeds[verdict.rank] = 0.0
        elif verdict.status is Status.FAIL_SLOW and verdict.slowdown > 1.0:
            speeds[verdict.rank] = 1.0 / verdict.slowdown
    return speeds


def _link_speeds(links: Iterable[LinkVerdict]) -> dict[tuple[int, ...], float]:
    return {link.ends: 1.0 / link.slowdown for link in links}


def speeds_changed(known: Mapping[Any, float], speeds: Mapping[Any, float]) -> bool:
    """True if `speeds`, of devices or of links by their ends, differ from those of the last plan
    beyond the tolerance."""
    if known.keys() != speeds.keys():
        return True
    return any(abs(speeds[rank] - known[rank]) > _TOLERANCE * known[rank] for rank in known)


def _horizon_steps(state: PlanningState, job: Job, observed_s: float) -> int | None:
    """Expected steps until the next fault, over which a migration has to pay; None if unknown.

    The registered fault rate is updated with the fail-stops of the `observed_s` seconds since. They
    are below 0 at first: what was sent in the last moments may still be on its way.
    """
    protection = job.protection
    if protection is None or state.step_ms <= 0.0:
        return None
    rate = protection.faults.seen(state.fail_stops, max(0.0, observed_s))
    return replace(protection, faults=rate).horizon_steps(state.step_ms / 1e3)
