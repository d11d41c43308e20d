"""The bound that a plan is delivered with: no plan with these groups can end its step earlier.

Two bounds of one pipeline go into it: a quick one that allows parts of layers, and one over whole
layers where the quick one leaves a gap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import Job, Layout, Schedule

from ..bounds import relaxed_factors
from ..bounds.in_flight import Floats
from ..cost_model import group_cost, layer_cost, transfer_ms
from ..memory import MemoryFootprint
from .chains import ChainBatch, SearchSetting
from .tp_groups import GroupTable, TPGroup

Ints = NDArray[np.int64]
Times = Callable[[Ints, Ints], Floats]  # of pipelines (their indices) with these microbatches

_CLOSE = 1e-3  # a gap that is not worth a closer look
_CELLS = 60_000  # pipelines x stages up to which there is one
_FAR = 1e-2  # one that is worth another
_FEWER_CELLS = 300  # pipelines x stages up to which that is taken
_NEAR = 0.08  # how far below the time in question a pipeline may still decide something
_AT_ONCE = 256  # pipelines that are worked out together, which bounds the memory


class ChainBounds:
    """Bounds of pipelines over whole layers, looked up once known.

    Pipelines whose groups cost the same are the same pipeline. `closely`: those whose bound is just
    below the time in question with their odd stages at each number of layers.
    """

    def __init__(self, setting: SearchSetting, *, closely: bool = False) -> None:
        self.setting = setting
        self._closely = closely
        self._within_ms = inf
        self._known: dict[bytes, float] = {}

    def bounds(self, rows: ChainBatch, within_ms: float) -> Floats:
        """Of every row; what was found for a longer time holds for a shorter one too."""
        if within_ms > self._within_ms:
            self._known.clear()
        self._within_ms = within_ms
        cases = np.column_stack([self.setting.fleet.kind[rows.chains], rows.microbatches])
        keys = [case.tobytes() for case in cases]
        missing = list(
            {key: row for row, key in enumerate(keys) if key not in self._known}.values()
        )
        for start in range(0, len(missing), _AT_ONCE):
            part = missing[start : start + _AT_ONCE]
            found = self._worked_out(rows.pick(np.array(part)), within_ms).tolist()
            self._known.update(zip([keys[row] for row in part], found, strict=True))
        return np.array([self._known[key] for key in keys])

    def _worked_out(self, rows: ChainBatch, within_ms: float) -> Floats:
        ends, _ = rows.whole_layers(within_ms)
        near = np.flatnonzero((ends > within_ms * (1.0 - _NEAR)) & (ends < within_ms))
        if self._closely and near.size:
            closer, _ = rows.pick(near).whole_layers(within_ms, closely=True)
            ends[near] = np.maximum(ends[near], closer)
        return ends


def chains_bound(
    proven: ChainBounds,
    chains: Sequence[Sequence[int]],
    quotas: Sequence[int],
    within_ms: float,
) -> float:
    """Least step time of chains of groups under any whole layers and quotas of the same sum.

    The groups stay where they are with the shares that they have. `within_ms`: what a plan
    reached; a bound is worth nothing beyond it.
    """
    quick = quick_bound(proven.setting, chains, quotas)
    if within_ms < quick * (1 + _CLOSE) or sum(map(len, chains)) > _CELLS:
        return min(quick, within_ms)
    parts = list(_by_length(chains, quotas))
    close = least_makespan([(counts, _whole(proven, rows, within_ms)) for rows, counts in parts])
    if within_ms > close * (1 + _FAR) and sum(map(len, chains)) <= _FEWER_CELLS:
        closely = ChainBounds(proven.setting, closely=True)
        close = least_makespan(
            [(counts, _whole(closely, rows, within_ms)) for rows, counts in parts]
        )
    return max(quick, min(close, within_ms))


def quick_bound(
    setting: SearchSetting, chains: Sequence[Sequence[int]], quotas: Sequence[int], chunks: int = 1
) -> float:
    """As `chains_bound`, for parts of layers as well; `chunks` of interleaved stages."""
    parts = _by_length(chains, quotas)
    return least_makespan([(counts, _fractional(setting, rows, chunks)) for rows, counts in parts])


def least_makespan(parts: Sequence[tuple[Ints, Times]]) -> float:
    """Least step time in which pipelines can run as many microbatches as they do together.

    Of every part the microbatches of its pipelines, near which the search starts, and how long
    they take at least for any number. Every pipeline adds one after the other at these times; the
    least step time is the one at which all of them together have the total. Only numbers near the
    present ones are looked at, and more as far as needed.
    """
    total = sum(int(counts.sum()) for counts, _ in parts)
    low, high = 2, 2
    while True:
        tables = [_table(counts, times, low, high) for counts, times in parts]
        base = sum(int(first.sum()) for _, first in tables)
        ends = np.concatenate([table.ravel() for table, _ in tables])
        span = float(np.sort(ends)[total - base - 1])
        if any(((table[-1] <= span) & np.isfinite(table[-1])).any() for table, _ in tables):
            high *= 2
        elif any(((table[0] > span) & (first > 0)).any() for table, first in tables):
            low *= 2
        else:
            return span


def _table(counts: Ints, times: Times, low: int, high: int) -> tuple[Floats, Ints]:
    """Times at which each further microbatch fits, [offset, pipeline]; and how many came before."""
    first = np.maximum(counts - low, 0)
    tried = first + np.arange(1, low + high + 1)[:, None]
    rows = np.broadcast_to(np.arange(len(counts)), tried.shape)
    ends = times(rows.ravel(), tried.ravel()).reshape(tried.shape)
    return np.maximum.accumulate(ends, axis=0), first


def _by_length(
    chains: Sequence[Sequence[int]], quotas: Sequence[int]
) -> Iterator[tuple[Ints, Ints]]:
    """Chains with equally many stages, [pipeline, stage], and their microbatches."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, chain in enumerate(chains):
        by_length[len(chain)].append(index)
    for indices in by_length.values():
        rows = np.array([chains[i] for i in indices], np.int64)
        yield rows, np.array([quotas[i] for i in indices], np.int64)


