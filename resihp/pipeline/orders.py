"""The order in which one pipeline stage runs its passes, for each schedule.

One definition for the runtime that executes the passes, the simulator that times them and the
what-if analysis that replays recorded ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import pairwise

from resihp.contracts import ContractError, Job, Layout, Op, Replica, Schedule


class Part(StrEnum):
    """Part of a pass: all of it, or one half of a split backward."""

    WHOLE = "whole"
    INPUT = "input"  # gradient of the stage's input, what the previous stage waits for
    WEIGHT = "weight"  # gradient of the weights, which nobody waits for


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of one microbatch through one stage chunk.

    op          `Op.FORWARD` or `Op.BACKWARD`
    microbatch  index within the replica's step
    chunk       model chunk within the stage; 0 unless interleaved
    part        half of a split backward; WHOLE otherwise
    """

    op: Op
    microbatch: int
    chunk: int = 0
    part: Part = Part.WHOLE


_ANY = 1 << 20  # microbatches in flight without a limit


@cache
def most_ahead(
    schedule: Schedule | None, stages: int, max_in_flight: int | None = None
) -> tuple[int, ...]:
    """Microbatches whose input gradient each stage owes at most; not for interleaved stages.

    Without a schedule, for any order of whole passes: as many as `max_in_flight` lets it.
    """
    if schedule is None:
        return (max_in_flight or _ANY,) * stages
    each = 2 if schedule is Schedule.EAGER_1F1B else 1
    behind = range(stages - 1, -1, -1)
    return tuple(min(each * b + 1, max_in_flight or each * b + 1) for b in behind)


@cache
def most_in_flight(
    schedule: Schedule | None, stages: int, max_in_flight: int | None = None
) -> tuple[int, ...]:
    """Microbatches of which each stage holds activations at most; not for interleaved stages.

    A split backward holds them until the gradient of the weights is there, in every stage as many
    as the first one owes.
    """
    ahead = most_ahead(schedule, stages, max_in_flight)
    return ahead[:1] * stages if schedule is Schedule.ZERO_BUBBLE else ahead


@cache
def most_split(
    schedule: Schedule | None, stages: int, max_in_flight: int | None = None
) -> tuple[int, ...]:
    """Microbatches between the halves of a split backward pass, of those in flight, at most.

    A stage that holds as many as it ever does holds fewer of them only between a forward pass and
    the next backward pass.
    """
    held = most_in_flight(schedule, stages, max_in_flight)
    if schedule is not Schedule.ZERO_BUBBLE:
        return (0,) * stages
    owed = most_ahead(schedule, stages, max_in_flight)
    return tuple(all_of - before + 1 for all_of, before in zip(held, owed, strict=True))


@cache
def stage_order(
    schedule: Schedule,
    *,
    stage: int,
    stages: int,
    microbatches: int,
    chunks: int = 1,
    max_in_flight: int | None = None,
    in_flight: int | None = None,
) -> tuple[Pass, ...]:
    """Passes of `stage` (of `stages`) over one step of `microbatches`, in the order they run.

    1F1B         PipeDream-Flush (Narayanan et al., 2021): as many forwards ahead as there are
                 stages behind, then one forward, one backward
    EAGER_1F1B   1F1B with twice as many forwards ahead (Zhuang et al., 2023, 4.2), so that a
                 stage has work while the stages behind take their time; it costs memory
    INTERLEAVED  `chunks` model chunks per stage (Narayanan et al., 2021, 2.2); groups of
                 microbatches may be larger than `stages`, so that any number of them runs
    ZERO_BUBBLE  ZB-H1 (Qi et al., 2024): split backward; weight halves are put off so far that
                 every stage holds as much as the first one does under 1F1B

    `max_in_flight` caps the microbatches that were begun and not finished; `in_flight` is their
    number for this stage in place of what 1F1B or eager 1F1B gives (Adaptra, arXiv 2504.19232: the
    more forwards a stage is ahead of the next one, the longer a transfer may take). Raises
    `ContractError` for a stage that does not exist, for chunks without the interleaved schedule,
    for a cap under which the interleaved schedule could not run, and for a number in flight with a
    schedule that has no choice.
    """
    if not 0 <= stage < stages:
        raise ContractError("stage", f"must be within 0..{stages - 1}, not {stage}")
    if microbatches < 0:
        raise ContractError("microbatches", "must be 0 or more")
    if max_in_flight is not None and max_in_flight < 1:
        raise ContractError("max_in_flight", "must be 1 or more")
    if chunks != 1 and schedule is not Schedule.INTERLEAVED:
        raise ContractError("chunks", f"must be 1 with the schedule {schedule.value}")
    if chunks > 1 and in_flight is None:
        return _interleaved(stage, stages, microbatches, chunks, max_in_flight)
    owed = most_ahead(schedule, stages, max_in_flight)[stage]
    if in_flight is not None:
        if schedule not in (Schedule.ONE_F_ONE_B, Schedule.EAGER_1F1B) or in_flight < 1:
            raise ContractError("in_flight", f"cannot be {in_flight} under {schedule.value}")
        owed = min(in_flight, max_in_flight or in_flight)
    put_off = None
    if schedule is Schedule.ZERO_BUBBLE:
        put_off = most_in_flight(schedule, stages, max_in_flight)[stage] - owed
    return tuple(_one_f_one_b(min(owed, microbatches) - 1, put_off, microbatches))


