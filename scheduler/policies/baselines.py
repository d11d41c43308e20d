"""Policies of other systems: NVRx, restart, Greyhound, ReCycle, Oobleck."""

from __future__ import annotations

from resihp.contracts import Job, Replica, Schedule, even_quotas
from resihp.pipeline.orders import stage_order
from resihp.pipeline.replay import pass_durations, replay

from ..cost_model import layer_cost, transfer_ms
from ..simulator import stage_times
from .base import (
    STOPPED,
    PolicyOutcome,
    Speeds,
    Transition,
    counts_by_rate,
    replica_makespans,
    replica_speed,
    shared_by_rate,
    speed_of,
    timed,
    timed_by_rate,
    with_layers,
)

_STRAGGLER = 0.75  # default threshold of NVRx's relative performance scores


def nothing(job: Job, speeds: Speeds) -> PolicyOutcome:
    """No change: the initial layout and quotas; the job stops once a rank has died."""
    if any(replica_speed(speeds, replica) <= 0.0 for replica in job.layout.replicas):
        return PolicyOutcome(STOPPED.step_ms, detail="a rank of the layout is dead")
    return timed(job, job.layout.replicas, job.quotas, speeds, transition=Transition.NONE)


def drop_replica(job: Job, speeds: Speeds) -> PolicyOutcome:
    """nvidia-resiliency-ext: leave out replicas with a dead rank or a straggler; equal quotas.

    It scores ranks, and its in-process restart leaves ranks out; a replica that lacks a rank is
    left out as a whole. A straggler scores below 0.75. Stragglers stay if no replica would be left.
    """
    replicas = job.layout.replicas
    living = [r for r in replicas if replica_speed(speeds, r) > 0.0]
    quick = [r for r in living if replica_speed(speeds, r) >= _STRAGGLER]
    kept = (quick or living)[: job.microbatches]
    if not kept:
        return STOPPED
    quotas = even_quotas(job.microbatches, len(kept))
    return timed(job, kept, quotas, speeds, transition=Transition.RESTART)


def greyhound(job: Job, speeds: Speeds) -> PolicyOutcome:
    """Greyhound (USENIX ATC'25), strategy S2: minimise the largest `quota * time` over replicas.

    Its S3 (node swaps) relieves congested links, which are healthy here. It does not cover
    fail-stop faults: replicas with a dead rank are left out by a restart.
    """
    kept = [(rate, r) for r in job.layout.replicas if (rate := replica_speed(speeds, r)) > 0.0]
    transition = Transition.LIVE if len(kept) == job.layout.dp else Transition.RESTART
    return timed_by_rate(job, kept, speeds, transition=transition)


def restart(job: Job, speeds: Speeds) -> PolicyOutcome:
    """Restart from a checkpoint on groups without dead ranks, in replicas of the initial shape.

    The fastest groups first, in the number of replicas with the shortest step.
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
        option = timed(job, rows, quotas, speeds, transition=Transition.RESTART)
        best = min(best, option, key=lambda outcome: outcome.step_ms)
    return best


def recycle(job: Job, speeds: Speeds) -> PolicyOutcome:
    """ReCycle (SOSP'24): peers of a failed stage share its microbatches, with a split backward.

    ReCycle covers failed workers only; here it also knows the speed of every group, and the peers
    of a stage share its microbatches by speed, so that a straggler runs fewer and the slowest ones
    none. Its decoupled backward fills pipeline bubbles, modelled as ZB-H1 over stages that are
    longer by the work taken over. Activations that travel between replicas take no time.
    """
    replicas = job.layout.replicas
    if len({len(replica.stages) for replica in replicas}) > 1:
        return PolicyOutcome(STOPPED.step_ms, detail="needs replicas of one shape")
    forward, backward = stage_times(job, replicas[0], {})
    quota = -(-job.microbatches // len(replicas))
    longer = []
    for peers in zip(*(replica.stages for replica in replicas), strict=True):
        rates = [rate for stage in peers if (rate := speed_of(speeds, stage)) > 0.0]
        if not rates:
            return PolicyOutcome(STOPPED.step_ms, detail="no peer of a stage is left")
        counts = shared_by_rate(rates, job.microbatches)
        longer.append(max(c / r for c, r in zip(counts, rates, strict=True)) / quota)
    orders = [
        stage_order(Schedule.ZERO_BUBBLE, stage=s, stages=len(longer), microbatches=quota)
        for s in range(len(longer))
    ]
    durations = pass_durations(
        orders,
        [[f * k] for f, k in zip(forward, longer, strict=True)],
        [[b * k] for b, k in zip(backward, longer, strict=True)],
    )
    makespan = replay(orders, durations, p2p=transfer_ms(job)).span
    step_ms = makespan + layer_cost(job).step_ms
    quotas = (quota,) * len(replicas)
    return PolicyOutcome(step_ms, None, quotas, Transition.LIVE, Schedule.ZERO_BUBBLE)


def oobleck(job: Job, speeds: Speeds) -> PolicyOutcome:
    """Oobleck (SOSP'23): pipeline templates for the groups left, quotas by pipeline speed.

    Templates of the publication distribute layers evenly and cover failed nodes only. Here the
    speed of every group is known as well: a replica leaves stragglers out like dead groups, or
    keeps them with layers by speed, whichever is faster.
    """
    chosen = []
    for replica in job.layout.replicas:
        options = _templates(job, replica, speeds)
        if options:
            makespans = replica_makespans(job, options, [job.microbatches] * len(options), speeds)
            best = min(range(len(options)), key=lambda i: (makespans[i], i))
            chosen.append((job.microbatches / makespans[best], options[best]))
    return timed_by_rate(job, chosen, speeds)


def _templates(job: Job, replica: Replica, speeds: Speeds) -> list[Replica]:
    """Replicas without the dead groups, and without 0, 1, 2, ... of the slowest others, with even
    layers and with layers by speed."""
    living = [stage for stage in replica.stages if speed_of(speeds, stage) > 0.0]
    layers, options = job.layout.layers, []
    while living:
        rates = [speed_of(speeds, stage) for stage in living]
        options.append(with_layers(living, counts_by_rate([1.0] * len(living), layers)))
        if min(rates) >= 1.0:
            break
        options.append(with_layers(living, counts_by_rate(rates, layers)))
        slowest = min(living, key=lambda stage: speed_of(speeds, stage))
        living = [stage for stage in living if stage is not slowest]
    return options
