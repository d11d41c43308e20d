"""Plans for given device speeds: `make_plan`, `plan_front`, and `replan` for a running job."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from resihp.contracts import (
    Action,
    ContractError,
    InfeasibleError,
    Job,
    Layout,
    LinkVerdict,
    Plan,
    Schedule,
)
from resihp.formatting import byte_size, rank_list

from .advice import advise
from .cost_model import layer_cost
from .forwards_ahead import with_forwards_ahead
from .link_costs import LinkSlowdowns
from .memory import fits
from .migration import PlanOption, migration_ms
from .reasons import memory_reasons, reasons
from .search import Arrangement, FoundPlan, interleaved, search, search_front
from .search.front import LIMITS
from .search.plan_bounds import layout_bound
from .simulator import Speeds, speed_map
from .step_time import expected_step_ms
from .switching_rule import (
    InPlaceChange,
    ReplanDecision,
    SkiRental,
    best_in_place,
    decide,
    least_cost,
    unplanned,
    with_restart,
)

_NO_LOSS = SkiRental()
_LONGEST_MS = sys.float_info.max  # of a step; a layout that cannot run takes infinitely long
_TOLERANCE = 1e-3  # interleaved stages are kept unless 1F1B is faster by this fraction


def make_plan(
    job: Job,
    speeds: Speeds,
    layout: Layout | None = None,
    *,
    version: int = 1,
    from_step: int = 0,
    work: Sequence[float] | None = None,
    links: Iterable[LinkVerdict] = (),
    time_limit_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Plan:
    """Plan with the shortest step for these device speeds.

    speeds        by rank: 1.0 healthy (the default), 0.0 dead; ranks outside the layout may join
    layout        current layout; default: the initial one of the job
    work          costs of a sample of the job's microbatches, in any unit (e.g. FLOPs of their
                  sequence lengths): the predicted step then includes the cost of unequal work
    links         verdicts on links and groups, as `Detector.links` returns them: ranks are placed
                  so that those that are fail-slow carry least
    time_limit_s  return the best plan found by then, measured by `clock`; without a limit, equal
                  input gives an equal plan. The first arrangement, its bound and the step of the
                  present layout are found in any case, in time that grows with ranks and
                  microbatches

    The plan uses the first of the schedules that the job permits, unless another one that fits
    into memory is clearly faster. Interleaved stages are kept unless 1F1B is clearly faster or
    several chunks do not fit; `reason` states which. `bound_ms` holds for this schedule, every
    partition into whole layers that fits into memory (at least one in each stage, unless the plan
    itself has a stage without any) and every quota, with the groups in the plan's places. A job
    with the action `quotas` and neither `layout` nor `restart` keeps its layout and schedule.

    Raises `InfeasibleError` with the binding constraint ("ranks", "memory" or "actions"),
    never "memory" where all ranks of the current layout are alive and it fits under its schedule,
    or under the first that plans may use where that is not one of them; and `ContractError` for
    invalid speeds, for a layout of another number of layers, and for one that has to stay and
    cannot run within `max_in_flight`.
    """
    expired = _deadline(time_limit_s, clock)
    search = _PlanSearch.of(job, layout, speeds, links, version, from_step, expired)
    plan = search.quickest()
    if work is None:
        return plan
    given = plan.layout, plan.quotas, search.speeds, plan.schedule, work, search.links
    return replace(plan, step_ms=max(plan.step_ms, expected_step_ms(job, *given)))


def plan_front(
    job: Job,
    speeds: Speeds,
    layout: Layout | None = None,
    *,
    version: int = 1,
    from_step: int = 0,
    links: Iterable[LinkVerdict] = (),
    time_limit_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[PlanOption, ...]:
    """Plans between the one with the shortest step and the one that moves least state.

    Arguments and errors as for `make_plan`. From the first plan, which is as fast as that of
    `make_plan`, to the last, steps get longer, by 1% at most, and ranks receive fewer bytes: all
    together, and none receives more.
    Only the first plan for a job without a model (nothing is known to move), with interleaved
    stages, of too many devices, whose migration takes less than 1% of a step, or that cannot take
    on a layout live.
    """
    expired = _deadline(time_limit_s, clock)
    return _PlanSearch.of(job, layout, speeds, links, version, from_step, expired).front()


def replan(
    job: Job,
    current: Plan,
    speeds: Speeds,
    *,
    step: int,
    rental: SkiRental = _NO_LOSS,
    horizon_steps: int | None = None,
    restart_ms: float | None = None,
    links: Iterable[LinkVerdict] = (),
    time_limit_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> ReplanDecision:
    """Decide whether and how to change the current plan for `speeds`, by the actions of the job.

    rental         of the last decision, advanced by `SkiRental.after_step` once a step since
    horizon_steps  expected duration of these speeds; None (unknown): `rental` decides
    restart_ms     pause of the last restart; None: none was measured
    links          verdicts on links and groups, as for `make_plan`

    A change without migration (quotas, schedule) is made for a small gain. A new layout must gain
    at least 2% of the step and pay for its migration or restart; until then it is the `candidate`
    of the decision's `rental`, and `explanation` states when it would pay. A dead rank in the
    current layout always results in a plan. New layouts are those of `plan_front`: the one with the
    least cost within the horizon or, if that is unknown, the one whose migration pays first.

    A job without the actions `layout` and `restart` gets other quotas in its layout, or no plan,
    also with a dead rank, and `advice` on the ranks to leave out. A layout that is estimated above
    the memory budget, where none fits, still gets quotas and a schedule that need no more than now.
    Raises `InfeasibleError` where neither is found, and `ContractError` for what `make_plan`
    refuses, for quotas of another sum than the job's and for a current layout that cannot run
    within `max_in_flight`.
    """
    known, links, expired = speed_map(speeds), tuple(links), _deadline(time_limit_s, clock)
    slow = LinkSlowdowns.of(job, links)
    if current.microbatches != job.microbatches:
        raise ContractError("quotas", f"must sum to microbatches ({job.microbatches})")
    _require_layers(job, current.layout)
    if horizon_steps is not None and not horizon_steps >= 0:  # nor NaN
        raise ContractError("horizon_steps", f"must be 0 or more, not {horizon_steps}")
    if restart_ms is not None and not 0.0 <= restart_ms < math.inf:  # nor NaN
        raise ContractError("restart_ms", f"must be finite and 0 or more, not {restart_ms}")
    dead = _dead_ranks(current.layout, known)
    if not job.takes_layouts:
        given = job, current, known, slow, dead, rental, horizon_steps, step
        return _without_layouts(*given, expired)
    failure: InfeasibleError | None = None
    options: Sequence[PlanOption] = ()
    try:
        front = plan_front(
            job,
            known,
            current.layout,
            version=current.version + 1,
            from_step=step + 1,
            links=links,
            time_limit_s=time_limit_s,
            clock=clock,
        )
        options = with_restart(job, front, restart_ms)
    except InfeasibleError as error:
        if dead:
            raise
        failure = error
    if dead:
        limit = f"the layout cannot go on without {rank_list(dead)}"
        return ReplanDecision(plan=least_cost(options, horizon_steps).plan, limit=limit)
    limit = f"no new layout is feasible: {failure.detail}" if failure else ""
    chosen = job, current, options, known, rental
    decision = decide(
        *chosen, horizon_steps=horizon_steps, links=slow, expired=expired, limit=limit
    )
    if failure is not None and decision.plan is None:
        raise failure
    return _from_step(decision, step + 1)


def _without_layouts(
    job: Job,
    current: Plan,
    speeds: Mapping[int, float],
    links: LinkSlowdowns,
    dead: Sequence[int],
    rental: SkiRental,
    horizon_steps: int | None,
    step: int,
    expired: Callable[[], bool],
) -> ReplanDecision:
    """Decision for a job that keeps its layout: other quotas or nothing, and advice."""
    advice = advise(job, current, speeds, links)
    if dead or Action.QUOTAS not in job.actions:
        return ReplanDecision(plan=None, limit=_limit(job, dead), advice=advice)
    given = job, current, (), speeds, rental
    decision = decide(*given, horizon_steps=horizon_steps, links=links, expired=expired)
    return replace(_from_step(decision, step + 1), advice=advice)


def _from_step(decision: ReplanDecision, step: int) -> ReplanDecision:
    plan = decision.plan
    return decision if plan is None else replace(decision, plan=replace(plan, from_step=step))


def _limit(job: Job, dead: Sequence[int]) -> str:
    """Clause on a job that can take on no plan."""
    if Action.QUOTAS not in job.actions:
        return "this job takes on no plan"
    return f"this job takes on other quotas only, and cannot go on without {rank_list(dead)}"


@dataclass(frozen=True)
class _PlanSearch:
    """Search for plans of a job in its present state."""

    job: Job
    layout: Layout
    speeds: Mapping[int, float]
    links: LinkSlowdowns
    version: int
    """Of the plans to make."""
    from_step: int
    expired: Callable[[], bool]

    @classmethod
    def of(
        cls,
        job: Job,
        layout: Layout | None,
        speeds: Speeds,
        links: Iterable[LinkVerdict],
        version: int,
        from_step: int,
        expired: Callable[[], bool],
    ) -> _PlanSearch:
        """Check what a caller gave. Raises `ContractError`."""
        known, current = speed_map(speeds), layout or job.layout
        _require_layers(job, current)
        slow = LinkSlowdowns.of(job, links)
        return cls(job, current, known, slow, version, from_step, expired)

    def quickest(self) -> Plan:
        """Plan with the shortest step, by the actions of the job. Raises `InfeasibleError`."""
        if not self.job.takes_layouts:
            return self._in_place()
        found = self._arrangements()
        if isinstance(found, Plan):
            return found
        plan = self._plan(self._quickest(found))
        return self._kept_if_as_fast(plan) or plan

    def front(self) -> tuple[PlanOption, ...]:
        """Plans from the quickest one to that which moves least. Raises `InfeasibleError`."""
        if not self.job.takes_layouts:
            return (self._option(self._in_place()),)
        placed = self._arrangements()
        if isinstance(placed, Plan):
            return (self._option(placed),)
        if _is_interleaved(self.job) or Action.LAYOUT not in self.job.actions:
            found = [self._quickest(placed)]
        else:
            given = self.job, self.layout, self.speeds, placed, self.expired, self.links
            found = [_found_plan(arrangement) for arrangement in search_front(*given)]
        options = [self._option(self._plan(one)) for one in found]
        options = _front_of(options) if self.links else options
        as_fast = self._kept_if_as_fast(options[0].plan)
        if as_fast is not None:
            return (self._option(as_fast),)
        return (options[0], *(_with_price(option, options[0]) for option in options[1:]))

    def _option(self, plan: Plan) -> PlanOption:
        return PlanOption.of(self.job, self.layout, plan)

    def _arrangements(self) -> list[Arrangement] | Plan:
        """Arrangements, the quickest first; a plan that keeps the layout where there are none."""
        try:
            return search(self.job, self.layout, self.speeds, self.expired, self.links)
        except InfeasibleError:
            kept = self._kept()
            if kept is None:
                raise
            return kept

    def _in_place(self) -> Plan:
        """Plan with the best quotas in this layout."""
        dead = _dead_ranks(self.layout, self.speeds)
        if dead or Action.QUOTAS not in self.job.actions:
            raise InfeasibleError("actions", _limit(self.job, dead))
        return self._numbered(self._best_in_place())

    def _kept(self, within_ms: float = _LONGEST_MS) -> Plan | None:
        """Plan that keeps the layout; None with a dead rank, for a longer step than `within_ms`,
        and where it does not fit into memory."""
        if _dead_ranks(self.layout, self.speeds):
            return None
        found = self._best_in_place()
        if found.step_ms > within_ms:
            return None
        fitting = fits(self.job, found.layout, found.quotas, found.schedule)
        return self._numbered(found) if fitting else None

    def _kept_if_as_fast(self, plan: Plan) -> Plan | None:
        """Plan that keeps the layout, if its step is no longer than that of a `plan` that does not.

        The search leaves out what it takes to be slower or not to fit, such as slow ranks with
        memory that others lack, and stages without layers.
        """
        if plan.layout == self.layout:
            return None
        return self._kept(within_ms=plan.step_ms * (1 + 1e-9))

    def _best_in_place(self) -> InPlaceChange:
        current = unplanned(self.job, self.layout, self.version)
        return best_in_place(self.job, current, self.speeds, self.links, self.expired)[1]

    def _numbered(self, change: InPlaceChange) -> Plan:
        current = unplanned(self.job, self.layout, self.version)
        plan = change.plan(self.job, current, self.speeds, self.links)
        return replace(plan, version=self.version, from_step=self.from_step)

    def _quickest(self, placed: Sequence[Arrangement]) -> FoundPlan:
        """The quickest result of the search, with interleaved stages where the job has them: of
        those that are as quick, the one that moves least."""
        if not _is_interleaved(self.job):
            return _found_plan(placed[0])
        options = [self._with_chunks(one) for one in placed]
        within_ms = min(option.makespan_ms for option in options) * (1 + _TOLERANCE)
        close = [option for option in options if option.makespan_ms <= within_ms]
        return min(close, key=lambda option: migration_ms(self.job, self.layout, option.layout))

    def _with_chunks(self, found: Arrangement) -> FoundPlan:
        """Result of the search, with interleaved stages unless 1F1B is clearly faster."""
        plain = _found_plan(found)
        if not _is_interleaved(self.job):
            return plain
        option = interleaved(self.job, found, self.layout, self.speeds, self.expired, self.links)
        if isinstance(option, str):
            return plain._replace(why=(f"stages hold one model chunk: {option}",))
        if option.makespan_ms > plain.makespan_ms * (1 + _TOLERANCE):
            return plain._replace(why=("stages hold one model chunk, which is faster here",))
        return option

    def _with_forwards_ahead(self, found: FoundPlan) -> FoundPlan:
        """Result of the search, with slow links in the order of passes that hides them best."""
        given = found.layout, found.quotas, self.speeds, self.links, found.schedule, self.expired
        option = with_forwards_ahead(self.job, *given, within_ms=found.makespan_ms)
        if option is None:
            return found
        layout, quotas, makespan_ms = option
        fixed_ms, schedule = layer_cost(self.job).step_ms, Schedule.EAGER_1F1B
        step_ms = makespan_ms + fixed_ms
        bound_ms = layout_bound(
            self.job, layout, quotas, schedule, self.speeds, step_ms, self.links
        )
        return found._replace(
            layout=layout,
            quotas=quotas,
            schedule=schedule,
            makespan_ms=makespan_ms,
            bound_ms=bound_ms - fixed_ms,
        )

    def _plan(self, found: FoundPlan) -> Plan:
        """Plan of a result of the search."""
        job, speeds = self.job, self.speeds
        found = self._with_forwards_ahead(found)
        fixed_ms = layer_cost(job).step_ms
        step_ms = found.makespan_ms + fixed_ms
        given = found.layout, found.quotas, speeds, found.schedule, self.links
        why = reasons(job, self.layout, *given)
        if found.layout != self.layout and not _dead_ranks(self.layout, speeds):
            why += memory_reasons(job, unplanned(job, self.layout))
        return Plan(
            version=self.version,
            layout=found.layout,
            quotas=found.quotas,
            from_step=self.from_step,
            step_ms=step_ms,
            bound_ms=min(step_ms, found.bound_ms + fixed_ms),
            schedule=found.schedule,
            reason=(*why, *found.why),
            action=Action.LAYOUT if Action.LAYOUT in job.actions else Action.RESTART,
        )


def _require_layers(job: Job, layout: Layout) -> None:
    if layout.layers != job.layout.layers:
        raise ContractError("layout", f"holds {layout.layers} layers, not {job.layout.layers}")


def _dead_ranks(layout: Layout, speeds: Mapping[int, float]) -> list[int]:
    return [rank for rank in layout.ranks if speeds.get(rank, 1.0) <= 0.0]


def _found_plan(found: Arrangement) -> FoundPlan:
    schedule = found.evaluator.setting.schedule
    return FoundPlan(found.layout, found.quotas, schedule, found.makespan_ms, found.bound_ms)


def _front_of(options: Sequence[PlanOption]) -> list[PlanOption]:
    """Options that move less than all quicker ones, for a step that is little longer.

    Another order of passes may have made one much quicker than the others.
    """
    quickest, *others = sorted(options, key=lambda option: option.plan.step_ms)
    kept = [quickest]
    for option in others:
        is_close = option.plan.step_ms <= quickest.plan.step_ms * (1 + LIMITS[-1])
        is_less = option.total_bytes < kept[-1].total_bytes
        if is_close and is_less and option.most_bytes <= quickest.most_bytes:
            kept.append(option)
    return kept


def _with_price(option: PlanOption, quickest: PlanOption) -> PlanOption:
    """Option whose plan states what it gives up for moving less."""
    slower = option.plan.step_ms / quickest.plan.step_ms - 1.0
    moved, instead = byte_size(option.total_bytes), byte_size(quickest.total_bytes)
    sentence = f"moves {moved} instead of {instead}, for a step that is {slower:.2%} longer"
    return replace(option, plan=replace(option.plan, reason=(*option.plan.reason, sentence)))


def _is_interleaved(job: Job) -> bool:
    return job.schedule is Schedule.INTERLEAVED and job.chunks > 1 and not job.schedules


def _deadline(limit_s: float | None, clock: Callable[[], float]) -> Callable[[], bool]:
    if limit_s is None:
        return lambda: False
    if not limit_s >= 0.0:  # nor NaN
        raise ContractError("time_limit_s", f"must be 0 or more, not {limit_s}")
    end = clock() + limit_s
    return lambda: clock() >= end
