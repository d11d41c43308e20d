"""The order in which a rank runs the passes of its share of a step, and which plans can be run."""

from __future__ import annotations

from resihp.contracts import ContractError, Plan, Schedule
from resihp.layout import Parameters
from resihp.pipeline.orders import Pass, stage_order

from ..process_groups.layout_groups import LayoutGroups


def order_of(plan: Plan, groups: LayoutGroups, microbatches: int) -> tuple[Pass, ...]:
    """The passes of this rank's stage over `microbatches`, which count from 0 in its share."""
    place = groups.place
    return stage_order(
        plan.schedule,
        stage=place.pp,
        stages=len(groups.layout.replicas[place.dp].stages),
        microbatches=microbatches,
        chunks=groups.chunks,
    )


def check_plan(plan: Plan, parameters: Parameters, microbatches: int) -> None:
    """Whether a job that trains this model, with so many microbatches a step, can run `plan`.

    Raises `ContractError`. A plan that leaves out a layer, or changes the microbatches of a step,
    would run, but would not train what the job trains.
    """
    held, due = plan.layout.layers, len(parameters.layers)
    if held != due:
        raise ContractError("layout", f"holds {held} layers, the model has {due}")
    if plan.microbatches != microbatches:
        found = plan.microbatches
        raise ContractError("quotas", f"sum to {found} microbatches, the job has {microbatches}")
    check_schedule(plan)


def check_schedule(plan: Plan) -> None:
    """Whether stages hold as many model chunks as the schedule needs. Raises `ContractError`."""
    chunks = {replica.chunks for replica in plan.layout.replicas}
    if plan.schedule is Schedule.INTERLEAVED and chunks == {1}:
        raise ContractError("schedule", "interleaved needs several model chunks in each stage")
    if plan.schedule is not Schedule.INTERLEAVED and chunks != {1}:
        raise ContractError("schedule", f"{plan.schedule} runs one model chunk in each stage")
