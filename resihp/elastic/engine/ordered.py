"""The sum over replicas in the fixed order of `tree`: the same bits whoever computed what."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from resihp.layout import Reduction as Summed

from ..instep.ledger import Spans, indices
from ..instep.tree import Node, nodes, put
from ..worlds.comm import Group
from ..worlds.world import World
from .reduction import completed, piece_views, unpack
from .shard import Shard
from .sums import Gradients, Sums


class OrderedReduction:
    """Every rank of a group adds up one slice of all nodes in tree order; then slices are shared.

    Moves as many bytes as a ring all-reduce where each replica holds one node, and for k nodes
    (k + 1) / 2 times as many; and it starts only when backward has ended.

    `held` tells for each replica which microbatches its sums hold.
    """

    def __init__(
        self, shard: Shard, world: World, sums: Sums, held: Sequence[Spans], microbatches: int
    ) -> None:
        self._shard, self._world, self._sums, self._leaves = shard, world, sums, microbatches
        self._nodes = [nodes(indices(finished), microbatches) for finished in held]

    def during_last_pass(self) -> AbstractContextManager[None]:
        """Nothing can be sent ahead: a node is whole only when its last microbatch is."""
        return nullcontext()

    def finish(self) -> Gradients:
        """Exchange and add up."""
        total: Gradients = {}
        for summed, group in self._world.sums:
            unpack(self._shard, summed.pieces, self._sum(summed, group), total)
        local = self._sums.whole() if self._world.layout.dp == 1 else {}
        return completed(self._shard, self._world, total, local)

    def _sum(self, summed: Summed, group: Group) -> torch.Tensor:
        """The whole sum of the pieces of one group, flat."""
        flats = [
            torch.cat([v.reshape(-1) for v in piece_views(self._shard, summed.pieces, gradients)])
            for _, gradients in self._sums.parts()
        ]
        size = sum((stop - start) * param.row_numel for param, (start, stop) in summed.pieces)
        width = -(-size // len(group))
        slices = [range(i * width, min((i + 1) * width, size)) for i in range(len(group))]
        sent = [flat[part.start : part.stop] for part in slices for flat in flats]
        mine = len(slices[group.ranks.index(self._world.place.rank)])
        nodes_of_ranks = [self._nodes[self._replica(rank)] for rank in group.ranks]
        received = torch.empty(mine * sum(map(len, nodes_of_ranks)))
        group.all_to_all(
            received,
            torch.cat(sent) if sent else torch.empty(0),
            [mine * len(held) for held in nodes_of_ranks],
            [len(part) * len(flats) for part in slices],
        )
        own = torch.zeros(width)
        order = [node for held in nodes_of_ranks for node in held]
        own[:mine] = self._added(order, received.split(mine)) if mine else torch.empty(0)
        return torch.cat(group.all_gather(own))[:size]

    def _added(self, order: Sequence[Node], parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Node sums of one slice, rank after rank, added up along the tree."""
        by_node: dict[Node, torch.Tensor] = {}
        for node, part in zip(order, parts, strict=True):
            # The two copies of a tied parameter hold different parts of the same microbatches.
            by_node[node] = by_node[node].add_(part) if node in by_node else part
        held: dict[Node, torch.Tensor] = {}
        for node, part in by_node.items():
            put(held, node, part, self._leaves, torch.Tensor.add_)
        return held[0, self._leaves]

    def _replica(self, rank: int) -> int:
        place = self._world.layout.place_of(rank)
        assert place is not None, "only ranks of the layout sum"
        return place.dp
