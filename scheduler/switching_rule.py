"""Switching rule for the plan of a running job: gain per step, migration cost, ski rental."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from resihp.contracts import Job, Layout, Plan, Schedule
from resihp.formatting import duration, plural

from .memory import fits, plan_schedules
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


def decide(
    job: Job,
    current: Plan,
    plan: Plan,
    speeds: Mapping[int, float],
    rental: SkiRental,
    *,
    horizon_steps: int | None,
) -> ReplanDecision:
    """Choose between `plan`, a change without migration, and no change.

    All ranks of the current layout must be alive. Other quotas and another schedule cost nothing
    and are applied for a small gain. A new layout must gain more than the accuracy of the speeds
    beyond that, and must pay for its migration: within `horizon_steps`, or by the rule of
    `SkiRental` where the horizon is unknown.
    """
    now_ms, in_place_ms, quotas, schedule = _best_in_place(job, current, speeds)
    best, saved_ms = None, in_place_ms - plan.step_ms
    if plan.layout != current.layout and saved_ms > 0.0:
        cost_ms = migration_ms(job, current.layout, plan.layout)
        best = SwitchCandidate(plan=plan, saved_ms=saved_ms, cost_ms=cost_ms)
    least_gain_ms = _LEAST_GAIN * in_place_ms
    candidate = best if saved_ms > least_gain_ms else None
    updated = rental.with_candidate(candidate)
    if candidate is not None:
        known = horizon_steps is not None
        pays = saved_ms * (horizon_steps or 0) > candidate.cost_ms if known else updated.due
        if pays:
            return ReplanDecision(plan=plan)
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
        plan,
        layout=current.layout,
        quotas=quotas,
        schedule=schedule,
        step_ms=in_place_ms,
        bound_ms=min(bound_ms, in_place_ms),
        reason=(*changes, kept.explanation),
    )
    return replace(kept, plan=in_place)


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


def migration_ms(job: Job, old: Layout, new: Layout) -> float:
    """Time to move parameters and optimizer state over the links between nodes; 0 without a model.

    Ranks receive in parallel, so the rank that receives most determines the time.
    """
    received = received_bytes(job, old, new)
    if not received:
        return 0.0
    return job.links.latency_ms + max(received.values()) / (job.links.inter_gbytes_per_s * 1e6)


def received_bytes(job: Job, old: Layout, new: Layout) -> dict[int, float]:
    """Bytes of parameters and optimizer state that each rank receives; empty without a model.

    A rank holds layer ranges times a range of each layer, and keeps the intersection of both
    layouts.
    """
    model = job.model
    if model is None:
        return {}
    bytes_per_param = job.memory.bytes_per_param / 2.0 + job.memory.optimizer_bytes_per_param
    before = dict(_rank_states(old))
    received = {}
    for rank, held in _rank_states(new):
        had = before.get(rank, _NO_STATE)
        width, common = held.part[1] - held.part[0], _overlap(held.part, had.part)
        inner = sum(stop - start for start, stop in held.chunks) * width
        inner -= sum(_overlap(a, b) for a in held.chunks for b in had.chunks) * common
        kept = (held.first and had.first) + (held.last and had.last)
        ends = (held.first + held.last) * width - kept * common
        size = bytes_per_param * (inner * model.layer_params + ends * model.embedding_params)
        if size > 0.0:
            received[rank] = size
    return received


class _RankState(NamedTuple):
    """Layer ranges of a rank, its part of each layer (within 0..1), and embedding and head."""

    chunks: tuple[tuple[int, int], ...]
    part: tuple[float, float]
    first: bool = False
    last: bool = False


_NO_STATE = _RankState((), (0.0, 0.0))


def _rank_states(layout: Layout) -> Iterator[tuple[int, _RankState]]:
    for replica in layout.replicas:
        for index, stage in enumerate(replica.stages):
            first, last = index == 0, index == len(replica.stages) - 1
            units, edge = sum(stage.shares), 0
            for rank, share in zip(stage.ranks, stage.shares, strict=True):
                part = (edge / units, (edge + share) / units)
                yield rank, _RankState(stage.chunks, part, first, last)
                edge += share


def _overlap(one: tuple[float, float], other: tuple[float, float]) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
