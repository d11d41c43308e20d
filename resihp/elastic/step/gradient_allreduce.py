"""Sum of one step's gradients over replicas of any layouts, out of place.

The local sums stay as they are until the step is complete everywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from resihp.layout import GradientReduction, Param, Range

from ..microbatches.ledger import Spans, indices
from ..microbatches.tree_sum import nodes
from ..process_groups.abortable import AbortableProcessGroup
from ..process_groups.bucketed_allreduce import BucketedAllReduce, GradientSlice
from ..process_groups.layout_groups import LayoutGroups
from ..process_groups.tree_allreduce import tree_allreduce
from .gradient_accumulation import Gradients, GradientSum
from .shard import Shard, rows

Piece = tuple[Param, Range]


class GradientAllReduce(Protocol):
    """One attempt to sum the gradients of one step over the replicas."""

    def during_last_pass(self, params: Collection[Param]) -> AbstractContextManager[None]:
        """Overlap the exchange with the enclosed pass, the last of the step.

        It adds to `params`; all other gradients are complete.
        """
        ...

    def finish(self) -> Gradients:
        """Return the whole gradients. Raises `PeerLostError`; the local sums stay as they were."""
        ...


class OverlappedAllReduce:
    """All-reduce of buckets in the order in which backward completes them."""

    def __init__(
        self, shard: Shard, groups: LayoutGroups, sums: GradientSum, *, bucket_bytes: int
    ) -> None:
        self._shard, self._groups, self._sums = shard, groups, sums
        self._pieces: dict[GradientSlice, Piece] = {}
        self._buckets = BucketedAllReduce(
            [(group, self._slices(reduction)) for reduction, group in groups.sums], bucket_bytes
        )

    def during_last_pass(self, params: Collection[Param]) -> AbstractContextManager[None]:
        """Start each bucket when backward has completed its last gradient."""
        return self._buckets.overlapped([self._shard.tensors[param] for param in params])

    def finish(self) -> Gradients:
        """Return the whole gradients."""
        local, total = self._sums.whole(), Gradients()
        for one, summed in self._buckets.finish():
            unpack(self._shard, [self._pieces[one]], summed.reshape(-1), total)
        return completed(self._shard, self._groups, total, local)

    def _slices(self, reduction: GradientReduction) -> list[GradientSlice]:
        """Slices of the shard's gradients, in the order of the model backward."""
        slices = []
        for param, (start, stop) in reduction.pieces[::-1]:
            origin = self._shard.ranges[param][0]
            tensor, dim = self._shard.tensors[param], param.dim or 0
            slices.append(GradientSlice(tensor, dim, start - origin, stop - start))
            self._pieces[slices[-1]] = (param, (start, stop))
        return slices


class DeterministicAllReduce:
    """Sum in the fixed order of `tree_sum`, started when backward has ended.

    finished  by replica: the microbatches in its sums
    """

    def __init__(
        self,
        shard: Shard,
        groups: LayoutGroups,
        sums: GradientSum,
        finished: Sequence[Spans],
        microbatches: int,
    ) -> None:
        self._shard, self._groups, self._sums, self._leaves = shard, groups, sums, microbatches
        self._nodes = [nodes(indices(some), microbatches) for some in finished]

    def during_last_pass(self, params: Collection[Param]) -> AbstractContextManager[None]:
        """Overlap nothing: a node is complete only when its last microbatch is."""
        return nullcontext()

    def finish(self) -> Gradients:
        """Return the whole gradients."""
        total = Gradients()
        for reduction, group in self._groups.sums:
            unpack(self._shard, reduction.pieces, self._sum(reduction, group), total)
        local = self._sums.whole() if self._groups.layout.dp == 1 else {}
        return completed(self._shard, self._groups, total, local)

    def _sum(self, reduction: GradientReduction, group: AbortableProcessGroup) -> torch.Tensor:
        """Return the sum of the pieces of one group, flat."""
        pieces = reduction.pieces
        flats = [
            torch.cat([view.reshape(-1) for view in self._views(pieces, gradients)])
            for _, gradients in self._sums.parts()
        ]
        size = sum((stop - start) * param.row_numel for param, (start, stop) in pieces)
        places = [self._groups.layout.place_of(rank) for rank in group.ranks]
        nodes_of = [self._nodes[place.dp] for place in places if place is not None]
        index = group.ranks.index(self._groups.place.rank)
        return tree_allreduce(group, index, flats, size, nodes_of, self._leaves)

    def _views(self, pieces: Iterable[Piece], gradients: Gradients) -> Iterator[torch.Tensor]:
        for param, span in pieces:
            yield rows(gradients[param], param, span, origin=self._shard.ranges[param][0])


def unpack(shard: Shard, pieces: Iterable[Piece], flat: torch.Tensor, total: Gradients) -> None:
    """Put the pieces in `flat` into `total`; a piece that is all of a shard becomes a view."""
    offset = 0
    for param, span in pieces:
        shape = list(shard.tensors[param].shape)
        shape[param.dim or 0] = span[1] - span[0]
        count = (span[1] - span[0]) * param.row_numel
        part = flat[offset : offset + count].view(shape)
        offset += count
        if span == shard.ranges[param]:
            total[param] = part
            continue
        if param not in total:
            total[param] = torch.empty_like(shard.tensors[param])
        rows(total[param], param, span, origin=shard.ranges[param][0]).copy_(part)


def completed(shard: Shard, groups: LayoutGroups, total: Gradients, local: Gradients) -> Gradients:
    """Return `total` with what needs no sum: in a single replica, all but tied parameters."""
    if groups.layout.dp > 1:
        _share_unsplit(shard, groups, total)
    empty = {p: torch.zeros_like(t) for p, t in shard.tensors.items() if t.numel() == 0}
    return empty | local | total


def _share_unsplit(shard: Shard, groups: LayoutGroups, total: Gradients) -> None:
    """Broadcast the sums of unsplit parameters from the stage's first rank: equal to the bit."""
    unsplit = {param: tensor for param, tensor in shard.tensors.items() if param.dim is None}
    if len(groups.tp) == 1 or not unsplit:
        return
    held = [total.get(param, torch.zeros_like(tensor)) for param, tensor in unsplit.items()]
    flat = torch.cat([tensor.reshape(-1) for tensor in held])
    groups.tp.broadcast(flat, groups.stage.ranks[0])
    parts = flat.split([tensor.numel() for tensor in held])
    for (param, tensor), part in zip(unsplit.items(), parts, strict=True):
        total[param] = part.view_as(tensor)
