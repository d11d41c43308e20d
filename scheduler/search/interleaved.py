"""Interleaved stages for an arrangement: layers of several model chunks per stage, and quotas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import inf
from operator import itemgetter

from resihp.contracts import Job, Layout, Replica, Schedule, Stage, even_quotas

from ..memory import replica_fits
from ..simulator import replica_makespan
from .arrangements import Arrangement
from .chains import Chain
from .plan_bounds import quick_bound
from .tp_groups import TPGroup

_LEAST_GAIN = 1e-3  # current layers are kept unless others are faster by this fraction
_TRIES = 4  # layer partitions of a chain that are timed


@dataclass(frozen=True)
class InterleavedLayout:
    """Layout of interleaved stages; times without the fixed cost of a step."""

    layout: Layout
    quotas: tuple[int, ...]
    makespan_ms: float
    bound_ms: float


def interleaved(
    job: Job,
    found: Arrangement,
    current: Layout,
    speeds: Mapping[int, float],
    expired: Callable[[], bool],
) -> InterleavedLayout | str:
    """Arrangement with the job's number of model chunks per stage, or the reason against it.

    The layers of a stage are divided evenly over its chunks, larger parts first; current layers
    are kept unless others are clearly faster. A replica of one stage holds one chunk. A few layer
    partitions of every chain are timed by replay, and quotas are exchanged as under the other
    schedules. The bound allows fractional layers.
    """
    chains, quotas = found.chains, list(found.division.quotas)
    if all(len(chain) == 1 for chain in chains):
        return "no replica has several stages"
    shapes = _Shapes(job, found, current, speeds)
    ends = [shapes.best(*pair)[0] for pair in zip(chains, quotas, strict=True)]
    if inf in ends:
        return "memory or max_in_flight is too small for several model chunks per stage"
    _exchange(shapes, chains, quotas, ends, expired)
    layout = Layout(tuple(shapes.best(*pair)[1] for pair in zip(chains, quotas, strict=True)))
    setting = replace(found.evaluator.setting, schedule=Schedule.INTERLEAVED)
    bound_ms = quick_bound(setting, chains, quotas, job.chunks)
    return InterleavedLayout(layout, tuple(quotas), max(ends), min(max(ends), bound_ms))


class _Shapes:
    """Cache of the best interleaved replica of a chain for a number of microbatches.

    Chains of groups of equal cost are replayed once.
    """

    def __init__(
        self, job: Job, found: Arrangement, current: Layout, speeds: Mapping[int, float]
    ) -> None:
        self._job, self._evaluator, self._speeds = job, found.evaluator, speeds
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
        return present if _groups(present) == _groups(fresh) else None

    def _makespan(self, chain: Chain, quota: int, replica: Replica) -> float:
        """Makespan by replay; inf if memory or the in-flight limit forbids the replica."""
        ranges = tuple(stage.chunks for stage in replica.stages)
        key = (self._evaluator.signature(chain), ranges, quota)
        if key not in self._makespans:
            self._makespans[key] = self._replay(quota, replica)
        return self._makespans[key]

    def _replay(self, quota: int, replica: Replica) -> float:
        job, footprint = self._job, self._evaluator.setting.footprint
        makespan = replica_makespan(job, replica, quota, self._speeds, Schedule.INTERLEAVED)
        if makespan < inf and not replica_fits(
            job, footprint, replica, quota, Schedule.INTERLEAVED
        ):
            return inf
        return makespan


def _groups(replica: Replica) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(stage.ranks, stage.shares) for stage in replica.stages]


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


def _exchange(
    shapes: _Shapes,
    chains: Sequence[Chain],
    quotas: list[int],
    ends: list[float],
    expired: Callable[[], bool],
) -> None:
    """Move single microbatches from the last replica to finish to the best other one."""
    for _ in range(2 * len(chains) + 8):
        worst = ends.index(max(ends))
        others = [i for i in range(len(chains)) if i != worst]
        if quotas[worst] <= 1 or not others or expired():
            return
        taker = min(others, key=lambda i: (shapes.best(chains[i], quotas[i] + 1)[0], i))
        if shapes.best(chains[taker], quotas[taker] + 1)[0] >= ends[worst] * (1 - 1e-9):
            return
        quotas[worst] -= 1
        quotas[taker] += 1
        for index in (worst, taker):
            ends[index] = shapes.best(chains[index], quotas[index])[0]
