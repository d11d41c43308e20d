"""Switching rule for the plan of a running job: gain per step, migration cost, ski rental."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from resihp.contracts import Job, Plan, Schedule
from resihp.formatting import duration, plural

from .memory import fits, plan_schedules
from .migration import PlanOption
from .reasons import reasons
from .search.plan_bounds import layout_bound
from .step_time import ReplicaTimes

_LEAST_GAIN = 0.02  # of a step; a smaller gain is within the accuracy of the speeds
_LEAST_GAIN_IN_PLACE = 0.005  # of a step, for a change without migration


@dataclass(frozen=True, kw_only=True)
class SwitchCandidate:
    """A plan with a new layout, its savings per step and the cost of the migration to it."""

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
                   is faster
    least_gain_ms  gain per step from which on a migration is considered
    horizon_steps  expected duration of these speeds, as given to `replan`
    """

    plan: Plan | None
    rental: SkiRental = SkiRental()
    best: SwitchCandidate | None = None
    least_gain_ms: float = 0.0
    horizon_steps: int | None = None

    @property
    def explanation(self) -> str:
        """Reason for keeping the layout, and when a migration would pay, as one clause."""
        best = self.best or self.rental.candidate
        if best is None:
            return "no new layout is faster at these speeds"
        text = (
            f"a new layout would save {duration(best.saved_ms)} per step for a migration of "
            f"{duration(best.cost_ms)} and break even after {plural(best.break_even_steps, 'step')}"
        )
        left = self.rental.steps_until_due
        if left is None:
            return f"{text}; {self._needed_gain(best)}"
        if self.horizon_steps is not None:
            return f"{text}; these speeds are expected to last {plural(self.horizon_steps, 'step')}"
        return f"{text}; it is applied if these speeds last {plural(left, 'more step')}"

    def _needed_gain(self, best: SwitchCandidate) -> str:
        text = f"it is considered from a gain of {_LEAST_GAIN:.0%} of the step"
        if self.least_gain_ms <= 0.0:
            return text
        steps = math.ceil(best.cost_ms / self.least_gain_ms)
        needed = f"{duration(self.least_gain_ms)} per step"
        return f"{text} ({needed}), with which it would break even after {plural(steps, 'step')}"


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
) -> ReplanDecision:
    """Choose between the plans of a front, a change without migration, and no change.

    All ranks of the current layout must be alive. Other quotas and another schedule cost nothing
    and are applied for a small gain. A new layout must gain more than the accuracy of the speeds
    beyond that, and must pay for its migration: within `horizon_steps`, or by the rule of
    `SkiRental` where the horizon is unknown. Of several, the candidate is the one that gains most
    within the horizon or, where that is unknown, breaks even first.
    """
    now_ms, in_place_ms, quotas, schedule = _best_in_place(job, current, speeds)
    least_gain_ms = _LEAST_GAIN * in_place_ms
    best = _best_switch(current, options, in_place_ms, least_gain_ms, horizon_steps)
    candidate = best if best is not None and best.saved_ms > least_gain_ms else None
    updated = rental.with_candidate(candidate)
    if candidate is not None:
        known = horizon_steps is not None
        saved_ms = candidate.saved_ms * (horizon_steps or 0)
        if saved_ms > candidate.cost_ms if known else updated.due:
            return ReplanDecision(plan=candidate.plan)
    kept = ReplanDecision(
        plan=None,
        rental=updated,
        best=best,
        least_gain_ms=least_gain_ms,
        horizon_steps=horizon_steps,
    )
    if now_ms - in_place_ms <= _LEAST_GAIN_IN_PLACE * now_ms:
        return kept
    changes = reasons(job, current.layout, current.layout, quotas, speeds, schedule)
    bound_ms = layout_bound(job, current.layout, quotas, schedule, speeds, in_place_ms)
    in_place = replace(
        options[0].plan,
        layout=current.layout,
        quotas=quotas,
        schedule=schedule,
        step_ms=in_place_ms,
        bound_ms=min(bound_ms, in_place_ms),
        reason=(*changes, kept.explanation),
    )
    return replace(kept, plan=in_place)


def _best_switch(
    current: Plan,
    options: Sequence[PlanOption],
    in_place_ms: float,
    least_gain_ms: float,
    horizon_steps: int | None,
) -> SwitchCandidate | None:
    """Best new layout that gains enough, or else that gains anything; None if none does."""
    faster = [
        SwitchCandidate(
            plan=option.plan,
            saved_ms=in_place_ms - option.plan.step_ms,
            cost_ms=option.migration_ms,
        )
        for option in options
        if option.plan.layout != current.layout and option.plan.step_ms < in_place_ms
    ]
    enough = [candidate for candidate in faster if candidate.saved_ms > least_gain_ms]

    def loss(candidate: SwitchCandidate) -> float:
        if horizon_steps is None:
            return candidate.cost_ms / candidate.saved_ms
        return candidate.cost_ms - horizon_steps * candidate.saved_ms

    return min(enough or faster, key=loss, default=None)


def _best_in_place(
    job: Job, current: Plan, speeds: Mapping[int, float]
) -> tuple[float, float, tuple[int, ...], Schedule]:
    """Current step time, and the least without migration with its quotas and schedule."""
    replicas = current.layout.replicas
    chunked = any(replica.chunks > 1 for replica in replicas)
    schedules = (Schedule.INTERLEAVED,) if chunked else plan_schedules(job)
    own = current.schedule if current.schedule in schedules else schedules[0]
    now_ms = ReplicaTimes(job, replicas, own, speeds).step_ms(current.quotas)
    best = now_ms, current.quotas, own
    for schedule in (own, *(other for other in schedules if other is not own)):
        times = ReplicaTimes(job, replicas, schedule, speeds)
        quotas = times.best_quotas(current.quotas)
        step_ms = times.step_ms(quotas)
        if step_ms < best[0] and fits(job, current.layout, quotas, schedule):
            best = step_ms, quotas, schedule
    return now_ms, *best
