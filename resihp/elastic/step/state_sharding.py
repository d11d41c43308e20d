"""Optimizer state sharded over replicas (ZeRO stage 1, Rajbhandari et al., arXiv 1910.02054).

Gradients are reduce-scattered to the ranks that hold the state of their rows; these update, and
parameters are all-gathered. Ranks that hold the same state update with the same bits: their copies
stay equal and need not be sent to each other. With any number of copies the bytes exchanged are
those of an all-reduce.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from resihp.layout import GradientReduction, StateBlock, StateRange, containing

from ..process_groups.abortable import AbortableProcessGroup
from ..process_groups.bucketed_allreduce import BucketedAllReduce, GradientSlice
from ..process_groups.layout_groups import LayoutGroups
from .gradient_accumulation import GradientSum
from .gradient_allreduce import GradientAllReduce, SummedGradients, rows_of
from .shard import STATE_DTYPE, Shard, rows


class GradientReduceScatter(GradientAllReduce):
    """One attempt to sum the gradients of one step, on the ranks that update with them.

    Buckets are exchanged in the order in which backward completes them.
    """

    def __init__(
        self, shard: Shard, groups: LayoutGroups, sums: GradientSum, bucket_bytes: int
    ) -> None:
        assert groups.state is not None
        self._shard, self._groups, self._sums = shard, groups, sums
        self._blocks: dict[GradientSlice, StateBlock] = {}
        self._buckets = BucketedAllReduce(
            [(group, self._slices_of(reduction)) for reduction, group in groups.sums],
            bucket_bytes,
            holders=lambda one: self._blocks[one].ranks,
        )

    def sum_of(self, held: StateRange) -> torch.Tensor | None:
        """Return None: sums are sent on at the end of the step."""
        return None

    def finish(self) -> SummedGradients:
        """Return the whole gradients of the rows held. Raises `PeerLostError`.

        The local sums stay as they were.
        """
        shard = self._shard
        ranges, total = shard.state_ranges, SummedGradients()
        for one, summed in self._buckets.finish():
            block = self._blocks[one]
            held = containing(ranges, block.param, block.span)
            if held[1] == block.span:
                total[held] = summed
                continue
            if held not in total:
                total[held] = torch.empty_like(shard.slices[held])
            rows(total[held], block.param, block.span, held[1][0]).copy_(summed)
        local = self._sums.whole()  # all that one replica alone holds
        return {
            held: total[held] if held in total else rows_of(local, shard, held)
            for held in shard.slices
        }

    def _slices_of(self, reduction: GradientReduction) -> list[GradientSlice]:
        """Blocks of the shard's gradients, in the order of the model backward."""
        assert self._groups.state is not None
        slices = []
        for block in reversed(self._groups.state.blocks[reduction.ranks]):
            origin = self._shard.ranges[block.param][0]
            tensor, (start, stop) = self._shard.tensors[block.param], block.span
            one = GradientSlice(tensor, block.param.dim or 0, start - origin, stop - start)
            self._blocks[one] = block
            slices.append(one)
        return slices


_WINDOW = 2
"""Buckets of parameters in progress at once."""


class _Bucket(NamedTuple):
    """Blocks that one rank sends, and those that it lacks, both by the rank at the other end."""

    group: AbortableProcessGroup
    sent: list[list[StateBlock]]
    lacking: list[list[StateBlock]]


