"""Arrangements of TP groups into chains: starts of a search, and the optimum of small jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import comb

import numpy as np

from resihp.contracts import InfeasibleError, Job, Layout, Replica, Stage

from .chains import Chain
from .layer_partition import is_small
from .plan_bounds import chains_bound, quick_bound
from .quotas import ChainEvaluator, WorkDivision
from .tp_groups import GroupBuilder, TPGroup, assign_ranks, share_units

_MAX_EVALUATIONS = 60_000  # pipelines to time


@dataclass(frozen=True)
class Arrangement:
    """Chains of groups with their layers and quotas."""

    evaluator: ChainEvaluator
    chains: tuple[Chain, ...]
    division: WorkDivision

    @property
    def layout(self) -> Layout:
        """Layout with the ranks, layers and shares of every stage."""
        groups = self.evaluator.setting.table.groups
        replicas = []
        for chain, layers in zip(self.chains, self.division.layers, strict=True):
            stages, start = [], 0
            for group, count in zip(chain, layers, strict=True):
                held = groups[group]
                stages.append(Stage(held.ranks, (start, start + count), held.shares))
                start += count
            replicas.append(Replica(tuple(stages)))
        return Layout(tuple(replicas))

    @cached_property
    def bound_ms(self) -> float:
        """Certified lower bound; see `chains_bound`."""
        division = self.division
        return chains_bound(
            self.evaluator.proven, self.chains, division.quotas, division.makespan_ms
        )

    @property
    def gap(self) -> float:
        """Distance of the makespan from its bound, as a fraction of the bound."""
        return self.division.makespan_ms / self.bound_ms - 1.0

    @cached_property
    def slack(self) -> float:
        """Largest possible gain with fractional layers, as a fraction of the step."""
        quick = quick_bound(self.evaluator.setting, self.chains, self.division.quotas)
        return self.division.makespan_ms / quick - 1.0


def initial_chains(
    job: Job, layout: Layout, speeds: Mapping[int, float], *, even: bool, folds: int
) -> tuple[list[TPGroup], list[Chain], list[int]]:
    """All groups, the chains of the layout's replicas, and the groups without a replica.

    even   equal shares in every group
    folds  number of times that the number of replicas is halved, if memory requires it

    Raises `InfeasibleError` if no rank is alive.
    """
    assignment = assign_ranks(job, layout, speeds)
    make = GroupBuilder(job, speeds, share_units(job, layout), even=even)
    groups: list[TPGroup] = []

    def numbered(stages: Sequence[tuple[int, tuple[int, ...]]]) -> list[int]:
        first = len(groups)
        made = [make(ranks, column) for column, ranks in stages]
        groups.extend(group for group in made if group is not None)
        return list(range(first, len(groups)))

    chains = [tuple(numbered(replica)) for replica in assignment.replicas]
    spare = numbered(assignment.spare)
    chains = [chain for chain in chains if chain]
    if not chains:
        raise InfeasibleError("ranks", "no replica has a living rank")
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


def feasible_chains(
    evaluator: ChainEvaluator, chains: Sequence[Chain], microbatches: int
) -> tuple[list[Chain], list[int]]:
    """Chains that can hold all layers in memory, and the groups of the others.

    Raises `InfeasibleError` if there is no such chain, or more of them than microbatches.
    """
    total = evaluator.setting.layers
    trimmed, left = [], []
    for chain in chains:
        kept = sorted(chain, key=lambda g: (-evaluator.speed((g,)), g))[:total]
        trimmed.append(tuple(g for g in chain if g in kept))
        left += [g for g in chain if g not in kept]
    held = _chains_in_memory(evaluator, trimmed, microbatches)
    for chain in trimmed:
        left += [] if chain in held else list(chain)
    if microbatches < len(held):
        raise InfeasibleError(
            "microbatches", f"microbatches ({microbatches}) are fewer than replicas ({len(held)})"
        )
    return held, left


def _chains_in_memory(
    evaluator: ChainEvaluator, chains: Sequence[Chain], microbatches: int
) -> list[Chain]:
    """Chains that fit into memory with the microbatches that each of them would run."""
    held = list(chains)
    while True:
        typical = max(1, microbatches // len(held))
        fits = evaluator.fits(held, typical)
        if not any(fits):
            raise out_of_memory(evaluator, held[0], typical)
        if all(fits):
            return held
        held = [chain for chain, fit in zip(held, fits, strict=True) if fit]


def out_of_memory(evaluator: ChainEvaluator, chain: Chain, microbatches: int) -> InfeasibleError:
    """Error that names the device with the least memory in a chain that cannot hold all layers."""
    setting = evaluator.setting
    most = [max(count, 0) for count in evaluator.most_layers(chain, microbatches)]
    group = setting.table.groups[chain[most.index(min(most))]]
    rank = group.ranks[group.shares.index(max(group.shares))]
    return InfeasibleError(
        "memory",
        f"the {len(chain)} stages of a replica hold {sum(most)} of {setting.layers} layers; "
        f"rank {rank} has memory for {min(most)}",
    )


def exhaustive(evaluator: ChainEvaluator, replicas: int, microbatches: int) -> Arrangement | None:
    """Optimum over placements, idle groups, layers and quotas; None if the job is too large.

    Every group serves one of the replicas in its column, or none; a replica without groups is left
    out.
    """
    columns = _columns(evaluator)
    if replicas > 2 or len(columns) > 4 or max(map(len, columns)) > replicas:
        return None
    layers = evaluator.setting.layers
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
    one = int(makespans[:, -1].argmin())
    best: Arrangement | None = _arrangement(evaluator, (chains[one],), (microbatches,))
    if replicas == 2 and microbatches > 1:
        pair = _best_pair(evaluator, chains, makespans)
        if pair and best and pair.division.makespan_ms < best.division.makespan_ms:
            best = pair
    return best


def _columns(evaluator: ChainEvaluator) -> list[list[int]]:
    groups = evaluator.setting.table.groups
    numbers = sorted({group.column for group in groups})
    return [[i for i, g in enumerate(groups) if g.column == number] for number in numbers]


def _best_pair(
    evaluator: ChainEvaluator, chains: list[Chain], makespans: np.ndarray
) -> Arrangement | None:
    pairs = [
        (a, b)
        for a in range(len(chains))
        for b in range(a + 1, len(chains))
        if not set(chains[a]) & set(chains[b])
    ]
    if not pairs:
        return None
    first, second = np.array(pairs).T
    # [pair, quota of the first - 1]; the second replica runs the rest
    ends = np.maximum(makespans[first, :-1], makespans[second, -2::-1])
    row, column = np.unravel_index(int(ends.argmin()), ends.shape)
    total = makespans.shape[1]
    members = (chains[first[row]], chains[second[row]])
    return _arrangement(evaluator, members, (int(column) + 1, total - int(column) - 1))


def _arrangement(
    evaluator: ChainEvaluator, chains: tuple[Chain, ...], quotas: tuple[int, ...]
) -> Arrangement:
    parts = [evaluator.best(chain, quota) for chain, quota in zip(chains, quotas, strict=True)]
    division = WorkDivision(
        max(end for _, end in parts), tuple(layers for layers, _ in parts), quotas
    )
    return Arrangement(evaluator, chains, division)
