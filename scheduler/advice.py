"""Advice on the ranks to leave out of a job that cannot take on another layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf

from resihp.contracts import Action, Advice, Job, Plan, Replica, even_quotas

from .link_costs import ALL_LINKS_HEALTHY, LinkSlowdowns
from .memory import own_schedule
from .step_time import ReplicaTimes
from .switching_rule import LEAST_GAIN, require_time

_MOST_TRIED = 8  # replicas left out one after another; beyond that all slow ones
_FEW = 2_000  # replicas up to which so many are tried; beyond that one


def advise(
    job: Job,
    current: Plan,
    speeds: Mapping[int, float],
    links: LinkSlowdowns = ALL_LINKS_HEALTHY,
) -> Advice | None:
    """Advice on the slow and stopped ranks of the current layout; None where nothing is gained.

    Replicas are left out whole: those with a stopped rank, and the slowest ones as long as that
    gains. In a job with the action `quotas` the others run their microbatches. Any other job is
    started again with the microbatches of the others only, so that a step does less work; its time
    is scaled to the same work. Raises `ContractError` for a layout that cannot run within
    `max_in_flight`.
    """
    replicas = current.layout.replicas
    unhealthy = {rank for rank in current.layout.ranks if speeds.get(rank, 1.0) < 1.0}
    if not unhealthy:
        return None
    stopped = {rank for rank in unhealthy if speeds[rank] <= 0.0}
    step_ms = None if stopped else _work_ms(job, current, range(len(replicas)), speeds, links)
    without_ms, kept = _best_without(job, current, speeds, links, unhealthy, stopped)
    if step_ms is not None and step_ms <= without_ms * (1.0 + LEAST_GAIN):
        without_ms, kept = inf, tuple(range(len(replicas)))
    left = {rank for index in set(range(len(replicas))) - {*kept} for rank in replicas[index].ranks}
    ranks = left & unhealthy or unhealthy
    healed = {**speeds, **dict.fromkeys(ranks, 1.0)}
    replaced_ms = _work_ms(job, current, range(len(replicas)), healed, links)
    require_time(replaced_ms)
    if step_ms is not None and without_ms == inf and step_ms <= replaced_ms * (1.0 + LEAST_GAIN):
        return None
    return Advice(
        ranks=tuple(sorted(ranks)),
        stopped=tuple(sorted(stopped & ranks)),
        others=tuple(sorted(left - ranks)) if without_ms < inf else (),
        nodes=_whole_nodes(job, current, left) if without_ms < inf else (),
        step_ms=step_ms,
        without_ms=without_ms if without_ms < inf else None,
        replaced_ms=replaced_ms,
    )


def _best_without(
    job: Job,
    current: Plan,
    speeds: Mapping[int, float],
    links: LinkSlowdowns,
    unhealthy: set[int],
    stopped: set[int],
) -> tuple[float, tuple[int, ...]]:
    """Least step time without one replica or more, and the indices of the others; inf if none is
    left."""
    replicas = current.layout.replicas
    alive = [i for i, replica in enumerate(replicas) if stopped.isdisjoint(replica.ranks)]
    slow = [i for i in alive if not unhealthy.isdisjoint(replicas[i].ranks)]
    typical = [max(1, job.microbatches // len(replicas))] * len(slow)
    ends = _times(job, current, [replicas[i] for i in slow], speeds, links).makespans(typical)
    slow = [index for _, index in sorted(zip(ends, slow, strict=True), reverse=True)]
    best: tuple[float, tuple[int, ...]] = inf, ()
    most = min(len(slow), _MOST_TRIED if len(alive) <= _FEW else 1)
    for count in sorted({*range(0 if stopped else 1, most + 1), len(slow)}):
        gone = {*slow[:count]}
        kept = tuple(i for i in alive if i not in gone)
        if kept and (ms := _work_ms(job, current, kept, speeds, links)) < best[0]:
            best = ms, kept
    return best


def _work_ms(
    job: Job,
    current: Plan,
    kept: Sequence[int],
    speeds: Mapping[int, float],
    links: LinkSlowdowns,
) -> float:
    """Time of the work of one step in the replicas of these indices; inf if they do none."""
    times = _times(job, current, [current.layout.replicas[i] for i in kept], speeds, links)
    if Action.QUOTAS in job.actions and len(kept) <= job.microbatches:
        return times.step_ms(times.best_quotas(even_quotas(job.microbatches, len(kept))))
    quotas = [current.quotas[i] for i in kept]
    if not sum(quotas):
        return inf
    return times.step_ms(quotas) * job.microbatches / sum(quotas)


def _times(
    job: Job,
    current: Plan,
    replicas: Sequence[Replica],
    speeds: Mapping[int, float],
    links: LinkSlowdowns,
) -> ReplicaTimes:
    return ReplicaTimes(job, replicas, own_schedule(job, current), speeds, links)


def _whole_nodes(job: Job, current: Plan, left: Iterable[int]) -> tuple[int, ...]:
    """Nodes of these ranks, if the job has no other ranks on them and has other nodes."""
    size, out = job.links.ranks_per_node, set(left)
    nodes = {rank // size for rank in out}
    others = [rank // size for rank in current.layout.ranks if rank not in out]
    return () if nodes.intersection(others) or not others else tuple(sorted(nodes))
