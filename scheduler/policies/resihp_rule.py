"""The rule of the ResiHP paper (arXiv 2605.06374): TP degree, then layers, then microbatches."""

from __future__ import annotations

from collections.abc import Sequence

from resihp.contracts import Job, Replica, Stage

from ..memory import MemoryFootprint
from .base import (
    STOPPED,
    PolicyOutcome,
    Speeds,
    Transition,
    quotas_by_rate,
    replica_makespans,
    timed,
    with_layers,
)


def resihp_rule(job: Job, speeds: Speeds) -> PolicyOutcome:
    """Three steps, one dimension of parallelism after the other.

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
    order = sorted(range(len(replicas)), key=lambda i: (makespans[i], i))[: job.microbatches]
    rates = [job.microbatches / makespans[i] for i in order]
    quotas = quotas_by_rate(rates, job.microbatches)
    return timed(job, [replicas[i] for i in order], quotas, speeds, transition=Transition.LIVE)


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
