"""Sum of one step's gradients over replicas of any layouts, out of place; their norm; clipping.

The local sums stay as they are until the step is complete everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain

import torch

from resihp.layout import GradientReduction, Param, Parameters, Range, StateRange, containing

from ..microbatches.ledger import Spans, indices
from ..microbatches.tree_sum import nodes
from ..process_groups.abortable import AbortableProcessGroup
from ..process_groups.bucketed_allreduce import BucketedAllReduce, GradientSlice
from ..process_groups.layout_groups import LayoutGroups, StateShards
from ..process_groups.tree_allreduce import tree_allreduce
from .gradient_accumulation import Gradients, GradientSum
from .shard import Shard, rows

Piece = tuple[Param, Range]

SummedGradients = dict[StateRange, torch.Tensor]
"""Gradients summed over replicas, of the rows whose optimizer state a rank holds."""

_NORM_PART = 8 << 20  # elements: 64 MiB in float64


class GradientAllReduce:
    """One attempt to sum the gradients of one step over the replicas.

    Buckets are exchanged in the order in which backward completes them.
    """

    def __init__(
        self, shard: Shard, groups: LayoutGroups, sums: GradientSum, bucket_bytes: int
    ) -> None:
        self._shard, self._groups, self._sums = shard, groups, sums
        self._pieces: dict[GradientSlice, Piece] = {}
        self._summed: dict[Param, list[GradientSlice]] = {}
        self._given = SummedGradients()
        self._buckets = BucketedAllReduce(
            [(group, self._slices(reduction)) for reduction, group in groups.sums], bucket_bytes
        )

    @contextmanager
    def during_last_pass(self, params: Collection[Param]) -> Iterator[None]:
        """Overlap the exchange with the enclosed pass, the last of the step.

        It adds to `params`; all other gradients are complete.
        """
        is_alone = self._groups.layout.dp == 1
        with (
            self._buckets.overlapped([self._shard.tensors[param] for param in params]),
            self._sums.completing(params) if is_alone else nullcontext(),
        ):
            yield

    def start(self) -> None:
        """Start what has not been started, without waiting."""
        self._buckets.start()

    def discard(self) -> None:
        """Wait for what was started, as all ranks do, and use none of it."""
        for _ in self._buckets.finish():
            pass

    def sum_of(self, held: StateRange) -> torch.Tensor | None:
        """Return the whole gradient of some rows if it is there by now, to be kept by this object.

        One thread may call it, any one.
        """
        param, _ = held
        if held in self._given:
            return self._given[held]
        if param not in self._summed:
            return self._sums.complete_sum(param) if self._groups.layout.dp == 1 else None
        if self._is_shared(param):
            return None
        total = Gradients()
        for one in self._summed[param]:
            summed = self._buckets.sum_of(one)
            if summed is None:
                return None
            self._unpack([self._pieces[one]], summed.reshape(-1), total)
        return self._given.setdefault(held, rows_of(total, self._shard, held))

    def finish(self) -> SummedGradients:
        """Return the whole gradients. Raises `PeerLostError`; the local sums stay as they were."""
        whole = self._whole()
        given = self._given.copy()  # another thread may be adding to it
        return {held: rows_of(whole, self._shard, held) for held in self._shard.slices} | given

    def _whole(self) -> Gradients:
        """Return the whole gradients of all parameters held."""
        total = Gradients()
        for pieces, flat in self._exchange():
            self._unpack(pieces, flat, total)
        tensors = self._shard.tensors
        if self._groups.layout.dp > 1:
            self._share_unsplit(total)
            return {p: torch.zeros_like(t) for p, t in tensors.items() if not t.numel()} | total
        return self._sums.whole() | total  # in a single replica, only tied parameters are summed

    def _exchange(self) -> Iterator[tuple[Sequence[Piece], torch.Tensor]]:
        """Yield pieces with their flat sums over the replicas."""
        for one, summed in self._buckets.finish():
            yield [self._pieces[one]], summed.reshape(-1)

    def _slices(self, reduction: GradientReduction) -> list[GradientSlice]:
        """Slices of the shard's gradients, in the order of the model backward."""
        slices = []
        for param, (start, stop) in reduction.pieces[::-1]:
            origin = self._shard.ranges[param][0]
            tensor, dim = self._shard.tensors[param], param.dim or 0
            slices.append(GradientSlice(tensor, dim, start - origin, stop - start))
            self._pieces[slices[-1]] = (param, (start, stop))
            self._summed.setdefault(param, []).append(slices[-1])
        return slices

    def _unpack(self, pieces: Sequence[Piece], flat: torch.Tensor, total: Gradients) -> None:
        """Put the pieces in `flat` into `total`; a piece that is all of a shard becomes a view."""
        shard, offset = self._shard, 0
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

    def _is_shared(self, param: Param) -> bool:
        """Return whether the sum over replicas comes from the first rank of the stage."""
        groups = self._groups
        return param.dim is None and groups.layout.dp > 1 and len(groups.tp) > 1

    def _share_unsplit(self, total: Gradients) -> None:
        """Broadcast the sums of unsplit parameters from the first rank: equal to the bit."""
        groups = self._groups
        unsplit = {param: t for param, t in self._shard.tensors.items() if self._is_shared(param)}
        if not unsplit:
            return
        held = [total.get(param, torch.zeros_like(tensor)) for param, tensor in unsplit.items()]
        flat = torch.cat([tensor.reshape(-1) for tensor in held])
        groups.tp.broadcast(flat, groups.stage.ranks[0])
        parts = flat.split([tensor.numel() for tensor in held])
        for (param, tensor), part in zip(unsplit.items(), parts, strict=True):
            total[param] = part.view_as(tensor)


