"""Layout of a job from the groups that each of its ranks belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from resihp.contracts import Layout, Replica, Stage


@dataclass(frozen=True)
class RankDescription:
    """Coordinates that one rank knows of itself.

    tensor    ranks of its tensor-parallel group, in order
    pipeline  ranks of its pipeline in the order of their stages; () without a pipeline
    stages    number of all stages of the pipeline; chunks: those that this rank holds
    members   ranks that train the model, in order; () for all that there are, None where that is
              not known, and all are taken for members
    """

    rank: int
    tensor: tuple[int, ...]
    pipeline: tuple[int, ...] = ()
    stages: int = 1
    chunks: int = 1
    members: tuple[int, ...] | None = ()

    @property
    def is_alone(self) -> bool:
        """True if the rank holds a whole replica."""
        return len(self.tensor) == 1 and len(self.pipeline) <= 1


def layout_of(ranks: Sequence[RankDescription]) -> Layout:
    """Return the layout that all ranks' descriptions make up.

    A model is as many layers as it has chunks of stages: their real number is not known. Ranks that
    no complete replica holds are replicas of their own.
    """
    by_rank = {one.rank: one for one in ranks}
    replicas: list[Replica] = []
    placed: set[int] = set()
    depth = max(one.stages for one in ranks)
    for one in sorted(ranks, key=lambda one: one.rank):
        if one.rank in placed:
            continue
        pipeline = one.pipeline or (one.rank,)
        groups = [by_rank[rank].tensor for rank in pipeline if rank in by_rank]
        members = {rank for group in groups for rank in group}
        if len(groups) < len(pipeline) or members & placed or members - by_rank.keys():
            groups, members = [(one.rank,)], {one.rank}
        placed |= members
        replicas.append(_replica(groups, depth))
    return Layout(tuple(replicas))


def _replica(groups: Sequence[tuple[int, ...]], layers: int) -> Replica:
    """Replica of `groups`, one a stage, with the layers spread over them chunk by chunk."""
    depth = len(groups)
    chunks = max(1, layers // depth) if depth > 1 else 1
    if depth == 1:
        return Replica((Stage(groups[0], (0, layers)),))
    return Replica(
        tuple(
            Stage(
                group,
                (at, at + 1),
                more_layers=tuple((at + c * depth, at + c * depth + 1) for c in range(1, chunks)),
            )
            for at, group in enumerate(groups)
        )
    )
