"""The bound that a plan is delivered with: no plan with these groups can end its step earlier.

Two bounds of one pipeline go into it: a quick one that allows parts of layers, and one over whole
layers where the quick one leaves a gap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import Job, Layout, Schedule

from ..bounds import Stages, chain_factors, whole_layer_bound
from ..bounds.in_flight import Floats
from ..costs import group_cost, layer_cost, transfer_ms
from ..memory import Footprint
from .fleet import Fleet, Group
from .layers import Setting, ends_ms, most_layers

Ints = NDArray[np.int64]
Times = Callable[[Ints, Ints], Floats]  # of pipelines (their indices) with these microbatches

_CLOSE = 1e-3  # a gap that is not worth a closer look
_CELLS = 60_000  # pipelines x stages up to which there is one


def chains_bound(
    setting: Setting,
    chains: Sequence[Sequence[int]],
    quotas: Sequence[int],
    within_ms: float,
) -> float:
    """Least step time of chains of groups under any whole layers and quotas of the same sum.

    The groups stay where they are with the shares that they have. `within_ms`: what a plan
    reached; a bound is worth nothing beyond it.
    """
    quick = quick_bound(setting, chains, quotas)
    if within_ms < quick * (1 + _CLOSE) or sum(map(len, chains)) > _CELLS:
        return min(quick, within_ms)
    parts = _by_length(chains, quotas)
    close = least_span([(counts, _whole(setting, rows, within_ms)) for rows, counts in parts])
    return max(quick, min(close, within_ms))


def quick_bound(setting: Setting, chains: Sequence[Sequence[int]], quotas: Sequence[int]) -> float:
    """As `chains_bound`, for parts of layers as well."""
    parts = _by_length(chains, quotas)
    return least_span([(counts, _fractional(setting, rows)) for rows, counts in parts])


def least_span(parts: Sequence[tuple[Ints, Times]]) -> float:
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


def _fractional(setting: Setting, chains: Ints) -> Times:
    """Bounds that allow parts of layers; embedding and head are work that any stage may do."""
    fleet = setting.fleet
    speeds = 1.0 / (fleet.forward_ms + fleet.backward_ms)[chains]
    ends = 3.0 * (ends_ms(setting, chains) * speeds).sum(axis=1)
    parts = fleet.forward_ms / (fleet.forward_ms + fleet.backward_ms)
    if fleet.embedding_ms.any() or fleet.head_ms.any():
        parts = np.append(parts, 1.0 / 3.0)
    forward_part = float(parts.min()), float(parts.max())

    def times(rows: Ints, counts: Ints) -> Floats:
        factors = chain_factors(speeds[rows], counts, setting.schedule, forward_part)
        return np.asarray(factors * (setting.layers + ends)[rows])

    return times


def _whole(setting: Setting, chains: Ints, within_ms: float) -> Times:
    """Bounds over whole layers; chains whose groups cost the same are looked at once."""
    fleet, extra = setting.fleet, ends_ms(setting, chains)

    def times(rows: Ints, counts: Ints) -> Floats:
        cases = np.column_stack([fleet.kind[chains[rows]], counts])
        _, first, inverse = np.unique(cases, axis=0, return_index=True, return_inverse=True)
        row, count = rows[first], counts[first]
        groups = chains[row]
        most = most_layers(setting, groups, count)
        stages = Stages(fleet.forward_ms[groups], fleet.backward_ms[groups], extra[row], most)
        bounds = whole_layer_bound(
            stages,
            setting.layers,
            count,
            within_ms,
            p2p=setting.p2p_ms,
            max_in_flight=setting.max_in_flight,
            schedule=setting.schedule,
        )
        return np.asarray(bounds[inverse.ravel()])

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
    groups: list[Group] = []
    chains: list[Sequence[int]] = []
    for replica in layout.replicas:
        chains.append(range(len(groups), len(groups) + len(replica.stages)))
        for index, stage in enumerate(replica.stages):
            values = [speeds.get(rank, 1.0) for rank in stage.ranks]
            timed = group_cost(job, cost, stage.shares, values, stage.ranks)
            groups.append(Group(stage.ranks, stage.shares, index, timed))
    setting = Setting(
        Fleet.of(groups),
        Footprint.of(job, layout.dp),
        layout.layers,
        transfer_ms(job),
        job.max_in_flight,
        schedule,
    )
    return chains_bound(setting, chains, quotas, step_ms - cost.step_ms) + cost.step_ms
