"""Order of the passes of a rank, and checks that a plan can run."""

from __future__ import annotations

from dataclasses import replace

from resihp.contracts import ContractError, Plan, Schedule
from resihp.layout import Parameters
from resihp.pipeline.orders import Pass, replica_orders

from ..process_groups.layout_groups import LayoutGroups


def order_of(
    plan: Plan, groups: LayoutGroups, microbatches: int, max_in_flight: int | None = None
) -> tuple[Pass, ...]:
    """Return the passes of this rank's stage over `microbatches`, counted from 0.

    max_in_flight  of the job. Where interleaved stages cannot keep to it with what is left of a
                   step, as with other numbers than their quotas', so many run after each other
    """
    place = groups.place
    given = groups.layout.replicas[place.dp], microbatches, plan.schedule
    try:
        return replica_orders(*given, max_in_flight=max_in_flight)[place.pp]
    except ContractError:
        if max_in_flight is None or microbatches <= max_in_flight:
            raise
    first = order_of(plan, groups, max_in_flight, max_in_flight)
    rest = order_of(plan, groups, microbatches - max_in_flight, max_in_flight)
    return *first, *(replace(one, microbatch=one.microbatch + max_in_flight) for one in rest)


def check_plan(
    plan: Plan, parameters: Parameters, microbatches: int, max_in_flight: int | None = None
) -> None:
    """Check that a job with this model, microbatches per step and cap can run `plan`.

    Raises `ContractError` also for plans that would run but train something else: with a layer left
    out, or with another number of microbatches.
    """
    held, due = plan.layout.layers, len(parameters.layers)
    if held != due:
        raise ContractError("layout", f"holds {held} layers, the model has {due}")
    if plan.microbatches != microbatches:
        found = plan.microbatches
        raise ContractError("quotas", f"sum to {found} microbatches, the job has {microbatches}")
    check_schedule(plan, max_in_flight)


def check_schedule(plan: Plan, max_in_flight: int | None = None) -> None:
    """Check that stages hold the chunks that the schedule needs, and as many microbatches as it
    lets them hold, and as the job does. Raises `ContractError`."""
    chunks = {replica.chunks for replica in plan.layout.replicas}
    if plan.schedule is Schedule.INTERLEAVED and chunks == {1}:
        raise ContractError("schedule", "interleaved needs several model chunks in each stage")
    if plan.schedule is not Schedule.INTERLEAVED and chunks != {1}:
        raise ContractError("schedule", f"{plan.schedule} runs one model chunk in each stage")
    has_choice = plan.schedule in (Schedule.ONE_F_ONE_B, Schedule.EAGER_1F1B)
    if not has_choice and any(replica.in_flight for replica in plan.layout.replicas):
        raise ContractError("in_flight", f"{plan.schedule} fixes how many microbatches are")
    for replica, quota in zip(plan.layout.replicas, plan.quotas, strict=True):
        replica_orders(replica, quota, plan.schedule, max_in_flight=max_in_flight)