class ParameterAllGather:
    """All-gather of the parameters of a layout, from the ranks that have updated them.

    Blocks go from their first holders to the ranks that do not hold them, in buckets of
    `bucket_bytes`.
    """

    def __init__(self, shard: Shard, groups: LayoutGroups, bucket_bytes: int) -> None:
        self._shard, self._groups = shard, groups
        numel = max(1, bucket_bytes // STATE_DTYPE.itemsize)
        self._buckets = [
            _bucket(group, blocks)
            for reduction, group in groups.sums
            for blocks in _in_turn(self._blocks(reduction, group), numel)
        ]

    def run(self) -> None:
        """Fill all rows that other ranks have updated. Raises `PeerLostError`.

        Every rank of the layout does, after each update and after each change of layout.
        """
        in_progress = deque[tuple[_Bucket, torch.Tensor, dist.Work]]()
        for bucket in self._buckets:
            in_progress.append((bucket, *self._start(bucket)))
            if len(in_progress) > _WINDOW:
                self._finish(*in_progress.popleft())
        for one in in_progress:
            self._finish(*one)
        self._share_unsplit()

    def _blocks(
        self, reduction: GradientReduction, group: AbortableProcessGroup
    ) -> list[StateBlock]:
        """Blocks that some ranks of a group lack, in the same order on all of them."""
        assert self._groups.state is not None
        blocks = self._groups.state.blocks[reduction.ranks]
        return [block for block in blocks if len(block.ranks) < len(group)]

    def _start(self, bucket: _Bucket) -> tuple[torch.Tensor, dist.Work]:
        """Start to exchange a bucket; returns what it fills."""
        parts = [self._rows(block).reshape(-1) for some in bucket.sent for block in some]
        into, out = ([_numel(some) for some in each] for each in (bucket.lacking, bucket.sent))
        flat = self._empty(sum(into))
        sent = torch.cat(parts) if parts else self._empty(0)
        return flat, bucket.group.start_all_to_all(flat, sent, into, out)

    def _finish(self, bucket: _Bucket, flat: torch.Tensor, work: dist.Work) -> None:
        """Wait for a bucket and put its rows in place."""
        bucket.group.wait(work)
        blocks = [block for some in bucket.lacking for block in some]
        parts = flat.split([block.numel for block in blocks])
        for block, part in zip(blocks, parts, strict=True):
            target = self._rows(block)
            target.copy_(part.view_as(target))

    def _share_unsplit(self) -> None:
        """Broadcast parameters without a split dimension from the first rank of the stage."""
        groups = self._groups
        unsplit = [t.data for param, t in self._shard.tensors.items() if param.dim is None]
        if len(groups.tp) == 1 or not unsplit:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in unsplit])
        groups.tp.broadcast(flat, groups.stage.ranks[0])
        for tensor, part in zip(unsplit, flat.split([t.numel() for t in unsplit]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def _rows(self, block: StateBlock) -> torch.Tensor:
        """Rows of a block in the parameter's tensor."""
        origin = self._shard.ranges[block.param][0]
        return rows(self._shard.tensors[block.param].data, block.param, block.span, origin)

    def _empty(self, numel: int) -> torch.Tensor:
        some = next(iter(self._shard.tensors.values()))
        return some.data.new_empty(numel)


def _in_turn(blocks: list[StateBlock], numel: int) -> Iterator[list[StateBlock]]:
    """Cut `blocks` into lists of at most `numel` elements, or of one block."""
    taken: list[StateBlock] = []
    for block in blocks:
        if taken and _numel(taken) + block.numel > numel:
            yield taken
            taken = []
        taken.append(block)
    if taken:
        yield taken


def _bucket(group: AbortableProcessGroup, blocks: list[StateBlock]) -> _Bucket:
    own = [block for block in blocks if block.ranks[0] == group.rank]
    lacking = [block for block in blocks if group.rank not in _updated_by(block, group.device)]
    return _Bucket(
        group,
        sent=[
            [block for block in own if rank not in _updated_by(block, group.device)]
            for rank in group.ranks
        ],
        lacking=[[block for block in lacking if block.ranks[0] == rank] for rank in group.ranks],
    )


def _updated_by(block: StateBlock, device: torch.device) -> Sequence[int]:
    """Return the ranks that keep the parameters which they have updated.

    On accelerators kernels for lists of tensors may round otherwise for another list: there all
    take the parameters of the first holder.
    """
    return block.ranks if device.type == "cpu" else block.ranks[:1]


def _numel(blocks: list[StateBlock]) -> int:
    return sum(block.numel for block in blocks)
