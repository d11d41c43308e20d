"""What all policies share: an outcome, timing of a layout, layers and quotas by simple rules."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from resihp.contracts import Job, Layout, Replica, Schedule, Stage

from ..cost_model import layer_cost, transfer_ms
from ..makespan import pipeline_makespans
from ..memory import plan_schedules
from ..simulator import replica_makespan, stage_times

Speeds = Mapping[int, float]


class Transition(StrEnum):
    """How a job gets from one layout to the next."""

    NONE = "none"
    LIVE = "live"
    RESTART = "restart"


@dataclass(frozen=True)
class PolicyOutcome:
    """How a job runs under a policy; `step_ms` is inf where it stands still.

    `schedule` is that of the pipelines. `layout` is None where the policy's way of sharing work
    is not a layout of whole replicas.
    """

    step_ms: float
    layout: Layout | None = None
    quotas: tuple[int, ...] = ()
    pause: Transition = Transition.NONE
    schedule: Schedule = Schedule.ONE_F_ONE_B
    detail: str = ""


STOPPED = PolicyOutcome(math.inf, detail="no replica is left")


@dataclass(frozen=True)
class FaultPolicy:
    """A named policy, where it comes from, and its rule from the healthy layout and the speeds."""

    name: str
    source: str
    decide: Callable[[Job, Speeds], PolicyOutcome] = field(repr=False)


def speed_of(speeds: Speeds, stage: Stage) -> float:
    """Speed of a group with equal shares: that of its slowest rank; 0 if one is dead."""
    return min(speeds.get(rank, 1.0) for rank in stage.ranks)


def replica_makespans(
    job: Job,
    replicas: Sequence[Replica],
    quotas: Sequence[int],
    speeds: Speeds,
    schedule: Schedule | None = None,
) -> list[float]:
    """Span of every replica in milliseconds; all of its ranks must be alive.

    `schedule`: the first that the job's plans may choose where none is given; stages of several
    model chunks are interleaved.
    """
    by_length: dict[int, list[int]] = defaultdict(list)
    spans = [0.0] * len(replicas)
    for index, replica in enumerate(replicas):
        if replica.chunks > 1:
            quota = quotas[index]
            spans[index] = replica_makespan(job, replica, quota, speeds, Schedule.INTERLEAVED)
        else:
            by_length[len(replica.stages)].append(index)
    for members in by_length.values():
        times = [stage_times(job, replicas[index], speeds) for index in members]
        ends = pipeline_makespans(
            [forward for forward, _ in times],
            [backward for _, backward in times],
            [quotas[index] for index in members],
            p2p=transfer_ms(job),
            max_in_flight=job.max_in_flight,
            schedule=schedule or plan_schedules(job)[0],
        )
        for index, end in zip(members, ends.tolist(), strict=True):
            spans[index] = end
    return spans


def timed(
    job: Job,
    replicas: Sequence[Replica],
    quotas: Sequence[int],
    speeds: Speeds,
    *,
    pause: Transition,
    detail: str = "",
) -> PolicyOutcome:
    """The outcome of these replicas with these quotas, under the job's first schedule."""
    if not replicas:
        return STOPPED
    span = max(replica_makespans(job, replicas, quotas, speeds))
    chunked = any(replica.chunks > 1 for replica in replicas)
    return PolicyOutcome(
        span + layer_cost(job).step_ms,
        Layout(tuple(replicas)),
        tuple(quotas),
        pause,
        Schedule.INTERLEAVED if chunked else plan_schedules(job)[0],
        detail,
    )


def quotas_by_rate(rates: Sequence[float], total: int, *, offset: float = 0.0) -> tuple[int, ...]:
    """Each microbatch where it ends first, replica i taking `(offset + quota) / rates[i]`.

    Every replica gets at least one, as far as there are enough.
    """
    quotas = [1 if index < total else 0 for index in range(len(rates))]
    for _ in range(total - sum(quotas)):
        index = min(range(len(rates)), key=lambda i: ((offset + quotas[i] + 1) / rates[i], i))
        quotas[index] += 1
    return tuple(quotas)


def with_layers(stages: Sequence[Stage], counts: Sequence[int]) -> Replica:
    """A replica of these groups with these numbers of layers."""
    placed, start = [], 0
    for stage, count in zip(stages, counts, strict=True):
        placed.append(Stage(stage.ranks, (start, start + count), stage.shares))
        start += count
    return Replica(tuple(placed))


def layers_by_rate(rates: Sequence[float], total: int) -> list[int]:
    """Layers that make the largest of `layers / rate` least; one at least for every stage."""
    counts = [1] * len(rates)
    for _ in range(total - len(rates)):
        index = min(range(len(rates)), key=lambda i: ((counts[i] + 1) / rates[i], i))
        counts[index] += 1
    return counts
