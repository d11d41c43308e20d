"""Layers per stage of many chains at once: candidates by bottleneck, judged by a bound or exactly.

A chain is a row of group indices, the stages of one replica in pipeline order. All chains of one
call have the same number of stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import Schedule
from resihp.pipeline.orders import most_in_flight

from ..bounds import in_flight_bound
from ..memory import Footprint
from ..spans import pipeline_spans
from .fleet import Fleet

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_SLACK = (0.0, 0.01, 0.03, 0.06, 0.1, 0.2, 0.35)
_FEWER_SLACK = (0.0, 0.03, 0.1)
_FEW = 60  # partitions of a chain up to which all of them are timed


@dataclass(frozen=True)
class Setting:
    """What is the same for all chains of a job."""

    fleet: Fleet
    footprint: Footprint
    layers: int
    p2p_ms: float
    max_in_flight: int | None
    schedule: Schedule


def stage_times(setting: Setting, chains: Ints, layers: Ints) -> tuple[Floats, Floats]:
    """Forward and backward time of every stage; `layers` [..., chain, stage]."""
    fleet = setting.fleet
    extra = ends_ms(setting, chains)
    return (
        layers * fleet.forward_ms[chains] + extra,
        layers * fleet.backward_ms[chains] + 2.0 * extra,
    )


def ends_ms(setting: Setting, chains: Ints) -> Floats:
    """Forward time of the embedding on the first stage and of the head on the last, else 0."""
    extra = np.zeros(chains.shape)
    extra[:, 0] += setting.fleet.embedding_ms[chains[:, 0]]
    extra[:, -1] += setting.fleet.head_ms[chains[:, -1]]
    return extra


def most_layers(setting: Setting, chains: Ints, microbatches: Ints) -> Ints:
    """Layers that fit into the memory of every stage."""
    stages = chains.shape[1]
    limit = np.array(most_in_flight(setting.schedule, stages, setting.max_in_flight))
    in_flight = np.minimum(limit, np.maximum(microbatches, 1)[:, None])
    most = setting.footprint.most_layers(setting.fleet.widest[chains], in_flight)
    return np.asarray(np.minimum(most, setting.layers - stages + 1))


def candidates(
    setting: Setting, chains: Ints, microbatches: Ints, *, few: bool = False
) -> tuple[Ints, Floats]:
    """Layer partitions [candidate, chain, stage] and their bounds [candidate, chain].

    For a bottleneck W every stage could take `(W - extra) / w` layers; the least W that places all
    layers is the exact optimum for many microbatches. A little more than it frees slow stages and
    shortens filling and draining. What is surplus goes from the slowest stages, or from the fullest
    ones. Infeasible chains have the bound inf. `few`: fewer candidates.
    """
    each = (setting.fleet.forward_ms + setting.fleet.backward_ms)[chains]
    extra = 3.0 * ends_ms(setting, chains)
    most = most_layers(setting, chains, microbatches)
    possible = (most.min(axis=1) >= 1) & (most.sum(axis=1) >= setting.layers)
    most = np.maximum(most, 1)
    least = _least_bottleneck(each, extra, most, setting.layers)
    slack = 1.0 + np.array(_FEWER_SLACK if few else _SLACK)
    room = _room(least * slack[:, None], each, extra, most)
    slow = _without_surplus(room, -each, setting.layers)
    full = _without_surplus(room[:1], -(room[0] * each + extra), setting.layers, one_each=True)
    layers = np.concatenate([slow[:1], full, slow[1:]])
    bounds = _bounds(setting, chains, layers, microbatches)
    return layers, np.asarray(np.where(possible, bounds, np.inf))


def _bounds(setting: Setting, chains: Ints, layers: Ints, microbatches: Ints) -> Floats:
    count, rows, stages = layers.shape
    forward, backward = stage_times(setting, chains, layers)
    bounds = in_flight_bound(
        forward.reshape(-1, stages),
        backward.reshape(-1, stages),
        np.tile(microbatches, count),
        p2p=setting.p2p_ms,
        max_in_flight=setting.max_in_flight,
        schedule=setting.schedule,
    )
    table: Floats = bounds.reshape(count, rows)
    table[layers.sum(axis=2) != setting.layers] = np.inf
    return table


def _least_bottleneck(each: Floats, extra: Floats, most: Ints, total: int) -> Floats:
    """What fractional layers cannot beat, and then one whole layer more after the other.

    A layer goes where it ends first; inf where memory cannot hold them all.
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
    """Layers that every stage can take, [..., chain, stage]."""
    fits = np.floor((bottleneck[..., None] - extra) / each + 1e-9)
    return np.maximum(np.minimum(fits, most), 1.0).astype(np.int64)


