"""Certified lower bound of a plan's step time for its groups, over all layers and quotas.

Combines two bounds of single pipelines: a fast one with fractional layers, and one over whole
layers where the fast one leaves a gap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import Job, Layout, Schedule
from resihp.pipeline.orders import chunks_run

from ..bounds import relaxed_factors
from ..bounds.in_flight import Floats
from ..cost_model import group_cost, layer_cost, transfer_ms
from ..link_costs import ALL_LINKS_HEALTHY, LinkSlowdowns
from ..memory import MemoryFootprint
from .chains import ChainBatch, SearchSetting, by_length
from .tp_groups import GroupTable, TPGroup

Ints = NDArray[np.int64]
MakespanFn = Callable[[Ints, Ints], Floats]  # of pipeline indices and their microbatches

_CLOSE = 1e-3  # gap up to which the fast bound is enough
_CELLS = 60_000  # pipelines x stages up to which whole layers are considered
_FAR = 1e-2  # gap beyond which heterogeneous stages are considered
_FEWER_CELLS = 300  # pipelines x stages up to which they are
_NEAR = 0.08  # distance below the limit within which a bound is tightened
_BATCH = 256  # pipelines, limits the memory


class ChainBounds:
    """Cache of bounds of chains over whole layers; chains of groups of equal cost share entries.

    tight  use `heterogeneous_layers` for bounds just below the limit
    """

    def __init__(self, setting: SearchSetting, *, tight: bool = False) -> None:
        self.setting = setting
        self._tight = tight
        self._within_ms = inf
        self._known: dict[bytes, float] = {}

    def bounds(self, rows: ChainBatch, within_ms: float) -> Floats:
        """Bound of every row; entries found for a longer limit hold for a shorter one."""
        if within_ms > self._within_ms:
            self._known.clear()
        self._within_ms = within_ms
        cases = np.column_stack([self.setting.table.kind[rows.chains], rows.microbatches])
        keys = [case.tobytes() for case in cases]
        fresh = {key: row for row, key in enumerate(keys) if key not in self._known}
        missing = list(fresh.values())
        for start in range(0, len(missing), _BATCH):
            part = missing[start : start + _BATCH]
            some = rows.pick(np.array(part))
            ends, _ = some.whole_layers(within_ms)
            near = np.flatnonzero((ends > within_ms * (1.0 - _NEAR)) & (ends < within_ms))
            if self._tight and near.size:
                closer, _ = some.pick(near).whole_layers(within_ms, tight=True)
                ends[near] = np.maximum(ends[near], closer)
            self._known.update(zip([keys[row] for row in part], ends.tolist(), strict=True))
        return np.array([self._known[key] for key in keys])


def chains_bound(
    proven: ChainBounds,
    chains: Sequence[Sequence[int]],
    quotas: Sequence[int],
    within_ms: float,
) -> float:
    """Lower bound of the makespan of chains over all whole layers and quotas of the same sum.

    Every stage has at least one layer. Groups keep their places and shares. `within_ms`: makespan
    of the plan, which caps the bound.
    """
    quick = quick_bound(proven.setting, chains, quotas)
    if within_ms < quick * (1 + _CLOSE) or sum(map(len, chains)) > _CELLS:
        return min(quick, within_ms)
    batches = list(_batches(proven.setting, chains, quotas))

    def whole(bounds: ChainBounds, batch: ChainBatch) -> MakespanFn:
        return lambda rows, counts: bounds.bounds(
            ChainBatch(batch.setting, batch.chains[rows], counts), within_ms
        )

    close = least_makespan([(batch.microbatches, whole(proven, batch)) for batch in batches])
    if within_ms > close * (1 + _FAR) and sum(map(len, chains)) <= _FEWER_CELLS:
        tight = ChainBounds(proven.setting, tight=True)
        close = least_makespan([(batch.microbatches, whole(tight, batch)) for batch in batches])
    return max(quick, min(close, within_ms))


def quick_bound(
    setting: SearchSetting, chains: Sequence[Sequence[int]], quotas: Sequence[int], chunks: int = 1
) -> float:
    """Like `chains_bound` with fractional layers; `chunks` of interleaved stages."""
    batches = _batches(setting, chains, quotas)
    return least_makespan([(batch.microbatches, _fractional(batch, chunks)) for batch in batches])


def least_makespan(parts: Sequence[tuple[Ints, MakespanFn]]) -> float:
    """Least time by which pipelines can finish their total number of microbatches.

    parts  microbatches of the pipelines of a batch, where the search starts, and a function for
           their least makespan with any number of microbatches

    Every pipeline finishes one more microbatch at each of these makespans; the result is the time
    at which all pipelines together reach the total. Evaluates counts near the given ones, and more
    as needed, but no pipeline runs more than the total: transfers may take so long that, as floats,
    one microbatch more takes no time.
    """
    total = sum(int(counts.sum()) for counts, _ in parts)
    low, high = 2, 2
    while True:
        tables = [_table(counts, times, low, high) for counts, times in parts]
        base = sum(int(first.sum()) for _, first in tables)
        ends = np.concatenate([table.ravel() for table, _ in tables])
        makespan = float(np.sort(ends)[total - base - 1])
        is_within = (((t[-1] <= makespan) & np.isfinite(t[-1])).any() for t, _ in tables)
        if high < total and any(is_within):
            high *= 2
        elif any(((table[0] > makespan) & (first > 0)).any() for table, first in tables):
            low *= 2
        else:
            return makespan


def _table(counts: Ints, times: MakespanFn, low: int, high: int) -> tuple[Floats, Ints]:
    """Makespans with each further microbatch, [offset, pipeline], and the counts before them."""
    first = np.maximum(counts - low, 0)
    tried = first + np.arange(1, low + high + 1)[:, None]
    rows = np.broadcast_to(np.arange(len(counts)), tried.shape)
    ends = times(rows.ravel(), tried.ravel()).reshape(tried.shape)
    return np.maximum.accumulate(ends, axis=0), first


def _batches(
    setting: SearchSetting, chains: Sequence[Sequence[int]], quotas: Sequence[int]
) -> Iterator[ChainBatch]:
    for indices in by_length(chains):
        rows = np.array([chains[i] for i in indices], np.int64)
        yield ChainBatch(setting, rows, np.array([quotas[i] for i in indices], np.int64))


def _fractional(batch: ChainBatch, chunks: int) -> MakespanFn:
    """Bounds with fractional layers; any stage may do the work of embedding and head."""
    table, setting = batch.setting.table, batch.setting
    speeds = 1.0 / (batch.costs.forward + batch.costs.backward)
    ends = 3.0 * (batch.costs.extra * speeds).sum(axis=1)
    parts = table.forward_ms / (table.forward_ms + table.backward_ms)
    if table.embedding_ms.any() or table.head_ms.any():
        parts = np.append(parts, 1.0 / 3.0)
    forward_part = float(parts.min()), float(parts.max())

    def times(rows: Ints, counts: Ints) -> Floats:
        schedule = setting.limits["schedule"]
        factors = relaxed_factors(speeds[rows], counts, schedule, forward_part, chunks)
        return np.asarray(factors * (setting.layers + ends)[rows])

    return times


def layout_bound(
    job: Job,
    layout: Layout,
    quotas: Sequence[int],
    schedule: Schedule,
    speeds: Mapping[int, float],
    step_ms: float,
    links: LinkSlowdowns = ALL_LINKS_HEALTHY,
) -> float:
    """Lower bound of the step time for the groups of a layout that takes `step_ms`, all alive.

    Over all partitions with a layer in every stage or, if the layout has stages without any, over
    fractional layers. Where replicas have their own numbers of microbatches in flight, for any
    order of whole passes.
    """
    cost = layer_cost(job)
    groups: list[TPGroup] = []
    chains: list[Sequence[int]] = []
    for replica in layout.replicas:
        chains.append(range(len(groups), len(groups) + len(replica.stages)))
        for index, stage in enumerate(replica.stages):
            values = [speeds.get(rank, 1.0) for rank in stage.ranks]
            slowdown = links.collective(stage.ranks)
            timed = group_cost(job, cost, stage.shares, values, stage.ranks, slowdown)
            groups.append(TPGroup(stage.ranks, stage.shares, index, timed))
    setting = SearchSetting(
        GroupTable.of(groups, links),
        MemoryFootprint.of(job, layout.dp),
        layout.layers,
        sum(quotas),
        transfer_ms(job),
        job.max_in_flight,
        schedule,
        links=links,
        any_order=any(replica.in_flight for replica in layout.replicas),
    )
    is_any_empty = any(not stage.layer_count for r in layout.replicas for stage in r.stages)
    if schedule is Schedule.INTERLEAVED or is_any_empty:
        most = max(chunks_run(job, layout.replicas, schedule))
        return min(step_ms, quick_bound(setting, chains, quotas, most) + cost.step_ms)
    return chains_bound(ChainBounds(setting), chains, quotas, step_ms - cost.step_ms) + cost.step_ms
