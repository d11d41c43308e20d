"""Policies of other systems: NVRx, restart, Greyhound, ReCycle, Oobleck, the rule of ResiHP."""

from __future__ import annotations

from collections.abc import Sequence

from resihp.contracts import Job, Replica, Schedule, Stage, even_quotas
from resihp.pipeline.orders import stage_order
from resihp.pipeline.replay import pass_durations, replay

from ..cost_model import layer_cost, transfer_ms
from ..memory import MemoryFootprint
from ..simulator import stage_times
from .base import (
    STOPPED,
    PolicyOutcome,
    Speeds,
    Transition,
    counts_by_rate,
    replica_makespans,
    replica_speed,
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

    A group with a dead rank does no work; one with a straggler is used if that is faster for its
    stage (ReCycle covers failed workers only). Its decoupled backward fills pipeline bubbles,
    modelled as ZB-H1 over stages that are longer by the work taken over.
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
    makespan = replay(orders, durations, p2p=transfer_ms(job)).span
    step_ms = makespan + layer_cost(job).step_ms
    quotas = (quota,) * len(replicas)
    return PolicyOutcome(step_ms, None, quotas, Transition.LIVE, Schedule.ZERO_BUBBLE)


def oobleck(job: Job, speeds: Speeds) -> PolicyOutcome:
    """Oobleck (SOSP'23): pipeline templates for the groups left, quotas by pipeline speed.

    Templates distribute layers evenly. Oobleck does not cover stragglers: a replica leaves them
    out like dead groups where that is faster.
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
    """Replicas without the dead groups, and without 0, 1, 2, ... of the slowest others."""
    living = [stage for stage in replica.stages if speed_of(speeds, stage) > 0.0]
    options = []
    while living:
        even = counts_by_rate([1.0] * len(living), job.layout.layers)
        options.append(with_layers(living, even))
        slowest = min(living, key=lambda stage: speed_of(speeds, stage))
        if speed_of(speeds, slowest) >= 1.0:
            break
        living = [stage for stage in living if stage is not slowest]
    return options


def resihp_rule(job: Job, speeds: Speeds) -> PolicyOutcome:
    """Rule of the ResiHP paper (arXiv 2605.06374): one dimension of parallelism after the other.

    1. TP: the k fastest ranks of a group, with the power of two k (from the least that fits into
       memory) that maximises `k * min(speed)`.
    2. PP: layers by `floor(layers * new degree / old degree)`, then balanced by the ratio of
       layers to degree until the total is conserved.
    3. DP: microbatches by the capacity of the replicas. The layers of a dead group go to the rest
       of its replica, which is better for the rule than giving them to peers.
    """
    replicas = []
    for replica in job.layout.replicas:
        stages = [
            _shrunk(job, stage, len(replica.stages) - i, speeds)
            for i, stage in enumerate(replica.stages)
        ]
        shaped = _layered(replica, stages, job.layout.layers)
        if shaped is not None:
            replicas.append(shaped)
    if not replicas:
        return STOPPED
    makespans = replica_makespans(job, replicas, [job.microbatches] * len(replicas), speeds)
    rates = [job.microbatches / makespan for makespan in makespans]
    return timed_by_rate(job, zip(rates, replicas, strict=True), speeds)


def _shrunk(job: Job, stage: Stage, in_flight: int, speeds: Speeds) -> Stage | None:
    """Stage with the ranks that step 1 keeps; None if no degree fits."""
    order = sorted(
        (r for r in stage.ranks if speeds.get(r, 1.0) > 0.0), key=lambda r: (-speeds.get(r, 1.0), r)
    )
    footprint = MemoryFootprint.of(job, job.layout.dp)
    best, capacity = None, 0.0
    degree = 1
    while degree <= len(order):
        members = tuple(sorted(order[:degree]))
        option = Stage(members, stage.layers, more_layers=stage.more_layers)
        holds = footprint.stage_bytes(option, first=False, last=False, in_flight=in_flight)
        fits = footprint.budget_bytes is None or max(holds) <= footprint.budget_bytes
        slowest = speeds.get(order[degree - 1], 1.0)
        if fits and degree * slowest > capacity * (1 + 1e-9):
            best, capacity = option, degree * slowest
        degree *= 2
    return best


def _layered(old: Replica, stages: Sequence[Stage | None], total: int) -> Replica | None:
    """Replica after step 2; None without any stage."""
    kept = [(before, stage) for before, stage in zip(old.stages, stages, strict=True) if stage]
    if not kept:
        return None
    counts = [max(1, b.layer_count * s.tp // b.tp) for b, s in kept]
    while sum(counts) != total:
        sign = 1 if sum(counts) < total else -1
        able = [i for i in range(len(kept)) if sign > 0 or counts[i] > 1]
        index = min(able, key=lambda i: ((sign * counts[i] + (sign > 0)) / kept[i][1].tp, i))
        counts[index] += sign
    return with_layers([stage for _, stage in kept], counts)
