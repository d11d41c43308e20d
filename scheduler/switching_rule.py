"""Switching rule for the plan of a running job: gain per step, migration cost, ski rental."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from resihp.contracts import (
    Action,
    Advice,
    ContractError,
    Job,
    Layout,
    Plan,
    Schedule,
    even_quotas,
)
from resihp.formatting import duration, plural

from .cost_model import layer_cost
from .forwards_ahead import with_forwards_ahead
from .link_costs import ALL_LINKS_HEALTHY, LinkSlowdowns
from .memory import fits, own_schedule, peak_bytes, plan_schedules
from .migration import PlanOption
from .reasons import action_reason, reasons
from .search.plan_bounds import layout_bound
from .step_time import ReplicaTimes

LEAST_GAIN = 0.02  # of a step; a smaller gain is within the accuracy of the speeds
_LEAST_GAIN_IN_PLACE = 0.005  # of a step, for a change without migration
RESTART_PAUSE_MS = 60_000.0
"""Pause of a restart if none was measured: the geometric mean of 12 s (warm processes, state in
memory) and 300 s (new processes, state on a shared disk)."""


@dataclass(frozen=True, kw_only=True)
class SwitchCandidate:
    """A plan with a new layout, its savings per step and the cost of the migration to it, or of a
    restart where that is the plan's action."""

    plan: Plan
    saved_ms: float
    cost_ms: float

    @property
    def break_even_steps(self) -> int:
        """Steps after which the savings exceed the migration cost."""
        return math.ceil(self.cost_ms / self.saved_ms)


