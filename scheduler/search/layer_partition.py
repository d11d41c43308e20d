"""Layer partitions of many chains: candidates by bottleneck, ranked by bound or exact makespan."""

from __future__ import annotations

from functools import cache
from itertools import combinations
from math import comb

import numpy as np

from resihp.contracts import Schedule

from .chains import ChainBatch, Floats, Ints

_SLACK = (0.0, 0.01, 0.03, 0.06, 0.1, 0.2, 0.35)
_FEWER_SLACK = (0.0, 0.03, 0.1)
_FEW = 60  # partitions of a chain up to which all are timed


def candidates(rows: ChainBatch, *, few: bool = False) -> tuple[Ints, Floats]:
    """Layer partitions [candidate, chain, stage] and their bounds [candidate, chain].

    For a bottleneck W every stage can hold `(W - extra) / w` layers; the least W that places all
    layers is optimal for many microbatches. A slightly larger W relieves slow stages and shortens
    warm-up and drain. Surplus layers are removed from the slowest or from the fullest stages.
    Infeasible chains have the bound inf. `few`: fewer candidates.
    """
    total = rows.setting.layers
    costs = rows.costs
    each, extra = costs.forward + costs.backward, 3.0 * costs.extra
    most = np.maximum(costs.most, 1)
    least = least_bottleneck(each, extra, most, total)
    slack = 1.0 + np.array(_FEWER_SLACK if few else _SLACK)
    room = _room(least * slack[:, None], each, extra, most)
    slow = _without_surplus(room, -each, total)
    full = _without_surplus(room[:1], -(room[0] * each + extra), total, one_each=True)
    layers = np.concatenate([slow[:1], full, slow[1:]])
    allowed = rows.fits & (layers.sum(axis=2) == total)
    return layers, np.where(allowed, rows.bounds(layers), np.inf)


def least_bottleneck(each: Floats, extra: Floats, most: Ints, total: int) -> Floats:
    """Least bottleneck time over whole layers [chain]; inf if memory cannot hold them all.

    Starts from the optimum of fractional layers, rounded down, and adds layers greedily.
    """
    low = (total + (extra / each).sum(axis=1)) / (1.0 / each).sum(axis=1)
    held = _room(low, each, extra, most)
    missing = total - held.sum(axis=1)
    further = min(int(missing.max(initial=0)), total)
    if further <= 0:
        return np.asarray(low)
    count = held[:, None, :] + np.arange(1, further + 1)[:, None]
    ends = np.where(count <= most[:, None, :], count * each[:, None, :] + extra[:, None, :], np.inf)
    ends = np.sort(ends.reshape(len(each), -1), axis=1)
    last = ends[np.arange(len(each)), np.maximum(missing, 1) - 1]
    return np.asarray(np.where(missing > 0, last, low))


def _room(bottleneck: Floats, each: Floats, extra: Floats, most: Ints) -> Ints:
    """Layers that every stage can hold within a bottleneck time, [..., chain, stage]."""
    fits = np.floor((bottleneck[..., None] - extra) / each + 1e-9)
    return np.maximum(np.minimum(fits, most), 1.0).astype(np.int64)


