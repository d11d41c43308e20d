"""Interleaved stages for an arrangement: layers of several model chunks per stage, and quotas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import inf
from operator import itemgetter
from typing import NamedTuple

from resihp.contracts import Job, Layout, Replica, Schedule, Stage, even_quotas

from ..greedy import exchange_units
from ..link_costs import ALL_LINKS_HEALTHY, LinkSlowdowns
from ..memory import replica_fits
from ..simulator import replica_makespan
from .chains import Chain
from .plan_bounds import quick_bound
from .quotas import Arrangement
from .tp_groups import TPGroup

_LEAST_GAIN = 1e-3  # current layers are kept unless others are faster by this fraction
_TRIES = 4  # layer partitions of a chain that are timed


class FoundPlan(NamedTuple):
    """Contents of a plan; times without the fixed cost of a step."""

    layout: Layout
    quotas: tuple[int, ...]
    schedule: Schedule
    makespan_ms: float
    bound_ms: float
    why: tuple[str, ...] = ()


def interleaved(
    job: Job,
    found: Arrangement,
    current: Layout,
    speeds: Mapping[int, float],
    expired: Callable[[], bool],
    links: LinkSlowdowns = ALL_LINKS_HEALTHY,
) -> FoundPlan | str:
    """Arrangement with the job's number of model chunks per stage, or the reason against it.

    The layers of a stage are divided evenly over its chunks, larger parts first; current layers
    are kept unless others are clearly faster. A replica of one stage holds one chunk. A few layer
    partitions of every chain are timed by replay, and quotas are exchanged as under the other
    schedules. The bound allows fractional layers.
    """
    chains, quotas = found.chains, list(found.quotas)
    if all(len(chain) == 1 for chain in chains):
        return "no replica has several stages"
    shapes = _Shapes(job, found, current, speeds, links)

    def finish(pairs: Sequence[tuple[int, int]]) -> list[float]:
        return [shapes.best(chains[index], quota)[0] for index, quota in pairs]

    if inf in finish(list(enumerate(quotas))):
        return "memory or max_in_flight is too small for several model chunks per stage"
    exchange_units(quotas, finish, expired)
    best = [shapes.best(*pair) for pair in zip(chains, quotas, strict=True)]
    makespan_ms = max(end for end, _ in best)
    layout = Layout(tuple(replica for _, replica in best))
    setting = replace(found.evaluator.setting, schedule=Schedule.INTERLEAVED)
    bound_ms = quick_bound(setting, chains, quotas, job.chunks)
    bound_ms = min(makespan_ms, bound_ms)
    return FoundPlan(layout, tuple(quotas), Schedule.INTERLEAVED, makespan_ms, bound_ms)


class _Shapes:
    """Cache of the best interleaved replica of a chain for a number of microbatches.

    Chains of groups of equal cost are replayed once.
    """

    def __init__(
        self,
        job: Job,
        found: Arrangement,
        current: Layout,
        speeds: Mapping[int, float],
        links: LinkSlowdowns,
    ) -> None:
        self._job, self._evaluator, self._speeds = job, found.evaluator, speeds
        self._links = links
        self._present = {replica.ranks: replica for replica in current.replicas}
        self._makespans: dict[tuple[object, ...], float] = {}
        self._best: dict[tuple[Chain, int], tuple[float, Replica]] = {}

    def best(self, chain: Chain, quota: int) -> tuple[float, Replica]:
        """Makespan (inf if nothing fits) and replica."""
        if (chain, quota) not in self._best:
            groups = [self._evaluator.setting.table.groups[group] for group in chain]
            counts = self._evaluator.partitions(chain, quota)[:_TRIES]
            chunks = self._job.chunks if len(chain) > 1 else 1
            fresh = [_replica(groups, layers, chunks) for layers in counts]
            options = [(self._makespan(chain, quota, replica), replica) for replica in fresh]
            best = min(options, key=itemgetter(0))
            kept_replica = self._current(fresh[0])
            if kept_replica is not None:
                kept = self._makespan(chain, quota, kept_replica), kept_replica
                best = kept if kept[0] <= best[0] * (1 + _LEAST_GAIN) else best
            self._best[chain, quota] = best
        return self._best[chain, quota]

    def _current(self, fresh: Replica) -> Replica | None:
        """Current replica of the same groups with as many chunks, if any."""
        present = self._present.get(fresh.ranks)
        if present is None or present.chunks != fresh.chunks:
            return None
        groups, own = ([(s.ranks, s.shares) for s in r.stages] for r in (present, fresh))
        return present if groups == own else None

    def _makespan(self, chain: Chain, quota: int, replica: Replica) -> float:
        """Makespan by replay; inf if memory or the in-flight limit forbids the replica."""
        ranges = tuple(stage.chunks for stage in replica.stages)
        key = (self._evaluator.signature(chain), ranges, quota)
        if key not in self._makespans:
            footprint = self._evaluator.setting.footprint
            end = replica_makespan(
                self._job, replica, quota, self._speeds, Schedule.INTERLEAVED, self._links
            )
            if end < inf and not replica_fits(
                self._job, footprint, replica, quota, Schedule.INTERLEAVED
            ):
                end = inf
            self._makespans[key] = end
        return self._makespans[key]


def _replica(groups: Sequence[TPGroup], layers: Sequence[int], chunks: int) -> Replica:
    """Replica of these groups and numbers of layers, divided evenly over the chunks."""
    parts = [even_quotas(count, chunks) for count in layers]
    sizes = [part[chunk] for chunk in range(chunks) for part in parts]
    ranges = list(pairwise(accumulate(sizes, initial=0)))
    stages = len(groups)
    return Replica(
        tuple(
            Stage(group.ranks, ranges[s], group.shares, tuple(ranges[s + stages :: stages]))
            for s, group in enumerate(groups)
        )
    )