def _without_surplus(room: Ints, key: Floats, total: int, *, one_each: bool = False) -> Ints:
    """Takes layers away in the order of `key` (least first, later stages first) down to `total`.

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


def spans(setting: Setting, chains: Ints, layers: Ints, microbatches: Ints) -> Floats:
    """Exact spans of chains with these layers [chain, stage]."""
    forward, backward = stage_times(setting, chains, layers)
    return pipeline_spans(
        forward,
        backward,
        microbatches,
        p2p=setting.p2p_ms,
        max_in_flight=setting.max_in_flight,
        schedule=setting.schedule,
    )


def partition(setting: Setting, chains: Ints, microbatches: Ints) -> tuple[Ints, Floats]:
    """The candidate with the least bound for every chain, and that bound."""
    layers, bounds = candidates(setting, chains, microbatches)
    best = bounds.argmin(axis=0)
    rows = np.arange(len(chains))
    return layers[best, rows], bounds[best, rows]


def polish(
    setting: Setting, chains: Ints, layers: Ints, microbatches: Ints, *, rounds: int, tries: int = 4
) -> tuple[Ints, Floats]:
    """Moves single layers between stages as long as the exact span falls; layers and spans.

    First as long as the bound falls, which costs less to know. Then, of all moves of a chain the
    `tries` with the least bound are timed; a move whose bound is not below the present span cannot
    help.
    """
    if setting.schedule is Schedule.EAGER_1F1B:  # whose bound is close
        layers = _descended(setting, chains, layers, microbatches, rounds=rounds)
    layers = layers.copy()
    present = spans(setting, chains, layers, microbatches)
    active = np.arange(len(chains)) if chains.shape[1] > 1 else np.empty(0, np.int64)
    for _ in range(rounds):
        if not active.size:
            break
        rows, counts = chains[active], microbatches[active]
        moved, bounds = _moves(setting, rows, layers[active], counts)
        pick = np.argsort(bounds, axis=0, kind="stable")[:tries]
        take = np.arange(len(active))
        trial = np.maximum(moved[pick, take], 1)
        hopeful = bounds[pick, take] < present[active] * (1 - 1e-9)
        if not hopeful.any():
            break
        _, at = np.nonzero(hopeful)
        exact = np.full(hopeful.shape, np.inf)
        exact[hopeful] = spans(setting, rows[at], trial[hopeful], counts[at])
        choice = exact.argmin(axis=0)
        better = exact[choice, take] < present[active] * (1 - 1e-9)
        layers[active[better]] = trial[choice, take][better]
        present[active[better]] = exact[choice, take][better]
        active = active[better]
    return layers, present


def _descended(
    setting: Setting, chains: Ints, layers: Ints, microbatches: Ints, *, rounds: int
) -> Ints:
    """Layers after the moves of one layer after which the bound is least, as long as it falls."""
    layers = layers.copy()
    present = _bounds(setting, chains, layers[None], microbatches)[0]
    active = np.arange(len(chains)) if chains.shape[1] > 1 else np.empty(0, np.int64)
    for _ in range(rounds):
        if not active.size:
            break
        moved, bounds = _moves(setting, chains[active], layers[active], microbatches[active])
        choice, take = bounds.argmin(axis=0), np.arange(len(active))
        better = bounds[choice, take] < present[active] * (1 - 1e-9)
        layers[active[better]] = moved[choice, take][better]
        present[active[better]] = bounds[choice, take][better]
        active = active[better]
    return layers


def _moves(setting: Setting, chains: Ints, layers: Ints, microbatches: Ints) -> tuple[Ints, Floats]:
    """Layers after each move of a single one, and bounds, [move, chain]; inf where none may be."""
    moved = layers + _single_moves(chains.shape[1])[:, None, :]
    most = most_layers(setting, chains, microbatches)
    allowed = ((moved >= 1) & (moved <= most)).all(axis=2)
    bounds = _bounds(setting, chains, np.maximum(moved, 1), microbatches)
    return moved, np.where(allowed, bounds, np.inf)


def is_small(layers: int, stages: int) -> bool:
    """Whether all ways to spread the layers can be timed."""
    return comb(layers - 1, stages - 1) <= _FEW


def every_partition(setting: Setting, chains: Ints, microbatches: Ints) -> tuple[Ints, Floats]:
    """The best of all partitions of every chain by exact span, inf where none fits."""
    stages = chains.shape[1]
    cuts = combinations(range(1, setting.layers), stages - 1)
    edges = np.array([(0, *cut, setting.layers) for cut in cuts], np.int64)
    options = np.diff(edges.reshape(-1, stages + 1), axis=1)
    if not len(options):
        return np.ones_like(chains), np.full(len(chains), np.inf)
    most = most_layers(setting, chains, microbatches)
    fits = (options[:, None, :] <= most).all(axis=2)
    count = len(options)
    ends = spans(
        setting,
        np.tile(chains, (count, 1)),
        np.repeat(options, len(chains), axis=0),
        np.tile(microbatches, count),
    )
    ends = np.where(fits, ends.reshape(count, -1), np.inf)
    best = ends.argmin(axis=0)
    return options[best], ends[best, np.arange(len(chains))]


@cache
def _single_moves(stages: int) -> Ints:
    pairs = [(i, j) for i in range(stages) for j in range(stages) if i != j]
    steps = np.zeros((len(pairs), stages), np.int64)
    for row, (giver, taker) in enumerate(pairs):
        steps[row, giver], steps[row, taker] = -1, 1
    return steps
