"""Communication of one step: activations between stages, gradient sums between replicas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from resihp.contracts import Layout, Stage

from .parameters import Param, Parameters, Range, refine


@dataclass(frozen=True)
class ActivationTransfer:
    """One chunk of a boundary activation: token rows `chunk` of as many chunks as transfers."""

    chunk: int
    source: int
    target: int


def transfer_pairs(senders: Sequence[int], receivers: Sequence[int]) -> list[tuple[int, int]]:
    """Sender and receiver of each chunk of an activation between two groups; see
    `boundary_transfers`. The pairs of the way back are the same.

    >>> transfer_pairs((0, 1, 2, 3), (4, 5))
    [(0, 4), (1, 4), (2, 5), (3, 5)]
    """
    chunks = max(len(senders), len(receivers))
    return [
        (senders[chunk * len(senders) // chunks], receivers[chunk * len(receivers) // chunks])
        for chunk in range(chunks)
    ]


def boundary_transfers(sender: Stage, receiver: Stage) -> tuple[ActivationTransfer, ...]:
    """Transfers of one activation between stages of any tensor-parallel degrees.

    All ranks of the sender hold the whole activation and all ranks of the receiver need it: it is
    cut into as many chunks as the larger degree, sent in parallel and gathered inside the receiver
    (ResiHP, arXiv 2605.06374).
    """
    pairs = transfer_pairs(sender.ranks, receiver.ranks)
    return tuple(ActivationTransfer(chunk, *pair) for chunk, pair in enumerate(pairs))


def microbatch_ranges(layout: Layout, quotas: Sequence[int]) -> Mapping[int, range]:
    """Microbatch indices of a step (over all replicas) by the replica that computes them."""
    edges = [0]
    for quota in quotas:
        edges.append(edges[-1] + quota)
    return {index: range(*pair) for index, pair in enumerate(pairwise(edges[: layout.dp + 1]))}


@dataclass(frozen=True)
class GradientReduction:
    """Gradient ranges summed among a set of ranks, of which each holds one copy."""

    ranks: tuple[int, ...]
    pieces: tuple[tuple[Param, Range], ...]


def gradient_reductions(layout: Layout, parameters: Parameters) -> tuple[GradientReduction, ...]:
    """Gradient sums over copies with different shards, on the common refinement of their ranges.

    A replica holds one copy of a parameter, or two of a tied one whose stages differ. A parameter
    without a split dimension is summed by the first rank of each stage, which then broadcasts the
    sum within the stage, so that all ranks hold the same bits. Sorted by ranks: the order in which
    every rank has to start the reductions.
    """
    by_ranks: dict[tuple[int, ...], list[tuple[Param, Range]]] = defaultdict(list)
    copies: dict[Param, list[list[tuple[Range, int]]]] = defaultdict(list)
    for replica in layout.replicas:
        for index, stage in enumerate(replica.stages):
            for param in parameters.of_stage(replica, index):
                shards = list(zip(param.ranges(stage.shares), stage.ranks, strict=True))
                copies[param].append(shards[: 1 if param.dim is None else None])
    for param, held in copies.items():
        for piece in refine((0, param.size), (r for shards in held for r, _ in shards)):
            owners = tuple(
                next(rank for r, rank in shards if r[0] <= piece[0] and piece[1] <= r[1])
                for shards in held
            )
            by_ranks[owners].append((param, piece))
    return tuple(
        GradientReduction(ranks, tuple(pieces)) for ranks, pieces in sorted(by_ranks.items())
    )
