"""What crosses from stage to stage, and which microbatches a replica computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from resihp.contracts import Layout, Stage


@dataclass(frozen=True)
class Transfer:
    """One chunk of a boundary activation between two stages: token rows cut in `chunks` parts."""

    chunk: int
    source: int
    target: int


def boundary(sender: Stage, receiver: Stage) -> tuple[Transfer, ...]:
    """How an activation crosses between stages of unequal tensor-parallel degree.

    Every sender holds all of it and every receiver needs all of it: it is scattered into as many
    chunks as the larger degree, sent in parallel and gathered inside the receiver (ResiHP, arXiv
    2605.06374).
    """
    chunks = max(sender.tp, receiver.tp)
    return tuple(
        Transfer(
            chunk,
            sender.ranks[chunk * sender.tp // chunks],
            receiver.ranks[chunk * receiver.tp // chunks],
        )
        for chunk in range(chunks)
    )


def replica_of(layout: Layout, quotas: Sequence[int]) -> Mapping[int, range]:
    """The microbatches of a step (indices over all replicas) that each replica computes."""
    edges = [0]
    for quota in quotas:
        edges.append(edges[-1] + quota)
    return {index: range(*pair) for index, pair in enumerate(pairwise(edges[: layout.dp + 1]))}
