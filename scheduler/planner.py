"""Plans for given device speeds: `make_plan` for a job, `replan` for a running one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from resihp.contracts import ContractError, Job, Layout, Plan, Schedule

from .cost_model import layer_cost
from .reasons import reasons
from .search import FoundPlan, interleaved, search
from .simulator import Speeds, speed_map
from .step_time import expected_step_ms
from .switching_rule import ReplanDecision, SkiRental, decide

_NO_LOSS = SkiRental()
_TOLERANCE = 1e-3  # interleaved stages are kept unless 1F1B is faster by this fraction


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
    """Plan with the shortest step for these device speeds.

    speeds        by rank: 1.0 healthy (the default), 0.0 dead; ranks outside the layout may join
    layout        current layout; default: the initial one of the job
    work          costs of a sample of the job's microbatches, in any unit (e.g. FLOPs of their
                  sequence lengths): the predicted step then includes the cost of unequal work
    time_limit_s  return the best plan found by then, measured by `clock`; without a limit, equal
                  input gives an equal plan

    The plan uses the first of the schedules that the job permits, unless another one that fits
    into memory is clearly faster. Interleaved stages are kept unless 1F1B is clearly faster or
    several chunks do not fit; `reason` states which. `bound_ms` holds for this schedule, every
    partition into whole layers and every quota, with the groups in the plan's places.

    Raises `InfeasibleError` with the binding constraint ("ranks", "memory" or "microbatches") and
    `ContractError` for invalid speeds and for a layout of another number of layers.
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
    rental: SkiRental = _NO_LOSS,
    horizon_steps: int | None = None,
    time_limit_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> ReplanDecision:
    """Decide whether and how to change the current plan for `speeds`.

    rental         of the last decision, advanced by `SkiRental.after_step` once a step since
    horizon_steps  expected duration of these speeds; None (unknown): `rental` decides

    A change without migration (quotas, schedule) is made for a small gain. A new layout must gain
    at least 2% of the step and pay for its migration; until then it is the `candidate` of the
    decision's `rental`, and `explanation` states when it would pay. A dead rank in the current
    layout always results in a plan. Raises `InfeasibleError`.
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


def _chosen(
    job: Job, current: Layout, speeds: Mapping[int, float], expired: Callable[[], bool]
) -> FoundPlan:
    """Best result of the search, with interleaved stages where the job has them."""
    found = search(job, current, speeds, expired)
    schedule = found.evaluator.setting.schedule
    plain = FoundPlan(found.layout, found.quotas, schedule, found.makespan_ms, found.bound_ms)
    if job.schedule is not Schedule.INTERLEAVED or job.chunks == 1 or job.schedules:
        return plain
    option = interleaved(job, found, current, speeds, expired)
    if isinstance(option, str):
        return plain._replace(why=(f"stages hold one model chunk: {option}",))
    if option.makespan_ms > plain.makespan_ms * (1 + _TOLERANCE):
        return plain._replace(why=("stages hold one model chunk, which is faster here",))
    return option


def _deadline(limit_s: float | None, clock: Callable[[], float]) -> Callable[[], bool]:
    if limit_s is None:
        return lambda: False
    end = clock() + limit_s
    return lambda: clock() >= end