class DeterministicAllReduce(GradientAllReduce):
    """Sum in the fixed order of `tree_sum`, made when all know who has summed what.

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
        self._given = SummedGradients()

    def _exchange(self) -> Iterator[tuple[Sequence[Piece], torch.Tensor]]:
        for reduction, group in self._groups.sums:
            yield reduction.pieces, self._sum(reduction, group)

    def _sum(self, reduction: GradientReduction, group: AbortableProcessGroup) -> torch.Tensor:
        """Return the sum of the pieces of one group, flat."""
        pieces, ranges = reduction.pieces, self._shard.ranges
        own = [
            [rows(gradients[param], param, span, ranges[param][0]) for param, span in pieces]
            for _, gradients in self._sums.parts()
        ]
        size = sum((stop - start) * param.row_numel for param, (start, stop) in pieces)
        places = [self._groups.layout.place_of(rank) for rank in group.ranks]
        nodes_of = [self._nodes[place.dp] for place in places if place is not None]
        index = group.ranks.index(self._groups.place.rank)
        return tree_allreduce(group, index, own, size, nodes_of, self._leaves)


def rows_of(gradients: Gradients, shard: Shard, held: StateRange) -> torch.Tensor:
    """Return the rows of gradients in which optimizer state is held."""
    param, span = held
    if span == shard.ranges[param]:
        return gradients[param]
    return rows(gradients[param], param, span, shard.ranges[param][0])


def squared_norms(
    gradients: SummedGradients, groups: LayoutGroups, parameters: Parameters
) -> torch.Tensor:
    """Return parts of the squared gradient norm, flat, of which this rank fills its own.

    Every part is filled by one rank: the sum over ranks only adds zeros, so the norm does not
    depend on how ranks are grouped.
    """
    if groups.state is not None:
        squares = _of_blocks(gradients, groups.state, groups.place.rank)
    else:
        squares = _of_parameters(gradients, groups, parameters)
    return squares.to(groups.device)


def _of_blocks(gradients: SummedGradients, state: StateShards, rank: int) -> torch.Tensor:
    """Return an element for each block of the layout, which its first holder fills."""
    blocks = [*chain.from_iterable(state.blocks.values())]
    squares = torch.zeros(len(blocks), dtype=torch.float64, device="cpu")
    for index, block in enumerate(blocks):
        if block.ranks[0] == rank:
            held = containing(state.ranges, block.param, block.span)
            squares[index] = _squared_norm(
                rows(gradients[held], block.param, block.span, held[1][0])
            )
    return squares


def _of_parameters(
    gradients: SummedGradients, groups: LayoutGroups, parameters: Parameters
) -> torch.Tensor:
    """Return an element for each parameter and TP index, which a rank of replica 0 fills."""
    degrees = max(stage.tp for stage in groups.layout.replicas[0].stages)
    squares = torch.zeros(len(parameters.all), degrees, dtype=torch.float64, device=groups.device)
    if groups.place.dp == 0:
        row_of = {param: index for index, param in enumerate(parameters.all)}
        for (param, _), gradient in gradients.items():
            is_tied_copy = groups.place.pp > 0 and param in parameters.first
            if not is_tied_copy and (param.dim is not None or groups.place.tp == 0):
                squares[row_of[param], groups.place.tp] = _squared_norm(gradient)
    return squares.flatten()


def _squared_norm(gradient: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares in float64, for which torch copies: of a part at a time."""
    norms = [
        torch.linalg.vector_norm(part, dtype=torch.float64)
        for part in gradient.flatten().split(_NORM_PART)
    ]
    return torch.stack(norms).square().sum()


def norm_of(squares: torch.Tensor) -> float:
    """Return the norm of the whole gradient, rounded once: the order of `squares` is irrelevant."""
    values = squares.tolist()
    return math.sqrt(math.fsum(values) if all(map(math.isfinite, values)) else sum(values))


def clip(shard: Shard, norm: float, max_norm: float) -> None:
    """Scale the shard's gradients so that the whole gradient's norm is at most `max_norm`."""
    if norm > max_norm:
        for tensor in shard.slices.values():
            assert tensor.grad is not None
            tensor.grad.mul_(max_norm / norm)
