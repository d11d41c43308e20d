"""Front of step time against moved state: arrangements that leave more where it is."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from resihp.contracts import Job, Layout

from ..cost_model import layer_cost
from ..link_costs import ALL_LINKS_HEALTHY, LinkSlowdowns
from ..memory import MemoryFootprint, plan_schedules
from ..migration import StateBytes, transfer_ms
from .arrangements import initial_chains, within_memory
from .chains import Chain, by_length
from .placement import exchange_groups, restore_positions, sort_by_speed
from .quotas import Arrangement, ChainEvaluator, divide
from .rank_orders import RankOrder, gathered_orders
from .received_state import NearbyShares, ReceivedState
from .replica_options import ReplicaOptions
from .tp_groups import GroupTable

LIMITS = (0.0, 0.004, 0.01)  # of the step given up
_GATHERED = (1, 2, 3)  # dead and slow ranks in a stage
_SLOWER = (1.0, 1.05, 1.12, 1.25, 1.5)  # times of a layer with shares closer to the present ones
_CELLS = 20_000  # chains x stages^2 up to which a front is searched
_FEWER_CELLS = 4_000  # up to which nearby shares and swaps of groups are tried


class _Point(NamedTuple):
    """Arrangement with the bytes that all ranks, and the one that gets most, receive for it."""

    arrangement: Arrangement
    total_bytes: float
    most_bytes: float


def search_front(
    job: Job,
    current: Layout,
    speeds: Mapping[int, float],
    found: Sequence[Arrangement],
    expired: Callable[[], bool],
    links: LinkSlowdowns = ALL_LINKS_HEALTHY,
) -> list[Arrangement]:
    """Front from the first of `found`, or one as fast that moves less, to the one that moves least.

    Step times rise by at most 1%; bytes fall. Only the first one for a job without a model, of
    interleaved stages, or of too many devices, and where moving takes less than 1% of one step:
    no longer step is worth that, and after a loss the job waits for the plan.
    """
    sizes = StateBytes.of(job)
    is_interleaved = any(replica.chunks > 1 for replica in current.replicas)
    best = found[0]
    if sizes is None or is_interleaved or _cells(best.chains) > _CELLS:
        return [best]
    groups = best.evaluator.setting.table.groups
    quickest = _point(best, ReceivedState(current, groups, sizes))
    points, fixed_ms = [quickest], layer_cost(job).step_ms
    step_ms = best.makespan_ms + fixed_ms
    if transfer_ms(job, quickest.most_bytes) < LIMITS[-1] * step_ms:
        return [best]
    nearby = NearbyShares(job, current, speeds, links)
    placements = [
        placed
        for option in _placements(job, current, speeds, found, expired, links)
        for placed in (option, *_joined(option))
    ]
    for alike in _of_one_setting(placements):
        slower = _SLOWER if _cells(alike[0].chains) <= _FEWER_CELLS else _SLOWER[:1]
        options = ReplicaOptions(alike, current, sizes, nearby, slower, quickest.most_bytes)
        for limit in LIMITS:
            if not expired():
                limit_ms = step_ms * (1.0 + limit) - fixed_ms
                arranged = (within_memory(job, one) for one in options.within(limit_ms))
                points += [_point(one, options.state) for one in arranged if one is not None]
    return [point.arrangement for point in _monotone(points)]


def _of_one_setting(placements: Iterable[Arrangement]) -> Iterator[Sequence[Arrangement]]:
    """Distinct placements that hold all layers, by schedule and memory footprint."""
    grouped: dict[object, dict[object, Arrangement]] = defaultdict(dict)
    for placed in placements:
        if placed.makespan_ms == math.inf:  # with the quotas of its replicas
            continue
        setting = placed.evaluator.setting
        same = grouped[setting.schedule, setting.footprint]
        same.setdefault((placed.layout, placed.quotas), placed)
    yield from (list(same.values()) for same in grouped.values())


def _joined(placed: Arrangement) -> Iterator[Arrangement]:
    """Arrangement in which the two slowest replicas are one of twice the depth, if any is slow.

    A stage of it holds half of the layers that it held before, or as many as its speed allows of
    those that the one beside it holds too: nothing is moved, and few layers need other shares. As
    a pipeline of many microbatches it is hardly slower than two. Another replica remains beside
    it, with which a further loss finds the state.
    """
    evaluator, count = placed.evaluator, len(placed.chains)
    setting, speeds = evaluator.setting, [evaluator.speed(chain) for chain in placed.chains]
    order = sorted(range(count), key=lambda index: (speeds[index], index))
    pair, rest = order[:2], sorted(order[2:])
    groups = [group for index in pair for group in placed.chains[index]]
    if not rest or len(groups) > setting.layers or min(speeds) >= max(speeds) * (1 - 1e-9):
        return
    chain = tuple(sorted(groups, key=evaluator.columns.__getitem__))
    quota = sum(placed.quotas[index] for index in pair)
    quotas = [quota, *(placed.quotas[index] for index in rest)]
    yield Arrangement.of(evaluator, [chain, *(placed.chains[i] for i in rest)], quotas)


def _cells(chains: Sequence[Chain]) -> int:
    return sum(len(chain) ** 2 for chain in chains)


def _point(found: Arrangement, state: ReceivedState) -> _Point:
    """Arrangement with what it moves."""
    total = most = 0.0
    for indices in by_length(found.chains):
        chains = np.array([found.chains[i] for i in indices], np.int64)
        layers = np.array([found.layers[i] for i in indices], np.int64)
        total += float(state.total(chains, layers).sum())
        most = max(most, float(state.most(chains, layers).max()))
    return _Point(found, total, most)


def _monotone(points: Sequence[_Point]) -> list[_Point]:
    """Points of falling bytes, quickest first, ending with the one that moves least."""
    left = list(points)
    front: list[_Point] = []
    while left:
        best = min(left, key=lambda p: (p.total_bytes, p.most_bytes, p.arrangement.makespan_ms))
        front.insert(0, best)
        faster_ms = best.arrangement.makespan_ms * (1 - 1e-9)
        left = [
            p
            for p in left
            if p.arrangement.makespan_ms < faster_ms and p.most_bytes >= best.most_bytes
        ]
    return front


def _placements(
    job: Job,
    current: Layout,
    speeds: Mapping[int, float],
    found: Sequence[Arrangement],
    expired: Callable[[], bool],
    links: LinkSlowdowns,
) -> Iterator[Arrangement]:
    """Arrangements of `found`, of the groups in place and, of a job that is not too large, of them
    after swaps within columns, also of groups in which dead and slow ranks are gathered."""
    yield from found
    best = found[0]
    is_small = _cells(best.chains) <= _FEWER_CELLS
    gathered = gathered_orders(current, speeds, _GATHERED) if is_small else []
    for order in (RankOrder({}), *gathered):
        moved = replace(job, layout=order.of(job.layout))
        yield from _in_place(moved, order.of(current), speeds, best, expired, links)


def _in_place(
    job: Job,
    current: Layout,
    speeds: Mapping[int, float],
    best: Arrangement,
    expired: Callable[[], bool],
    links: LinkSlowdowns,
) -> Iterator[Arrangement]:
    """Arrangements of the groups in their places in `current`, and after swaps within columns."""
    groups, chains, _ = initial_chains(job, current, speeds, links, even=False, folds=0)
    if expired() or len(chains) > job.microbatches:
        return
    setting = replace(
        best.evaluator.setting,
        table=GroupTable.of(groups, links),
        footprint=MemoryFootprint.of(job, len(chains)),
    )
    typical = max(1, job.microbatches // len(chains))
    in_place = []
    for schedule in plan_schedules(job):
        evaluator = ChainEvaluator(replace(setting, schedule=schedule))
        if all(evaluator.fits(chains, typical)):
            in_place.append(divide(evaluator, chains))
    if not in_place:
        return
    quickest = min(in_place, key=lambda placed: placed.makespan_ms)
    yield quickest
    if _cells(chains) > _FEWER_CELLS:
        return
    evaluator = quickest.evaluator
    for start in (sort_by_speed(evaluator, chains), chains):
        if expired() or len(start) != len(chains) or not all(evaluator.fits(start, typical)):
            continue
        target_ms = best.makespan_ms
        swapped = exchange_groups(evaluator, start, target_ms, swaps_only=True)
        yield divide(evaluator, restore_positions(evaluator, chains, swapped))
