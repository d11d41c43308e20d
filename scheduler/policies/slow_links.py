"""Policies of other systems for slow links: Adaptra's order of passes, Greyhound's topology."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from resihp.contracts import Job, Layout, LinkVerdict, Replica, Schedule, Stage

from ..forwards_ahead import covering
from ..link_costs import LinkSlowdowns
from ..memory import MemoryFootprint, plan_schedules, replica_fits
from ..step_time import ReplicaTimes
from .base import STOPPED, PolicyOutcome, Speeds, Transition, counts_by_rate, replica_speed, timed


def adaptra(job: Job, speeds: Speeds, verdicts: Sequence[LinkVerdict]) -> PolicyOutcome:
    """Adaptra (arXiv 2504.19232): more forwards in flight before slow links, as memory allows.

    A stage is so many microbatches ahead of the next one that the slowest stage has passes to run
    while activation and gradient are on their way; fewer where memory does not allow it, in a
    replica all alike. Layout and quotas stay: slow devices are not covered, and a dead one stops
    the job. Its transfers off the accelerator are what the model has anyway (they delay receivers
    only). Its split backward is left out; it orders passes of 1F1B here.
    """
    if any(replica_speed(speeds, replica) <= 0.0 for replica in job.layout.replicas):
        return STOPPED
    links = LinkSlowdowns.of(job, verdicts)
    footprint = MemoryFootprint.of(job, job.layout.dp)
    schedule = Schedule.ONE_F_ONE_B
    replicas = []
    for replica, quota in zip(job.layout.replicas, job.quotas, strict=True):
        options = (
            replace(replica, in_flight=counts)
            for counts in covering(job, replica, quota, speeds, links)
        )
        fitting = (o for o in options if replica_fits(job, footprint, o, quota, schedule))
        replicas.append(next(fitting, replica) if replica.chunks == 1 else replica)
    live = Transition.LIVE
    return timed(job, replicas, job.quotas, speeds, transition=live, schedule=schedule, links=links)


def greyhound_topology(job: Job, speeds: Speeds, verdicts: Sequence[LinkVerdict]) -> PolicyOutcome:
    """Greyhound (USENIX ATC'25), strategy S3 after S2: nodes change places so that a congested link
    carries less.

    Modelled as the best exchange of one group at the end of a slow link with another one, under
    the best quotas; a replica with a dead rank is left out.
    """
    kept = tuple(r for r in job.layout.replicas if replica_speed(speeds, r) > 0.0)
    kept = kept[: job.microbatches]
    if not kept:
        return STOPPED
    links = LinkSlowdowns.of(job, verdicts)
    options = (Layout(kept), *_exchanged(Layout(kept), links))
    outcomes = [_by_rate(job, layout.replicas, speeds, links) for layout in options]
    return min(outcomes, key=lambda outcome: outcome.step_ms)


def _exchanged(layout: Layout, links: LinkSlowdowns) -> Iterator[Layout]:
    """Layouts in which a group with a slow link has changed places with another of its size."""
    places = [(r, s) for r, row in enumerate(layout.replicas) for s in range(len(row.stages))]
    stages = [layout.replicas[r].stages[s] for r, s in places]
    slow = {
        stage
        for row in layout.replicas
        for pair in pairwise(row.stages)
        if links.boundary(pair[0].ranks, pair[1].ranks) > 1.0
        for stage in pair
    } | {stage for stage in stages if links.collective(stage.ranks) > 1.0}
    for one in stages:
        for other in stages:
            if one in slow and one is not other and one.tp == other.tp:
                swap = {one.ranks: other.ranks, other.ranks: one.ranks}
                yield Layout(tuple(_with_ranks(row, swap) for row in layout.replicas))


def _with_ranks(row: Replica, swap: dict[tuple[int, ...], tuple[int, ...]]) -> Replica:
    def moved(stage: Stage) -> Stage:
        return replace(stage, ranks=swap.get(stage.ranks, stage.ranks))

    return Replica(tuple(map(moved, row.stages)))


def _by_rate(
    job: Job, replicas: Sequence[Replica], speeds: Speeds, links: LinkSlowdowns
) -> PolicyOutcome:
    """Outcome with quotas by the replicas' speed with these links."""
    schedule = plan_schedules(job)[0]
    times = ReplicaTimes(job, replicas, schedule, speeds, links)
    ends = times.makespans([job.microbatches] * len(replicas))
    quotas = counts_by_rate([1.0 / end for end in ends], job.microbatches)
    live = Transition.LIVE
    return timed(job, replicas, quotas, speeds, transition=live, schedule=schedule, links=links)
