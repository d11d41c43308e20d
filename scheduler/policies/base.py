"""Common parts of all policies: outcome, timing of a layout, greedy layers and quotas."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from resihp.contracts import Job, Layout, LinkVerdict, Replica, Schedule, Stage

from ..cost_model import layer_cost
from ..greedy import greedy_allocation
from ..link_costs import ALL_LINKS_HEALTHY, LinkSlowdowns
from ..memory import plan_schedules
from ..step_time import ReplicaTimes

Speeds = Mapping[int, float]


class Transition(StrEnum):
    """Transition of a job from one layout to the next."""

    NONE = "none"
    LIVE = "live"
    RESTART = "restart"


@dataclass(frozen=True)
class PolicyOutcome:
    """State of a job under a policy; `step_ms` is inf if it cannot run.

    `layout` is None if the policy's distribution of work is not a layout of whole replicas.
    """

    step_ms: float
    layout: Layout | None = None
    quotas: tuple[int, ...] = ()
    transition: Transition = Transition.NONE
    schedule: Schedule = Schedule.ONE_F_ONE_B
    detail: str = ""


STOPPED = PolicyOutcome(math.inf, detail="no replica is left")


@dataclass(frozen=True)
class FaultPolicy:
    """Named policy: its source, and its outcome for a job's initial layout and given speeds.

    decide        from speeds alone
    decide_links  from slow links as well; None: the policy knows nothing of links
    """

    name: str
    source: str
    decide: Callable[[Job, Speeds], PolicyOutcome] = field(repr=False)
    decide_links: Callable[[Job, Speeds, Sequence[LinkVerdict]], PolicyOutcome] | None = field(
        default=None, repr=False
    )


def speed_of(speeds: Speeds, stage: Stage) -> float:
    """Speed of a group with equal shares: its slowest rank; 0 if one is dead."""
    return min(speeds.get(rank, 1.0) for rank in stage.ranks)


def replica_speed(speeds: Speeds, replica: Replica) -> float:
    """Speed of the slowest stage of a replica."""
    return min(speed_of(speeds, stage) for stage in replica.stages)


def replica_makespans(
    job: Job,
    replicas: Sequence[Replica],
    quotas: Sequence[int],
    speeds: Speeds,
    schedule: Schedule | None = None,
    links: LinkSlowdowns = ALL_LINKS_HEALTHY,
) -> list[float]:
    """Makespan of every replica in milliseconds; all ranks must be alive.

    `schedule`: default is the first one permitted to plans of the job; replicas with several model
    chunks are interleaved.
    """
    times = ReplicaTimes(job, replicas, schedule or plan_schedules(job)[0], speeds, links)
    return times.makespans(quotas)


def timed(
    job: Job,
    replicas: Sequence[Replica],
    quotas: Sequence[int],
    speeds: Speeds,
    *,
    transition: Transition,
    detail: str = "",
    schedule: Schedule | None = None,
    links: LinkSlowdowns = ALL_LINKS_HEALTHY,
) -> PolicyOutcome:
    """Outcome of replicas with given quotas; `schedule` is as in `replica_makespans`."""
    if not replicas:
        return STOPPED
    schedule = schedule or plan_schedules(job)[0]
    makespan = max(replica_makespans(job, replicas, quotas, speeds, schedule, links))
    chunked = any(replica.chunks > 1 for replica in replicas)
    return PolicyOutcome(
        makespan + layer_cost(job).step_ms,
        Layout(tuple(replicas)),
        tuple(quotas),
        transition,
        Schedule.INTERLEAVED if chunked else schedule,
        detail,
    )


def counts_by_rate(rates: Sequence[float], total: int) -> list[int]:
    """Counts that minimise the largest `count / rate`; at least 1 each, as far as `total` goes."""
    counts = [1 if index < total else 0 for index in range(len(rates))]
    return greedy_allocation(counts, total - sum(counts), lambda i, count: count / rates[i])


def shared_by_rate(rates: Sequence[float], total: int) -> list[int]:
    """Counts that minimise the largest `count / rate`; 0 for rates too low to be of use."""
    return greedy_allocation([0] * len(rates), total, lambda i, count: count / rates[i])


def timed_by_rate(
    job: Job,
    replicas: Iterable[tuple[float, Replica]],
    speeds: Speeds,
    *,
    transition: Transition = Transition.LIVE,
) -> PolicyOutcome:
    """Outcome of the fastest replicas, given with their rates, with quotas in proportion."""
    kept = sorted(replicas, key=lambda pair: -pair[0])[: job.microbatches]
    quotas = counts_by_rate([rate for rate, _ in kept], job.microbatches)
    return timed(job, [replica for _, replica in kept], quotas, speeds, transition=transition)


def with_layers(stages: Sequence[Stage], counts: Sequence[int]) -> Replica:
    """Replica of these groups with the given numbers of layers."""
    placed, start = [], 0
    for stage, count in zip(stages, counts, strict=True):
        placed.append(Stage(stage.ranks, (start, start + count), stage.shares))
        start += count
    return Replica(tuple(placed))
