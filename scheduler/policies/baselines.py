"""Policies that change no layer ranges: nothing, drop the replica, re-balance, restart."""

from __future__ import annotations

from collections.abc import Sequence

from resihp.contracts import Job, Replica, Schedule, Stage, even_quotas
from resihp.pipeline.orders import stage_order
from resihp.pipeline.replay import pass_durations, replay

from ..cost_model import layer_cost, transfer_ms
from ..simulator import stage_times
from .base import (
    STOPPED,
    PolicyOutcome,
    Speeds,
    Transition,
    layers_by_rate,
    quotas_by_rate,
    replica_makespans,
    speed_of,
    timed,
    with_layers,
)

_STRAGGLER = 0.75  # default threshold of NVRx's relative performance scores


def nothing(job: Job, speeds: Speeds) -> PolicyOutcome:
    """The layout and quotas that the job started with; it stands still once a rank has died."""
    if any(speed_of(speeds, s) <= 0.0 for r in job.layout.replicas for s in r.stages):
        return PolicyOutcome(STOPPED.step_ms, detail="a rank of the layout is dead")
    return timed(job, job.layout.replicas, job.quotas, speeds, pause=Transition.NONE)


def drop_replica(job: Job, speeds: Speeds) -> PolicyOutcome:
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
    return timed(job, kept, quotas, speeds, pause=Transition.RESTART)


def greyhound(job: Job, speeds: Speeds) -> PolicyOutcome:
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
    pause = Transition.LIVE if len(kept) == job.layout.dp else Transition.RESTART
    return timed(job, [r for r, _ in kept], quotas, speeds, pause=pause)


def restart(job: Job, speeds: Speeds) -> PolicyOutcome:
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
        option = timed(job, rows, quotas, speeds, pause=Transition.RESTART)
        best = min(best, option, key=lambda outcome: outcome.step_ms)
    return best


def recycle(job: Job, speeds: Speeds) -> PolicyOutcome:
    """Work of every stage shared evenly by its peers that work, with a split backward.

    A group that lost a rank does no work; one with a straggler works or not, whichever is quicker
    for its stage (ReCycle knows failed workers only). Its decoupled backward fills the bubbles,
    modelled as ZB-H1 over stages that are longer by the work they took over.
    """
    replicas = job.layout.replicas
    if len({len(replica.stages) for replica in replicas}) > 1:
        return PolicyOutcome(STOPPED.step_ms, detail="needs replicas of one shape")
    forward, backward = stage_times(job, replicas[0], {})
    longer = []
    for peers in zip(*(replica.stages for replica in replicas), strict=True):
        rates = sorted((speed_of(speeds, stage) for stage in peers), reverse=True)
        working = [(k + 1) * rate for k, rate in enumerate(rates) if rate > 0.0]
        if not working:
            return PolicyOutcome(STOPPED.step_ms, detail="no peer of a stage is left")
        longer.append(len(replicas) / max(working))
    quota = -(-job.microbatches // len(replicas))
    orders = [
        stage_order(Schedule.ZERO_BUBBLE, stage=s, stages=len(longer), microbatches=quota)
        for s in range(len(longer))
    ]
    durations = pass_durations(
        orders,
        [[f * k] for f, k in zip(forward, longer, strict=True)],
        [[b * k] for b, k in zip(backward, longer, strict=True)],
    )
    span = replay(orders, durations, p2p=transfer_ms(job)).span
    step_ms = span + layer_cost(job).step_ms
    quotas = (quota,) * len(replicas)
    return PolicyOutcome(step_ms, None, quotas, Transition.LIVE, Schedule.ZERO_BUBBLE)


def oobleck(job: Job, speeds: Speeds) -> PolicyOutcome:
    """Templates for fewer groups where some died, microbatches by the speed of the pipelines.

    Templates spread layers as if all groups were alike. Stragglers are not its subject: a replica
    leaves them out as if they had died where that is quicker.
    """
    chosen = []
    for replica in job.layout.replicas:
        options = _templates(job, replica, speeds)
        if options:
            spans = replica_makespans(job, options, [job.microbatches] * len(options), speeds)
            best = min(range(len(options)), key=lambda i: (spans[i], i))
            chosen.append((job.microbatches / spans[best], options[best]))
    chosen = sorted(chosen, key=lambda pair: -pair[0])[: job.microbatches]
    if not chosen:
        return STOPPED
    quotas = quotas_by_rate([rate for rate, _ in chosen], job.microbatches)
    return timed(job, [replica for _, replica in chosen], quotas, speeds, pause=Transition.LIVE)


def _templates(job: Job, replica: Replica, speeds: Speeds) -> list[Replica]:
    """The replica without its dead groups, and without ever more of its slowest ones."""
    living = [stage for stage in replica.stages if speed_of(speeds, stage) > 0.0]
    options = []
    while living:
        options.append(_evenly(living, job.layout.layers))
        slowest = min(living, key=lambda stage: speed_of(speeds, stage))
        if speed_of(speeds, slowest) >= 1.0:
            break
        living = [stage for stage in living if stage is not slowest]
    return options


def _evenly(stages: Sequence[Stage], layers: int) -> Replica:
    return with_layers(stages, layers_by_rate([1.0] * len(stages), layers))
