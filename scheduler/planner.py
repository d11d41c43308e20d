"""A plan for the speed that is left: shares, slots, layers and quotas together."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from resihp.contracts import ContractError, Job, Layout, Plan, Schedule

from .cost_model import layer_cost
from .expected_step import expected_step_ms
from .reasons import reasons
from .search import interleaved, search
from .simulator import Speeds, speed_map
from .switching_rule import ReplanDecision, SkiRental, decide

_NOTHING_LOST = SkiRental()
_WORTH = 1e-3  # interleaved stages stay unless others are better by this much


def make_plan(
    job: Job,
    speeds: Speeds,
    layout: Layout | None = None,
    *,
    version: int = 1,
    from_step: int = 0,
    work: Sequence[float] | None = None,
    time_limit_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Plan:
    """The plan for devices of these speeds: 1.0 healthy (also where none is given), 0.0 dead.

    speeds        by rank; ranks that are in no layout yet may join
    layout        the present one; default: the one that the job started with
    work          of a sample of the job's microbatches, in any unit (what their lengths cost): the
                  predicted step then counts what unequal ones cost
    time_limit_s  the best plan found by then, read off `clock`; without it the same input gives
                  the same plan

    The plan is for the job's schedule, or for one of those that it lets plans choose from: the
    first unless another one that memory allows is clearly better. Interleaved stages stay so unless
    1F1B is clearly better, or several chunks do not fit; `reason` says which. Its `bound_ms` holds
    for that schedule, every way to spread whole layers and every quota, with the groups where they
    are.
    Raises `InfeasibleError` with the constraint that binds: "ranks", "memory" or "microbatches";
    `ContractError` for speeds that are none, and for a layout of another number of layers.
    """
    known = speed_map(speeds)
    current = layout or job.layout
    if current.layers != job.layout.layers:
        raise ContractError("layout", f"holds {current.layers} layers, not {job.layout.layers}")
    chosen = _chosen(job, current, known, _deadline(time_limit_s, clock))
    layout, quotas, schedule = chosen.layout, chosen.quotas, chosen.schedule
    fixed_ms = layer_cost(job).step_ms
    step_ms = chosen.makespan_ms + fixed_ms
    bound_ms = min(step_ms, chosen.bound_ms + fixed_ms)
    if work is not None:
        step_ms = max(step_ms, expected_step_ms(job, layout, quotas, known, schedule, work))
    return Plan(
        version=version,
        layout=layout,
        quotas=quotas,
        from_step=from_step,
        step_ms=step_ms,
        bound_ms=bound_ms,
        schedule=schedule,
        reason=(*reasons(job, current, layout, quotas, known, schedule), *chosen.why),
    )


def replan(
    job: Job,
    current: Plan,
    speeds: Speeds,
    *,
    step: int,
    rental: SkiRental = _NOTHING_LOST,
    horizon_steps: int | None = None,
    time_limit_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> ReplanDecision:
    """What to change under `speeds`, now and if they last.

    rental         what staying has cost so far: that of the last decision, with the steps since
    horizon_steps  how long these speeds last, where that is known; else `rental` decides

    A change that moves nothing (quotas, schedule) is made for a small gain. A new layout pays if it
    saves more than what its moves cost, and if it is no mere flicker between two nearly equal
    plans; until then it stands in the decision's `rental`. A dead rank in the current layout always
    leads to a plan. Raises `InfeasibleError`.
    """
    known = speed_map(speeds)
    plan = make_plan(
        job,
        known,
        current.layout,
        version=current.version + 1,
        from_step=step + 1,
        time_limit_s=time_limit_s,
        clock=clock,
    )
    if any(known.get(rank, 1.0) <= 0.0 for rank in current.layout.ranks):
        return ReplanDecision(plan=plan)
    return decide(job, current, plan, known, rental, horizon_steps=horizon_steps)


class _Chosen(NamedTuple):
    """What a plan is made of; times without what a step takes beside its microbatches."""

    layout: Layout
    quotas: tuple[int, ...]
    schedule: Schedule
    makespan_ms: float
    bound_ms: float
    why: tuple[str, ...] = ()


def _chosen(
    job: Job, current: Layout, speeds: Mapping[int, float], expired: Callable[[], bool]
) -> _Chosen:
    """The best that the search finds, with interleaved stages where the job has them."""
    found = search(job, current, speeds, expired)
    division, schedule = found.division, found.evaluator.setting.schedule
    plain = _Chosen(found.layout, division.quotas, schedule, division.makespan_ms, found.bound_ms)
    if job.schedule is not Schedule.INTERLEAVED or job.chunks == 1 or job.schedules:
        return plain
    option = interleaved(job, found, current, speeds, expired)
    if isinstance(option, str):
        return plain._replace(why=(f"stages hold one model chunk: {option}",))
    if option.makespan_ms > plain.makespan_ms * (1 + _WORTH):
        return plain._replace(why=("stages hold one model chunk, which is quicker here",))
    return _Chosen(
        option.layout, option.quotas, Schedule.INTERLEAVED, option.makespan_ms, option.bound_ms
    )


def _deadline(limit_s: float | None, clock: Callable[[], float]) -> Callable[[], bool]:
    if limit_s is None:
        return lambda: False
    end = clock() + limit_s
    return lambda: clock() >= end