@dataclass(frozen=True, kw_only=True)
class SkiRental:
    """Loss accumulated since the last migration, and the candidate that it is compared with.

    Break-even rule for ski rental (Karlin, Manasse, Rudolph and Sleator, 1988): stay as long as
    the accumulated loss, including the next step, does not exceed the migration cost. The total
    loss is at most twice that of an optimal offline rule, which knows how long every situation
    lasts and decides in each whether to migrate. The loss is kept when the situation changes, so a
    device that is slow again and again is treated like one that stays slow.
    """

    lost_ms: float = 0.0
    candidate: SwitchCandidate | None = None

    @property
    def due(self) -> bool:
        """True if the candidate should be applied before the next step."""
        candidate = self.candidate
        if candidate is None:
            return False
        return self.lost_ms + candidate.saved_ms > candidate.cost_ms

    @property
    def steps_until_due(self) -> int | None:
        """Steps until the candidate is due at constant speeds; None without a candidate."""
        if self.candidate is None:
            return None
        return max(0, int((self.candidate.cost_ms - self.lost_ms) // self.candidate.saved_ms))

    def after_step(self) -> SkiRental:
        """State after one more step in the current layout."""
        if self.candidate is None:
            return self
        return replace(self, lost_ms=self.lost_ms + self.candidate.saved_ms)

    def with_candidate(self, candidate: SwitchCandidate | None) -> SkiRental:
        """State for a new situation, in which `candidate` is the best migration."""
        return replace(self, candidate=candidate)


@dataclass(frozen=True, kw_only=True)
class ReplanDecision:
    """Result of `replan`.

    plan           to apply now; None: keep the current one
    rental         state to pass to the next `replan`, advanced with `after_step` once a step
    best           best new layout, even if its gain is too small for `rental`; None if no layout
                   is faster, or a dead rank leaves no choice
    least_gain_ms  gain per step from which on a migration is considered
    horizon_steps  expected duration of these speeds, as given to `replan`
    limit          what the actions of the job or dead ranks rule out, as a clause; empty: nothing
    advice         on the ranks to leave out of a job that can take on no other layout; None where
                   nothing is gained
    """

    plan: Plan | None
    rental: SkiRental = SkiRental()
    best: SwitchCandidate | None = None
    least_gain_ms: float = 0.0
    horizon_steps: int | None = None
    limit: str = ""
    advice: Advice | None = None

    @property
    def action(self) -> Action | None:
        """Action by which the plan is applied, or `notify` if there is only advice; None: no
        change."""
        if self.plan is not None:
            return self.plan.action
        return None if self.advice is None else Action.NOTIFY

    @property
    def explanation(self) -> str:
        """Reason for keeping or changing the layout, and when a migration pays or what else would
        help, as one clause."""
        if self.limit:
            return self.limit if self.advice is None else f"{self.limit}; {self.advice.summary}"
        best = self.best or self.rental.candidate
        if best is None:
            return "no new layout is faster at these speeds"
        is_restart = best.plan.action is Action.RESTART
        new, change = ("plan", "restart") if is_restart else ("layout", "migration")
        text = (
            f"a new {new} would save {duration(best.saved_ms)} per step for a {change} of "
            f"{duration(best.cost_ms)} and break even after {plural(best.break_even_steps, 'step')}"
        )
        if self.plan == best.plan:
            return f"{text}; it is applied now"
        left = self.rental.steps_until_due
        if left is None:
            return f"{text}; {self._needed_gain(best)}"
        if self.horizon_steps is not None:
            return f"{text}; these speeds are expected to last {plural(self.horizon_steps, 'step')}"
        return f"{text}; it is applied if these speeds last {plural(left, 'more step')}"

    def _needed_gain(self, best: SwitchCandidate) -> str:
        text = f"it is considered from a gain of {LEAST_GAIN:.0%} of the step"
        if self.least_gain_ms <= 0.0:
            return text
        steps = math.ceil(best.cost_ms / self.least_gain_ms)
        needed = f"{duration(self.least_gain_ms)} per step"
        return f"{text} ({needed}), with which it would break even after {plural(steps, 'step')}"


def unplanned(job: Job, layout: Layout, version: int = 0) -> Plan:
    """A layout under its schedule, with the job's quotas if they are for as many replicas."""
    quotas = job.quotas if layout.dp == job.layout.dp else even_quotas(job.microbatches, layout.dp)
    schedule = layout.schedule or job.schedule
    return Plan(version=version, layout=layout, quotas=quotas, schedule=schedule)


def with_restart(
    job: Job, options: Sequence[PlanOption], restart_ms: float | None
) -> Sequence[PlanOption]:
    """Options by the actions of the job: live ones, and the quickest one by a restart.

    options     a front of plans, the quickest first
    restart_ms  pause of a restart as measured; None: `RESTART_PAUSE_MS`

    A restart costs its pause and the work since the last checkpoint: half of the interval of the
    job's protection or, without one, one step. Its cost takes the place of `migration_ms`.
    """
    quickest = options[0]
    if Action.RESTART not in job.actions:
        return options
    pause_ms = RESTART_PAUSE_MS if restart_ms is None else restart_ms
    protection = job.protection
    again_ms = quickest.plan.step_ms if protection is None else protection.interval_s * 500.0
    cost_ms = pause_ms + again_ms
    live = options if Action.LAYOUT in job.actions else ()
    plan = replace(quickest.plan, action=Action.RESTART)
    restart = replace(quickest, plan=plan, migration_ms=cost_ms)
    return [*(_with_action_reason(o, cost_ms) for o in live), _with_action_reason(restart, cost_ms)]


def _with_action_reason(option: PlanOption, restart_ms: float) -> PlanOption:
    sentence = action_reason(option.plan.action, option.migration_ms, restart_ms)
    return replace(option, plan=replace(option.plan, reason=(*option.plan.reason, sentence)))


def least_cost(options: Sequence[PlanOption], horizon_steps: int | None) -> PlanOption:
    """Option for a job that cannot go on in its layout: least migration and steps together.

    options  a front of plans, the quickest first

    Over an unknown horizon the shortest migration is taken: its steps are little longer than the
    shortest ones, whereas another migration may cost many times as much as it gains.
    """
    if horizon_steps is None:
        return min(options, key=lambda option: (option.migration_ms, option.plan.step_ms))
    return min(options, key=lambda o: o.migration_ms + horizon_steps * o.plan.step_ms)


def decide(
    job: Job,
    current: Plan,
    options: Sequence[PlanOption],
    speeds: Mapping[int, float],
    rental: SkiRental,
    *,
    horizon_steps: int | None,
    links: LinkSlowdowns = ALL_LINKS_HEALTHY,
    expired: Callable[[], bool] = lambda: False,
    limit: str = "",
) -> ReplanDecision:
    """Choose between the plans of a front, a change without migration, and no change.

    limit  what rules out all new layouts, as a clause, where there are no options

    All ranks of the current layout must be alive. Other quotas and another schedule cost nothing
    and are applied for a small gain, as far as the actions of the job include them. A new layout
    must gain more than the accuracy of the speeds beyond that, and must pay for its migration or
    restart: within `horizon_steps`, or by the rule of `SkiRental` where the horizon is unknown. Of
    several, the candidate is the one that gains most within the horizon or, where that is unknown,
    breaks even first.
    """
    now_ms, found = best_in_place(job, current, speeds, links, expired)
    require_time(found.step_ms)
    in_place_ms = found.step_ms
    least_gain_ms = LEAST_GAIN * in_place_ms
    best = _best_switch(current, options, in_place_ms, least_gain_ms, horizon_steps)
    candidate = best if best is not None and best.saved_ms > least_gain_ms else None
    updated = rental.with_candidate(candidate)
    if candidate is not None:
        known = horizon_steps is not None
        saved_ms = candidate.saved_ms * (horizon_steps or 0)
        if saved_ms > candidate.cost_ms if known else updated.due:
            return ReplanDecision(plan=candidate.plan, best=candidate)
    kept = ReplanDecision(
        plan=None,
        rental=updated,
        best=best,
        least_gain_ms=least_gain_ms,
        horizon_steps=horizon_steps,
        limit=limit if job.takes_layouts else "this job takes on other quotas only",
    )
    if now_ms - in_place_ms <= _LEAST_GAIN_IN_PLACE * now_ms:
        return kept
    in_place = found.plan(job, current, speeds, links)
    return replace(kept, plan=replace(in_place, reason=(*in_place.reason, kept.explanation)))


def require_time(step_ms: float) -> None:
    """Raise `ContractError` for the step of a layout that cannot run within `max_in_flight`."""
    if math.isinf(step_ms):
        raise ContractError("max_in_flight", "is too small for the chunks of the layout")


def _best_switch(
    current: Plan,
    options: Sequence[PlanOption],
    in_place_ms: float,
    least_gain_ms: float,
    horizon_steps: int | None,
) -> SwitchCandidate | None:
    """Best new layout that gains enough, or else that gains anything; None if none does.

    A restart may also keep the layout, for other quotas or another schedule.
    """
    faster = [
        SwitchCandidate(
            plan=option.plan,
            saved_ms=in_place_ms - option.plan.step_ms,
            cost_ms=option.migration_ms,
        )
        for option in options
        if option.plan.step_ms < in_place_ms
        and (option.plan.layout != current.layout or option.plan.action is Action.RESTART)
    ]
    enough = [candidate for candidate in faster if candidate.saved_ms > least_gain_ms]

    def loss(candidate: SwitchCandidate) -> float:
        if horizon_steps is None:
            return candidate.cost_ms / candidate.saved_ms
        return candidate.cost_ms - horizon_steps * candidate.saved_ms

    return min(enough or faster, key=loss, default=None)


@dataclass(frozen=True)
class InPlaceChange:
    """Quotas and order of passes for the current places, and the step time with them.

    layout  the current one, which may hold other numbers of microbatches in flight
    """

    layout: Layout
    quotas: tuple[int, ...]
    schedule: Schedule
    step_ms: float

    def plan(
        self,
        job: Job,
        current: Plan,
        speeds: Mapping[int, float],
        links: LinkSlowdowns = ALL_LINKS_HEALTHY,
    ) -> Plan:
        """Next plan after `current` with this change."""
        require_time(self.step_ms)
        layout = self.layout
        given = job, layout, self.quotas, self.schedule, speeds, self.step_ms
        is_same = layout == current.layout and self.schedule is own_schedule(job, current)
        if is_same and Action.QUOTAS in job.actions:
            action = Action.QUOTAS
        else:
            action = Action.LAYOUT if Action.LAYOUT in job.actions else Action.RESTART
        return replace(
            current,
            version=current.version + 1,
            layout=layout,
            quotas=self.quotas,
            schedule=self.schedule,
            step_ms=self.step_ms,
            bound_ms=min(layout_bound(*given, links), self.step_ms),
            reason=reasons(job, current.layout, layout, self.quotas, speeds, self.schedule, links),
            action=action,
        )


def best_in_place(
    job: Job,
    current: Plan,
    speeds: Mapping[int, float],
    links: LinkSlowdowns = ALL_LINKS_HEALTHY,
    expired: Callable[[], bool] = lambda: False,
) -> tuple[float, InPlaceChange]:
    """Current step time, and the change with the shortest step found before `expired` that costs
    the job nothing.

    Other quotas need the action `quotas` or `layout`, another order of passes `layout`. All ranks
    of the current layout must be alive. A change fits into memory or needs no more than now.
    """
    layout, own = current.layout, own_schedule(job, current)
    now_ms = ReplicaTimes(job, layout.replicas, own, speeds, links).step_ms(current.quotas)
    best = InPlaceChange(layout, current.quotas, own, now_ms)
    usual = Layout(tuple(replace(replica, in_flight=()) for replica in layout.replicas))
    tried = [(layout, own)] if Action.QUOTAS in job.actions else []
    if Action.LAYOUT in job.actions:
        others = () if own is Schedule.INTERLEAVED else plan_schedules(job)
        tried = [(layout, own), *((usual, s) for s in others if (usual, s) != (layout, own))]
    for option, schedule in tried:
        if expired():
            return now_ms, best
        times = ReplicaTimes(job, option.replicas, schedule, speeds, links)
        quotas = times.best_quotas(current.quotas, expired)
        step_ms = times.step_ms(quotas)
        if step_ms < best.step_ms and _has_memory(job, current, option, quotas, schedule):
            best = InPlaceChange(option, quotas, schedule, step_ms)
    if Action.LAYOUT not in job.actions:
        return now_ms, best
    fixed_ms = layer_cost(job).step_ms
    given = best.layout, best.quotas, speeds, links, best.schedule, expired
    ahead = with_forwards_ahead(job, *given, within_ms=best.step_ms - fixed_ms)
    if ahead is not None:
        layout, quotas, makespan_ms = ahead
        best = InPlaceChange(layout, quotas, Schedule.EAGER_1F1B, makespan_ms + fixed_ms)
    return now_ms, best


def _has_memory(
    job: Job, current: Plan, layout: Layout, quotas: Sequence[int], schedule: Schedule
) -> bool:
    """True if a change fits by the estimate, or by the fact that as much is in use now."""
    if fits(job, layout, quotas, schedule):
        return True
    try:
        now_bytes = peak_bytes(job, current.layout, current.quotas, own_schedule(job, current))
    except ContractError:  # it cannot run within `max_in_flight`
        return False
    return peak_bytes(job, layout, quotas, schedule) <= now_bytes
