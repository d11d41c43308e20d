"""Policies that change no layer ranges: nothing, drop the replica, re-balance, restart."""

from __future__ import annotations

from resihp.contracts import Job, Replica, even_quotas

from .base import (
    STOPPED,
    Outcome,
    Pause,
    Speeds,
    quotas_by_rate,
    speed_of,
    timed,
    with_layers,
)

_STRAGGLER = 0.75  # default threshold of NVRx's relative performance scores


def nothing(job: Job, speeds: Speeds) -> Outcome:
    """The layout and quotas that the job started with; it stands still once a rank has died."""
    if any(speed_of(speeds, s) <= 0.0 for r in job.layout.replicas for s in r.stages):
        return Outcome(STOPPED.step_ms, detail="a rank of the layout is dead")
    return timed(job, job.layout.replicas, job.quotas, speeds, pause=Pause.NONE)


def drop_replica(job: Job, speeds: Speeds) -> Outcome:
    """Leaves out every replica with a dead rank or a straggler, the rest shares evenly.

    nvidia-resiliency-ext scores ranks and its in-process restart leaves ranks out; what remains of
    a replica without one of its ranks is left out with it. A straggler scores below 0.75. Where
    that would leave no replica, stragglers stay.
    """
    replicas = job.layout.replicas
    living = [r for r in replicas if min(speed_of(speeds, s) for s in r.stages) > 0.0]
    quick = [r for r in living if min(speed_of(speeds, s) for s in r.stages) >= _STRAGGLER]
    kept = (quick or living)[: job.microbatches]
    if not kept:
        return STOPPED
    quotas = even_quotas(job.microbatches, len(kept))
    return timed(job, kept, quotas, speeds, pause=Pause.RESTART)


def greyhound(job: Job, speeds: Speeds) -> Outcome:
    """Microbatches by the time that each replica needs for one; replicas with dead ranks restart
    without them.

    Greyhound (ATC'25), strategy S2: minimise the largest `quota * time` over the replicas. Its S3
    (swaps of nodes) relieves congested links, which are healthy here; fail-stop is not its subject
    and gets the plain answer of leaving the replica out.
    """
    rates = [min(speed_of(speeds, s) for s in r.stages) for r in job.layout.replicas]
    kept = [(r, rate) for r, rate in zip(job.layout.replicas, rates, strict=True) if rate > 0.0]
    kept = sorted(kept, key=lambda pair: -pair[1])[: job.microbatches]
    if not kept:
        return STOPPED
    quotas = quotas_by_rate([rate for _, rate in kept], job.microbatches)
    pause = Pause.LIVE if len(kept) == job.layout.dp else Pause.RESTART
    return timed(job, [r for r, _ in kept], quotas, speeds, pause=pause)


def restart(job: Job, speeds: Speeds) -> Outcome:
    """Restart from a checkpoint on whole groups only, in replicas of the first shape.

    As many replicas as the groups without a dead rank fill, the fastest groups first; how many of
    them are used is what serves it best.
    """
    stages = len(job.layout.replicas[0].stages)
    shape = [stage.layer_count for stage in job.layout.replicas[0].stages]
    groups = [s for r in job.layout.replicas for s in r.stages if speed_of(speeds, s) > 0.0]
    groups.sort(key=lambda stage: -speed_of(speeds, stage))
    best = STOPPED
    for count in range(1, min(len(groups) // stages, job.microbatches) + 1):
        rows: list[Replica] = [
            with_layers(groups[i * stages : (i + 1) * stages], shape) for i in range(count)
        ]
        quotas = even_quotas(job.microbatches, count)
        option = timed(job, rows, quotas, speeds, pause=Pause.RESTART)
        best = min(best, option, key=lambda outcome: outcome.step_ms)
    return best