def _without_surplus(room: Ints, key: Floats, total: int, *, one_each: bool = False) -> Ints:
    """Layers reduced to `total` in the order of `key` (least first, later stages first).

    room [candidate, chain, stage]; key [chain, stage]
    """
    stages = room.shape[-1]
    order = (stages - 1 - np.argsort(key[:, ::-1], axis=1, kind="stable"))[None]
    held = np.take_along_axis(room, order, axis=-1)
    surplus = np.maximum(held.sum(axis=-1, keepdims=True) - total, 0)
    takes = np.minimum(held - 1, -(-surplus // stages)) if one_each else held - 1
    before = np.cumsum(takes, axis=-1) - takes
    held = held - np.minimum(np.maximum(surplus - before, 0), takes)
    result = np.empty_like(room)
    np.put_along_axis(result, order, held, axis=-1)
    return result


def best_candidate(rows: ChainBatch) -> tuple[Ints, Floats]:
    """Candidate with the least bound for every chain, and that bound."""
    layers, bounds = candidates(rows)
    best, row = bounds.argmin(axis=0), np.arange(bounds.shape[1])
    return layers[best, row], bounds[best, row]


def local_search(
    rows: ChainBatch, layers: Ints, *, rounds: int, tries: int = 4
) -> tuple[Ints, Floats]:
    """Local search by moves of single layers between stages; layers and exact makespans.

    Under eager 1F1B it descends on the bound first, which is cheaper. Then the `tries` moves of a
    chain with the least bound are timed; a move whose bound is not below the current makespan
    cannot help.
    """
    if rows.setting.schedule is Schedule.EAGER_1F1B:  # its bound is tight
        layers = _descended(rows, layers, rounds=rounds)
    layers = layers.copy()
    current = rows.makespans(layers)
    active = np.arange(len(layers)) if rows.stages > 1 else np.empty(0, np.int64)
    for _ in range(rounds):
        if not active.size:
            break
        some, take = rows.pick(active), np.arange(len(active))
        moved, bounds = _moves(some, layers[active])
        pick = np.argsort(bounds, axis=0, kind="stable")[:tries]
        hopeful = bounds[pick, take] < current[active] * (1 - 1e-9)
        if not hopeful.any():
            break
        trial = np.maximum(moved[pick, take], 1)
        _, at = np.nonzero(hopeful)
        exact = np.full(hopeful.shape, np.inf)
        exact[hopeful] = some.pick(at).makespans(trial[hopeful])
        choice = exact.argmin(axis=0)
        better = exact[choice, take] < current[active] * (1 - 1e-9)
        layers[active[better]] = trial[choice, take][better]
        current[active[better]] = exact[choice, take][better]
        active = active[better]
    return layers, current


def multi_start_search(rows: ChainBatch, *, within_ms: float) -> tuple[Ints, Floats]:
    """Best result of `local_search` from every candidate and from the layers that attain the bound.

    With few microbatches the local optima differ widely.
    """
    layers, bounds = candidates(rows)
    ends, attained = rows.whole_layers(within_ms, tight=True)
    starts = np.concatenate([layers, attained[None]])
    bounds = np.concatenate([bounds, ends[None]])
    row = np.arange(len(ends))
    starts = np.where(np.isfinite(bounds)[..., None], starts, starts[bounds.argmin(axis=0), row])
    each = rows.pick(np.tile(row, len(starts)))
    polished, makespans = local_search(each, starts.reshape(-1, rows.stages), rounds=24, tries=8)
    makespans = makespans.reshape(len(starts), -1)
    best = makespans.argmin(axis=0)
    return polished.reshape(starts.shape)[best, row], makespans[best, row]


def _descended(rows: ChainBatch, layers: Ints, *, rounds: int) -> Ints:
    """Layers after greedy moves of single layers while the bound falls."""
    layers = layers.copy()
    current = rows.bounds(layers)
    active = np.arange(len(layers)) if rows.stages > 1 else np.empty(0, np.int64)
    for _ in range(rounds):
        if not active.size:
            break
        moved, bounds = _moves(rows.pick(active), layers[active])
        choice, take = bounds.argmin(axis=0), np.arange(len(active))
        better = bounds[choice, take] < current[active] * (1 - 1e-9)
        layers[active[better]] = moved[choice, take][better]
        current[active[better]] = bounds[choice, take][better]
        active = active[better]
    return layers


def _moves(rows: ChainBatch, layers: Ints) -> tuple[Ints, Floats]:
    """Layers after each move of a single one, and bounds [move, chain]; inf for invalid moves."""
    moved = layers + single_moves(rows.stages)[:, None, :]
    allowed = ((moved >= 1) & (moved <= rows.costs.most)).all(axis=2)
    return moved, np.where(allowed, rows.bounds(moved), np.inf)


@cache
def single_moves(stages: int) -> Ints:
    """Changes of the layers by each move of a single one between two stages, [move, stage]."""
    pairs = [(i, j) for i in range(stages) for j in range(stages) if i != j]
    steps = np.zeros((len(pairs), stages), np.int64)
    for row, (giver, taker) in enumerate(pairs):
        steps[row, giver], steps[row, taker] = -1, 1
    return steps


@cache
def neighbour_moves(stages: int) -> Ints:
    """Changes of the layers by each move of a single one between neighbours, as
    `single_moves`."""
    steps = np.diff(np.eye(stages, dtype=np.int64), axis=0)
    return np.concatenate([steps, -steps])


def is_small(layers: int, stages: int) -> bool:
    """True if all partitions can be timed."""
    return comb(layers - 1, stages - 1) <= _FEW


def exhaustive_partition(rows: ChainBatch) -> tuple[Ints, Floats]:
    """Best of all partitions of every chain by exact makespan; inf if none fits."""
    total, stages, chains = rows.setting.layers, rows.stages, len(rows.chains)
    cuts = combinations(range(1, total), stages - 1)
    edges = np.array([(0, *cut, total) for cut in cuts], np.int64)
    options = np.diff(edges.reshape(-1, stages + 1), axis=1)
    if not len(options):
        return np.ones_like(rows.chains), np.full(chains, np.inf)
    fits = (options[:, None, :] <= rows.costs.most).all(axis=2)
    each = rows.pick(np.tile(np.arange(chains), len(options)))
    ends = each.makespans(np.repeat(options, chains, axis=0)).reshape(len(options), chains)
    ends = np.where(fits, ends, np.inf)
    best = ends.argmin(axis=0)
    return options[best], ends[best, np.arange(chains)]
