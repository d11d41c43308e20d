"""Starts of a search: chains of TP groups that fit, and the optimum of small jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, islice, product
from math import comb, isinf

import numpy as np

from resihp.contracts import InfeasibleError, Job, Layout

from ..link_costs import ALL_LINKS_HEALTHY, LinkSlowdowns
from ..memory import MemoryFootprint, fits
from .chains import Chain
from .layer_partition import is_small
from .quotas import Arrangement, ChainEvaluator
from .tp_groups import GroupBuilder, Place, TPGroup, assign_ranks, share_units

_MAX_EVALUATIONS = 60_000  # pipelines to time


def initial_chains(
    job: Job,
    layout: Layout,
    speeds: Mapping[int, float],
    links: LinkSlowdowns = ALL_LINKS_HEALTHY,
    *,
    even: bool,
    folds: int,
    keep: bool = False,
    level: bool = False,
) -> tuple[list[TPGroup], list[Chain], Chain]:
    """All groups, the chains of the layout's replicas, and the groups without a replica.

    even   equal shares in every group
    keep   all living members in every group, with the shares of the layout where all of them live
    folds  number of times that the number of replicas is halved, if memory requires it
    level  as many groups in each replica then, whichever replicas they are of

    Raises `InfeasibleError` if no rank is alive.
    """
    replicas, joined = assign_ranks(job, layout, speeds)
    present = {s.ranks: s.shares for r in layout.replicas for s in r.stages} if keep else None
    units = share_units(job, layout)
    make = GroupBuilder(job, speeds, units, links, even=even, present=present)
    groups: list[TPGroup] = []

    def numbered(stages: Sequence[Place]) -> Chain:
        first = len(groups)
        made = [make(ranks, column) for column, ranks in stages]
        groups.extend(group for group in made if group is not None)
        return tuple(range(first, len(groups)))

    chains = [chain for chain in map(numbered, replicas) if chain]
    spare = numbered(joined)
    if not chains:
        raise InfeasibleError("ranks", "no replica has a living rank")
    if level and folds:
        return groups, _levelled(groups, chains, -(-len(chains) // 2**folds)), spare
    for _ in range(folds):
        chains = _folded(groups, chains)
    return groups, chains, spare


def _folded(groups: Sequence[TPGroup], chains: Sequence[Chain]) -> list[Chain]:
    """Half as many replicas, each with the groups of two, ordered by column."""
    half = (len(chains) + 1) // 2
    pairs = [
        (*chains[i], *(chains[i + half] if i + half < len(chains) else ())) for i in range(half)
    ]
    return [tuple(sorted(pair, key=lambda g: (groups[g].column, g))) for pair in pairs]


def _levelled(groups: Sequence[TPGroup], chains: Sequence[Chain], replicas: int) -> list[Chain]:
    """Groups of all chains, dealt to so many replicas, ordered by column."""
    dealt = sorted((g for chain in chains for g in chain), key=lambda g: (groups[g].column, g))
    return [tuple(dealt[index::replicas]) for index in range(replicas)]


def feasible_chains(
    evaluator: ChainEvaluator, chains: Sequence[Chain], *, shorter: bool = False
) -> tuple[list[Chain], list[int]]:
    """Chains that can hold all layers in memory, and the groups of the others.

    The fastest ones, if there are more of them than microbatches. Raises `InfeasibleError` if there
    is no such chain.

    shorter  leave the slowest groups out of a chain that cannot, as the first stages of a long
             pipeline hold more microbatches in flight
    """
    total, microbatches = evaluator.setting.layers, evaluator.setting.microbatches
    trimmed, left = [], []
    for chain in chains:
        kept = sorted(chain, key=lambda g: (-evaluator.speed((g,)), g))[:total]
        trimmed.append(tuple(g for g in chain if g in kept))
        left += [g for g in chain if g not in kept]
    held = trimmed
    while True:
        typical = max(1, microbatches // len(held))
        held = _shortened(evaluator, held, typical) if shorter else held
        fits = evaluator.fits(held, typical)
        if not any(fits):
            raise out_of_memory(evaluator, held[0], typical)
        if all(fits):
            break
        held = [chain for chain, fit in zip(held, fits, strict=True) if fit]
    if microbatches < len(held):
        fastest = set(sorted(held, key=evaluator.speed, reverse=True)[:microbatches])
        held = [chain for chain in held if chain in fastest]
    used = {group for chain in held for group in chain}
    left += [group for chain in trimmed for group in chain if group not in used]
    return held, left


def _shortened(
    evaluator: ChainEvaluator, chains: Sequence[Chain], microbatches: int
) -> list[Chain]:
    """Of every chain, the most of its fastest groups that can hold all layers, or else all."""
    parts: list[Chain] = []
    for chain in chains:
        fastest = sorted(chain, key=lambda g: (-evaluator.speed((g,)), g))
        for count in range(len(chain), 0, -1):
            kept = set(fastest[:count])
            parts.append(tuple(g for g in chain if g in kept))
    fits = iter(zip(parts, evaluator.fits(parts, microbatches), strict=True))
    options = ([part for part, fit in islice(fits, len(chain)) if fit] for chain in chains)
    return [(*found, chain)[0] for found, chain in zip(options, chains, strict=True)]


def out_of_memory(evaluator: ChainEvaluator, chain: Chain, microbatches: int) -> InfeasibleError:
    """Error that names the device with the least memory in a chain that cannot hold all layers."""
    setting = evaluator.setting
    most = [max(count, 0) for count in evaluator.most_layers(chain, microbatches)]
    group = setting.table.groups[chain[most.index(min(most))]]
    rank = group.ranks[group.shares.index(max(group.shares))]
    held = f"hold {sum(most)} of {setting.layers} layers"
    if sum(most) >= setting.layers and not min(most):
        held = "need a layer each"
    return InfeasibleError(
        "memory",
        f"the {len(chain)} stages of a replica {held}; rank {rank} has memory for {min(most)}",
    )


def exhaustive(evaluator: ChainEvaluator, replicas: int, *, least: int = 1) -> Arrangement | None:
    """Optimum over placements, idle groups, layers and quotas; None if there is none or the job is
    too large.

    Every group serves one of the replicas in its column, or none; a replica without groups is left
    out, unless that leaves fewer than `least`.
    """
    layers, microbatches = evaluator.setting.layers, evaluator.setting.microbatches
    columns = [
        [group for group, column in enumerate(evaluator.columns) if column == number]
        for number in sorted(set(evaluator.columns))
    ]
    if replicas > 2 or len(columns) > 4 or max(map(len, columns)) > replicas:
        return None
    chains = [
        tuple(g for g in choice if g is not None)
        for choice in product(*[(*column, None) for column in columns])
    ]
    chains = [chain for chain in chains if 0 < len(chain) <= layers]
    rows = sum(comb(layers - 1, len(chain) - 1) for chain in chains) * microbatches
    if rows > _MAX_EVALUATIONS or not all(is_small(layers, len(chain)) for chain in chains):
        return None
    counts = range(1, microbatches + 1)
    evaluator.prepare((chain, m) for chain in chains for m in counts)
    makespans = np.array([[evaluator.best(chain, m)[1] for m in counts] for chain in chains])
    best: Arrangement | None = None
    if least == 1:
        best = Arrangement.of(evaluator, (chains[makespans[:, -1].argmin()],), (microbatches,))
    both = combinations(range(len(chains)), 2)
    pairs = [(a, b) for a, b in both if not set(chains[a]) & set(chains[b])]
    if replicas == 2 and microbatches > 1 and pairs:
        first, second = np.array(pairs).T
        # [pair, quota of the first - 1]; the second replica runs the rest
        ends = np.maximum(makespans[first, :-1], makespans[second, -2::-1])
        row, column = map(int, np.unravel_index(int(ends.argmin()), ends.shape))
        two = chains[first[row]], chains[second[row]]
        option = Arrangement.of(evaluator, two, (column + 1, microbatches - column - 1))
        best = option if best is None or option.makespan_ms < best.makespan_ms else best
    return None if best is None or isinf(best.makespan_ms) else best


def within_memory(job: Job, found: Arrangement) -> Arrangement | None:
    """Arrangement with the memory of as many replicas as it has; None if it does not fit then."""
    setting = found.evaluator.setting
    footprint = MemoryFootprint.of(job, len(found.chains))
    if footprint == setting.footprint:
        return found
    if not fits(job, found.layout, found.quotas, setting.schedule):
        return None
    return replace(found, evaluator=ChainEvaluator(replace(setting, footprint=footprint)))
