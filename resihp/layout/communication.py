"""What crosses from stage to stage, and which microbatches a replica computes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from resihp.contracts import Layout, Stage

from .parameters import Param, Parameters, Range, refine


@dataclass(frozen=True)
class ActivationTransfer:
    """One chunk of a boundary activation between two stages: token rows cut in `chunks` parts."""

    chunk: int
    source: int
    target: int


def boundary_transfers(sender: Stage, receiver: Stage) -> tuple[ActivationTransfer, ...]:
    """How an activation crosses between stages of unequal tensor-parallel degree.

    Every sender holds all of it and every receiver needs all of it: it is scattered into as many
    chunks as the larger degree, sent in parallel and gathered inside the receiver (ResiHP, arXiv
    2605.06374).
    """
    chunks = max(sender.tp, receiver.tp)
    return tuple(
        ActivationTransfer(
            chunk,
            sender.ranks[chunk * sender.tp // chunks],
            receiver.ranks[chunk * receiver.tp // chunks],
        )
        for chunk in range(chunks)
    )


def microbatch_ranges(layout: Layout, quotas: Sequence[int]) -> Mapping[int, range]:
    """The microbatches of a step (indices over all replicas) that each replica computes."""
    edges = [0]
    for quota in quotas:
        edges.append(edges[-1] + quota)
    return {index: range(*pair) for index, pair in enumerate(pairwise(edges[: layout.dp + 1]))}


@dataclass(frozen=True)
class GradientReduction:
    """Gradient ranges that one set of ranks, one for each copy of them, sums among themselves."""

    ranks: tuple[int, ...]
    pieces: tuple[tuple[Param, Range], ...]


def gradient_reductions(layout: Layout, parameters: Parameters) -> tuple[GradientReduction, ...]:
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
    return tuple(
        GradientReduction(ranks, tuple(pieces)) for ranks, pieces in sorted(by_ranks.items())
    )