def _fractional(setting: SearchSetting, chains: Ints, chunks: int) -> Times:
    """Bounds that allow parts of layers; embedding and head are work that any stage may do."""
    fleet = setting.fleet
    speeds = 1.0 / (fleet.forward_ms + fleet.backward_ms)[chains]
    extra = ChainBatch(setting, chains, np.ones(len(chains), np.int64)).extra
    ends = 3.0 * (extra * speeds).sum(axis=1)
    parts = fleet.forward_ms / (fleet.forward_ms + fleet.backward_ms)
    if fleet.embedding_ms.any() or fleet.head_ms.any():
        parts = np.append(parts, 1.0 / 3.0)
    forward_part = float(parts.min()), float(parts.max())

    def times(rows: Ints, counts: Ints) -> Floats:
        factors = relaxed_factors(speeds[rows], counts, setting.schedule, forward_part, chunks)
        return np.asarray(factors * (setting.layers + ends)[rows])

    return times


def _whole(proven: ChainBounds, chains: Ints, within_ms: float) -> Times:
    """Bounds over whole layers."""

    def times(rows: Ints, counts: Ints) -> Floats:
        return proven.bounds(ChainBatch(proven.setting, chains[rows], counts), within_ms)

    return times


def layout_bound(
    job: Job,
    layout: Layout,
    quotas: Sequence[int],
    schedule: Schedule,
    speeds: Mapping[int, float],
    step_ms: float,
) -> float:
    """`chains_bound` of the groups of a layout that takes `step_ms`; all of its ranks are alive."""
    cost = layer_cost(job)
    groups: list[TPGroup] = []
    chains: list[Sequence[int]] = []
    for replica in layout.replicas:
        chains.append(range(len(groups), len(groups) + len(replica.stages)))
        for index, stage in enumerate(replica.stages):
            values = [speeds.get(rank, 1.0) for rank in stage.ranks]
            timed = group_cost(job, cost, stage.shares, values, stage.ranks)
            groups.append(TPGroup(stage.ranks, stage.shares, index, timed))
    setting = SearchSetting(
        GroupTable.of(groups),
        MemoryFootprint.of(job, layout.dp),
        layout.layers,
        transfer_ms(job),
        job.max_in_flight,
        schedule,
    )
    if schedule is Schedule.INTERLEAVED:
        most = max(replica.chunks for replica in layout.replicas)
        return min(step_ms, quick_bound(setting, chains, quotas, most) + cost.step_ms)
    return chains_bound(ChainBounds(setting), chains, quotas, step_ms - cost.step_ms) + cost.step_ms
