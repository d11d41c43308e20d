"""The sum over replicas, out of place: local sums stay as they are until the step is whole."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from resihp.layout import GradientReduction, Param, Range

from ..microbatches.ledger import Spans, indices
from ..microbatches.tree_sum import nodes
from ..process_groups.abortable import AbortableProcessGroup
from ..process_groups.layout_groups import LayoutGroups
from ..process_groups.tree_allreduce import tree_allreduce
from .gradient_accumulation import Gradients, GradientSum
from .shard import Shard, rows

Piece = tuple[Param, Range]


class Reduction(Protocol):
    """Sums one step's gradients over the replicas. Made anew for every attempt."""

    def during_last_pass(self, params: Collection[Param]) -> AbstractContextManager[None]:
        """Around the last backward pass of the step, which adds to `params`.

        What it completes may be sent at once; all other gradients are whole.
        """
        ...

    def finish(self) -> Gradients:
        """The sums, whole. Raises `PeerLostError` and leaves the local sums as they were."""
        ...


@dataclass
class _Bucket:
    """Ranges of gradients that travel together; `flat` is theirs alone, so nothing else breaks."""

    group: AbortableProcessGroup
    pieces: list[Piece]
    missing: set[Param] = field(default_factory=set)
    flat: torch.Tensor | None = None
    work: dist.Work | None = None


