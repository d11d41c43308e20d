"""How copies of a parameter sum their gradients."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from resihp.contracts import Layout

from .parameters import Param, Parameters, Range
from .ranges import refine


@dataclass(frozen=True)
class Reduction:
    """Gradient ranges that one set of ranks, one for each copy of them, sums among themselves."""

    ranks: tuple[int, ...]
    pieces: tuple[tuple[Param, Range], ...]


def reductions(layout: Layout, parameters: Parameters) -> tuple[Reduction, ...]:
    """How copies whose shards differ sum their gradients: over the common refinement.

    A replica holds one copy of a parameter, two of a tied one whose stages differ. Parameters
    that are not split are summed by the first rank of each stage alone; the ranks beside it take
    the sum from there, so that all of them hold the same bits. Sorted by ranks, the order in
    which every rank has to start them.
    """
    by_ranks: dict[tuple[int, ...], list[tuple[Param, Range]]] = defaultdict(list)
    copies: dict[Param, list[list[tuple[Range, int]]]] = defaultdict(list)
    for replica in layout.replicas:
        for place, stage in enumerate(replica.stages):
            for param in parameters.of_stage(replica, place):
                spans = list(zip(param.ranges(stage.shares), stage.ranks, strict=True))
                copies[param].append(spans[: 1 if param.dim is None else None])
    for param, held in copies.items():
        for span in refine((0, param.size), (r for places in held for r, _ in places)):
            owners = tuple(
                next(rank for r, rank in places if r[0] <= span[0] and span[1] <= r[1])
                for places in held
            )
            by_ranks[owners].append((param, span))
    return tuple(Reduction(ranks, tuple(pieces)) for ranks, pieces in sorted(by_ranks.items()))
