"""Exhaustive search over small jobs: one or two replicas of up to four stages."""

from __future__ import annotations

from itertools import product
from math import comb

import numpy as np

from .arrangements import Arrangement
from .chains import Chain
from .layer_partition import is_small
from .quotas import ChainEvaluator, WorkDivision

_MAX_EVALUATIONS = 60_000  # pipelines to time


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