class BucketedAllReduce:
    """All-reduces buckets in the order in which backward completes them, while it still runs.

    Within a group buckets start in one order, that of the model backward, so all ranks agree on
    it; groups have threads of their own and never wait for each other.
    """

    def __init__(
        self, shard: Shard, groups: LayoutGroups, sums: GradientSum, *, bucket_bytes: int
    ) -> None:
        self._shard, self._groups, self._sums = shard, groups, sums
        self._queues = [
            deque(_buckets(group, reduction.pieces[::-1], bucket_bytes))
            for reduction, group in groups.sums
        ]
        self._started: list[_Bucket] = []

    @contextmanager
    def during_last_pass(self, params: Collection[Param]) -> Iterator[None]:
        """Start each bucket as soon as backward has completed its last gradient."""
        for queue in self._queues:
            for bucket in queue:
                bucket.missing = {param for param, _ in bucket.pieces if param in params}
        hooks = [
            tensor.register_post_accumulate_grad_hook(self._on_gradient(param))
            for param, tensor in self._shard.tensors.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:  # the next generation may share the tensors
                hook.remove()

    def finish(self) -> Gradients:
        """Start what has not been started, wait for all, and put the sums together."""
        local = self._sums.whole()
        for queue in self._queues:
            while queue:
                self._start(queue.popleft(), local)
        total: Gradients = {}
        for bucket in self._started:
            assert bucket.work is not None
            bucket.group.wait(bucket.work)
            self._unpack(bucket, total)
        return completed(self._shard, self._groups, total, local)

    def _on_gradient(self, param: Param) -> Callable[[torch.Tensor], None]:
        def ready(tensor: torch.Tensor) -> None:
            for queue in self._queues:
                for bucket in queue:
                    bucket.missing.discard(param)
                while queue and not queue[0].missing:
                    self._start(queue.popleft(), self._so_far())

        return ready

    def _so_far(self) -> Gradients:
        """The gradients that backward has completed, and those that it is still adding to."""
        found: Gradients = {}
        for param, tensor in self._shard.tensors.items():
            if tensor.grad is not None:
                found[param] = tensor.grad
        return found

    def _start(self, bucket: _Bucket, local: Gradients) -> None:
        views = list(piece_views(self._shard, bucket.pieces, local))
        bucket.flat = torch.cat([view.reshape(-1) for view in views])
        bucket.work = bucket.group.start_all_reduce(bucket.flat)
        self._started.append(bucket)

    def _unpack(self, bucket: _Bucket, total: Gradients) -> None:
        assert bucket.flat is not None
        unpack(self._shard, bucket.pieces, bucket.flat, total)


def piece_views(
    shard: Shard, pieces: Iterable[Piece], gradients: Gradients
) -> Iterator[torch.Tensor]:
    """The views of `gradients` on `pieces`."""
    for param, span in pieces:
        yield rows(gradients[param], param, span, origin=shard.ranges[param][0])


def unpack(shard: Shard, pieces: Iterable[Piece], flat: torch.Tensor, total: Gradients) -> None:
    """Bring `flat` into `total`, as a view of it where a piece is all that this rank holds."""
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
    """`total` with what needs no sum: all in a single replica but tied parameters."""
    if groups.layout.dp > 1:
        _share_unsplit(shard, groups, total)
    nothing = {p: torch.zeros_like(t) for p, t in shard.tensors.items() if t.numel() == 0}
    return nothing | local | total


def _share_unsplit(shard: Shard, groups: LayoutGroups, total: Gradients) -> None:
    """Take the sums of unsplit parameters from the stage's first rank, to the last bit."""
    unsplit = {param: tensor for param, tensor in shard.tensors.items() if param.dim is None}
    if len(groups.tp) == 1 or not unsplit:
        return
    held = [total.get(param, torch.zeros_like(tensor)) for param, tensor in unsplit.items()]
    flat = torch.cat([tensor.reshape(-1) for tensor in held])
    groups.tp.broadcast(flat, groups.stage.ranks[0])
    parts = flat.split([tensor.numel() for tensor in held])
    for (param, tensor), part in zip(unsplit.items(), parts, strict=True):
        total[param] = part.view_as(tensor)


def _buckets(
    group: AbortableProcessGroup, pieces: Iterable[Piece], bucket_bytes: int
) -> Iterator[_Bucket]:
    """`pieces` in order, cut where a bucket would grow beyond `bucket_bytes`."""
    taken: list[Piece] = []
    size = 0
    for param, (start, stop) in pieces:
        added = (stop - start) * param.row_numel * 4
        if taken and size + added > bucket_bytes:
            yield _Bucket(group, taken)
            taken, size = [], 0
        taken.append((param, (start, stop)))
        size += added
    if taken:
        yield _Bucket(group, taken)


class TreeAllReduce:
    """Sums node by node with `tree_allreduce`; it starts only when backward has ended.

    `held` tells for each replica which microbatches its sums hold.
    """

    def __init__(
        self,
        shard: Shard,
        groups: LayoutGroups,
        sums: GradientSum,
        held: Sequence[Spans],
        microbatches: int,
    ) -> None:
        self._shard, self._groups, self._sums, self._leaves = shard, groups, sums, microbatches
        self._nodes = [nodes(indices(finished), microbatches) for finished in held]

    def during_last_pass(self, params: Collection[Param]) -> AbstractContextManager[None]:
        """Nothing can be sent ahead: a node is whole only when its last microbatch is."""
        return nullcontext()

    def finish(self) -> Gradients:
        """Exchange and add up."""
        total: Gradients = {}
        for summed, group in self._groups.sums:
            unpack(self._shard, summed.pieces, self._sum(summed, group), total)
        local = self._sums.whole() if self._groups.layout.dp == 1 else {}
        return completed(self._shard, self._groups, total, local)

    def _sum(self, summed: GradientReduction, group: AbortableProcessGroup) -> torch.Tensor:
        """The whole sum of the pieces of one group, flat."""
        flats = [
            torch.cat([v.reshape(-1) for v in piece_views(self._shard, summed.pieces, gradients)])
            for _, gradients in self._sums.parts()
        ]
        size = sum((stop - start) * param.row_numel for param, (start, stop) in summed.pieces)
        nodes_of = [self._nodes[self._replica(rank)] for rank in group.ranks]
        index = group.ranks.index(self._groups.place.rank)
        return tree_allreduce(group, index, flats, size, nodes_of, self._leaves)

    def _replica(self, rank: int) -> int:
        place = self._groups.layout.place_of(rank)
        assert place is not None, "only ranks of the layout sum"
        return place.dp