def _one_f_one_b(ahead: int, put_off: int | None, microbatches: int) -> Iterator[Pass]:
    """Order of 1F1B; of a split backward the weight half follows `put_off` input halves later."""
    part = Part.WHOLE if put_off is None else Part.INPUT
    for index in range(microbatches + max(ahead, 0)):
        if index < microbatches:
            yield Pass(Op.FORWARD, index)
        if index >= ahead:
            yield Pass(Op.BACKWARD, index - ahead, part=part)
            if put_off is not None and index - ahead >= put_off:
                yield Pass(Op.BACKWARD, index - ahead - put_off, part=Part.WEIGHT)
    for index in range(max(microbatches - (put_off or 0), 0), microbatches):
        yield Pass(Op.BACKWARD, index, part=Part.WEIGHT)


def _interleaved(
    stage: int, stages: int, microbatches: int, chunks: int, max_in_flight: int | None
) -> tuple[Pass, ...]:
    groups = max(microbatches // stages, 1)
    size = -(-microbatches // groups)
    forward, backward = [], []
    edges = [microbatches * group // groups for group in range(groups + 1)]
    for group in (range(*pair) for pair in pairwise(edges)):  # as even as they go
        forward += [Pass(Op.FORWARD, m, c) for c in range(chunks) for m in group]
        backward += [Pass(Op.BACKWARD, m, c) for c in reversed(range(chunks)) for m in group]
    ahead = (stages - stage - 1) * 2 + (chunks - 1) * size
    ahead = len(forward) if size < stages else min(ahead, len(forward))
    peak = min(ahead + 1, len(forward))
    if max_in_flight is not None and peak > max_in_flight * chunks:
        least = -(-peak // chunks)
        raise ContractError("max_in_flight", f"must be {least} or more with {chunks} chunks")
    order = forward[:ahead]
    for index, later in enumerate(backward):
        order += forward[ahead + index : ahead + index + 1]
        order.append(later)
    return tuple(order)


def replica_orders(
    replica: Replica,
    quota: int,
    schedule: Schedule,
    *,
    max_in_flight: int | None = None,
    chunks: int | None = None,
) -> list[tuple[Pass, ...]]:
    """The order of every stage of a replica over `quota` microbatches; see `stage_order`.

    chunks  model chunks per stage, where its stages of one range each are divided into several;
            default: as many as they hold
    """
    stages = len(replica.stages)
    return [
        stage_order(
            schedule,
            stage=stage,
            stages=stages,
            microbatches=quota,
            chunks=chunks or replica.chunks,
            max_in_flight=max_in_flight,
            in_flight=in_flight,
        )
        for stage, in_flight in enumerate(replica.in_flight or (None,) * stages)
    ]


def chunks_run(job: Job, replicas: Sequence[Replica], schedule: Schedule) -> list[int]:
    """Model chunks per stage that each replica of a layout runs.

    Those that its stages hold; where all stages hold one range, an interleaved schedule divides
    them evenly into those of the job. A replica of one stage runs one chunk.
    """
    held = [replica.chunks for replica in replicas]
    if schedule is Schedule.INTERLEAVED and set(held) == {1}:
        return [job.chunks if len(replica.stages) > 1 else 1 for replica in replicas]
    return held


def replayed_schedule(schedule: Schedule, chunks: int) -> Schedule:
    """Schedule that stands for a job's with so many model chunks per stage: the interleaved one for
    several, as orders that split backward passes (ZB-V, DualPipe) are known for one chunk only."""
    return Schedule.INTERLEAVED if chunks > 1 else schedule


def job_orders(
    job: Job, quotas: Sequence[int], layout: Layout | None = None
) -> list[list[tuple[Pass, ...]]]:
    """The orders of all replicas of a layout of the job under its schedule; default: its own."""
    replicas = (layout or job.layout).replicas
    chunks = chunks_run(job, replicas, job.schedule)
    orders = []
    for replica, quota, count in zip(replicas, quotas, chunks, strict=True):
        given = quota, replayed_schedule(job.schedule, count)
        most = job.max_in_flight
        orders.append(replica_orders(replica, *given, max_in_flight=most, chunks=count))
    return orders
