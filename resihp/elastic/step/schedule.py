"""Order of the passes of a rank, and checks that a plan can run."""

from __future__ import annotations

from resihp.contracts import ContractError, Plan, Schedule
from resihp.layout import Parameters
from resihp.pipeline.orders import Pass, stage_order

from ..process_groups.layout_groups import LayoutGroups


def order_of(plan: Plan, groups: LayoutGroups, microbatches: int) -> tuple[Pass, ...]:
    """Return the passes of this rank's stage over `microbatches`, counted from 0."""
    place = groups.place
    replica = groups.layout.replicas[place.dp]
    return stage_order(
        plan.schedule,
        stage=place.pp,
        stages=len(replica.stages),
        microbatches=microbatches,
        chunks=groups.chunks,
        in_flight=replica.in_flight[place.pp] if replica.in_flight else None,
    )


def check_plan(plan: Plan, parameters: Parameters, microbatches: int) -> None:
    """Check that a job with this model and so many microbatches per step can run `plan`.

    Raises `ContractError` also for plans that would run but train something else: with a layer left
    out, or with another number of microbatches.
    """
    held, due = plan.layout.layers, len(parameters.layers)
    if held != due:
        raise ContractError("layout", f"holds {held} layers, the model has {due}")
    if plan.microbatches != microbatches:
        found = plan.microbatches
        raise ContractError("quotas", f"sum to {found} microbatches, the job has {microbatches}")
    check_schedule(plan)


def check_schedule(plan: Plan) -> None:
    """Check that stages hold the chunks that the schedule needs, and as many microbatches as it
    lets them hold. Raises `ContractError`."""
    chunks = {replica.chunks for replica in plan.layout.replicas}
    if plan.schedule is Schedule.INTERLEAVED and chunks == {1}:
        raise ContractError("schedule", "interleaved needs several model chunks in each stage")
    if plan.schedule is not Schedule.INTERLEAVED and chunks != {1}:
        raise ContractError("schedule", f"{plan.schedule} runs one model chunk in each stage")
    has_choice = plan.schedule in (Schedule.ONE_F_ONE_B, Schedule.EAGER_1F1B)
    if not has_choice and any(replica.in_flight for replica in plan.layout.replicas):
        raise ContractError("in_flight", f"{plan.schedule} fixes how many microbatches are")
