"""Interleaved stages for an arrangement: several model chunks in each, layers and quotas anew."""

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
from .plan_bounds import quick_bound
from .quotas import Chain
from .tp_groups import TPGroup

_WORTH = 1e-3  # other layers must be better than those that are there by this much
_TRIES = 4  # ways to spread the layers of a chain that are timed


@dataclass(frozen=True)
class InterleavedLayout:
    """A layout of interleaved stages; times without what a step takes beside its microbatches."""

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
    """The arrangement with as many model chunks in each stage as the job has, or why not.

    A stage's layers are spread over its chunks as evenly as they go, the larger parts first; layers
    that are there already stay where others are not clearly better. A replica of one stage holds
    one chunk. Of every chain a few ways to spread its layers over the stages are timed by replay,
    and quotas exchanged as under the other schedules. The bound allows parts of layers.
    """
    chains, quotas = found.chains, list(found.division.quotas)
    if all(len(chain) == 1 for chain in chains):
        return "no replica has several stages"
    shapes = _Shapes(job, found, current, speeds)
    ends = [shapes.best(*pair)[0] for pair in zip(chains, quotas, strict=True)]
    if inf in ends:
        return "the limits on what is in flight leave no room for several model chunks in a stage"
    _exchange(shapes, chains, quotas, ends, expired)
    layout = Layout(tuple(shapes.best(*pair)[1] for pair in zip(chains, quotas, strict=True)))
    setting = replace(found.evaluator.setting, schedule=Schedule.INTERLEAVED)
    bound_ms = quick_bound(setting, chains, quotas, job.chunks)
    return InterleavedLayout(layout, tuple(quotas), max(ends), min(max(ends), bound_ms))


class _Shapes:
    """The best interleaved replica of a chain for a number of microbatches; looked up once known.

    Chains whose groups cost the same are played once.
    """

    def __init__(
        self, job: Job, found: Arrangement, current: Layout, speeds: Mapping[int, float]
    ) -> None:
        self._job, self._evaluator, self._speeds = job, found.evaluator, speeds
        self._present = {replica.ranks: replica for replica in current.replicas}
        self._spans: dict[tuple[object, ...], float] = {}
        self._best: dict[tuple[Chain, int], tuple[float, Replica]] = {}

    def best(self, chain: Chain, quota: int) -> tuple[float, Replica]:
        """Span, inf where nothing fits, and the replica."""
        if (chain, quota) not in self._best:
            groups = [self._evaluator.setting.fleet.groups[group] for group in chain]
            counts = self._evaluator.partitions(chain, quota)[:_TRIES]
            chunks = self._job.chunks if len(chain) > 1 else 1
            fresh = [_replica(groups, layers, chunks) for layers in counts]
            options = [(self._span(chain, quota, replica), replica) for replica in fresh]
            best = min(options, key=itemgetter(0))
            there = self._there(fresh[0])
            if there is not None:
                kept = self._span(chain, quota, there), there
                best = kept if kept[0] <= best[0] * (1 + _WORTH) else best
            self._best[chain, quota] = best
        return self._best[chain, quota]

    def _there(self, fresh: Replica) -> Replica | None:
        """The present replica of the same groups with as many chunks."""
        present = self._present.get(fresh.ranks)
        if present is None or present.chunks != fresh.chunks:
            return None
        return present if _groups(present) == _groups(fresh) else None

    def _span(self, chain: Chain, quota: int, replica: Replica) -> float:
        """By replay; inf without the memory, or where a limit on what is in flight forbids it."""
        ranges = tuple(stage.chunks for stage in replica.stages)
        key = (self._evaluator.signature(chain), ranges, quota)
        if key not in self._spans:
            self._spans[key] = self._played(quota, replica)
        return self._spans[key]

    def _played(self, quota: int, replica: Replica) -> float:
        job, footprint = self._job, self._evaluator.setting.footprint
        span = replica_makespan(job, replica, quota, self._speeds, Schedule.INTERLEAVED)
        if span < inf and not replica_fits(job, footprint, replica, quota, Schedule.INTERLEAVED):
            return inf
        return span


def _groups(replica: Replica) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(stage.ranks, stage.shares) for stage in replica.stages]


def _replica(groups: Sequence[TPGroup], layers: Sequence[int], chunks: int) -> Replica:
    """Stages of these groups and numbers of layers, which their chunks share evenly."""
    parts = [even_quotas(count, chunks) for count in layers]
    sizes = [part[chunk] for chunk in range(chunks) for part in parts]
    spans = list(pairwise(accumulate(sizes, initial=0)))
    stages = len(groups)
    return Replica(
        tuple(
            Stage(group.ranks, spans[s], group.shares, tuple(spans[s + stages :: stages]))
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
    """Moves single microbatches from the latest replica to the one that would end first with it."""
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
