"""Plays one step of a job under given speeds and says when every pass runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from resihp.contracts import Job, Layout, Replica
from resihp.pipeline.orders import Pass, stage_order
from resihp.pipeline.replay import pass_durations, replay

from .costs import group_cost, layer_cost, transfer_ms

Speeds = Mapping[int, float] | Sequence[float]


@dataclass(frozen=True)
class TimedPass:
    """One pass of one stage of one replica; times in milliseconds from the start of the step."""

    replica: int
    stage: int
    item: Pass
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Timeline:
    """One step: when it ends and when every pass runs."""

    step_ms: float
    passes: tuple[TimedPass, ...]


def simulate(
    job: Job,
    layout: Layout,
    quotas: Sequence[int],
    speeds: Speeds | None = None,
    work: Sequence[Sequence[float]] | None = None,
) -> Timeline:
    """One step of `job` in `layout`.

    speeds  by rank, 1.0 where none is given
    work    for each replica, the work of each of its microbatches relative to the mean one; all 1
            where none is given
    """
    known = speed_map(speeds)
    passes: list[TimedPass] = []
    for index, (replica, quota) in enumerate(zip(layout.replicas, quotas, strict=True)):
        forward, backward = stage_times(job, replica, known)
        loads = list(work[index]) if work is not None else [1.0] * quota
        orders = [
            stage_order(
                job.schedule,
                stage=s,
                stages=len(replica.stages),
                microbatches=quota,
                chunks=job.chunks,
                max_in_flight=job.max_in_flight,
            )
            for s in range(len(replica.stages))
        ]
        durations = pass_durations(
            orders,
            [[f * w for w in loads] for f in forward],
            [[b * w for w in loads] for b in backward],
        )
        played = replay(orders, durations, p2p=transfer_ms(job))
        passes += [
            TimedPass(index, stage, item, float(start), float(end))
            for stage, order in enumerate(orders)
            for item, start, end in zip(
                order, played.starts[stage], played.ends[stage], strict=True
            )
        ]
    end = max((item.end_ms for item in passes), default=0.0)
    return Timeline(end + layer_cost(job).step_ms, tuple(passes))


def speed_map(speeds: Speeds | None) -> Mapping[int, float]:
    """Speeds by rank."""
    if speeds is None:
        return {}
    return speeds if isinstance(speeds, Mapping) else dict(enumerate(speeds))


def stage_times(
    job: Job, replica: Replica, speeds: Mapping[int, float]
) -> tuple[list[float], list[float]]:
    """Forward and backward time of one mean microbatch in each stage, in milliseconds."""
    cost = layer_cost(job)
    last = len(replica.stages) - 1
    times = [
        group_cost(
            job, cost, stage.shares, [speeds.get(r, 1.0) for r in stage.ranks], stage.ranks
        ).stage(stage.layers[1] - stage.layers[0], first=i == 0, last=i == last)
        for i, stage in enumerate(replica.stages)
    ]
    return [f for f, _ in times], [b for _, b in times]
