"""The sum over replicas in the fixed order of `tree`: the same bits whoever computed what."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from resihp.layout import GradientReduction as Summed
from resihp.layout import Param

from ..instep.ledger import Spans, indices
from ..instep.ordered_sum import sum_in_order
from ..instep.tree import nodes
from ..worlds.comm import Group
from ..worlds.world import World
from .reduction import completed, piece_views, unpack
from .shard import Shard
from .sums import Gradients, Sums


class OrderedReduction:
    """Sums node by node with `sum_in_order`; it starts only when backward has ended.

    `held` tells for each replica which microbatches its sums hold.
    """

    def __init__(
        self, shard: Shard, world: World, sums: Sums, held: Sequence[Spans], microbatches: int
    ) -> None:
        self._shard, self._world, self._sums, self._leaves = shard, world, sums, microbatches
        self._nodes = [nodes(indices(finished), microbatches) for finished in held]

    def during_last_pass(self, params: Collection[Param]) -> AbstractContextManager[None]:
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
        nodes_of = [self._nodes[self._replica(rank)] for rank in group.ranks]
        index = group.ranks.index(self._world.place.rank)
        return sum_in_order(group, index, flats, size, nodes_of, self._leaves)

    def _replica(self, rank: int) -> int:
        place = self._world.layout.place_of(rank)
        assert place is not None, "only ranks of the layout sum"
        return place.dp
