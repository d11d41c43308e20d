"""Bucketed all-reduce of gradients, out of place and overlapped with the last backward pass.

The local gradients stay as they are, so that a failure during the exchange corrupts nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from resihp.contracts import ContractError

from .abortable import AbortableProcessGroup

# Backward completes the last layers first: a small first bucket starts early.
_FIRST_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class GradientSlice:
    """Rows of the local gradient of one parameter; all of it where `length` is None.

    dim, start, length  as in `torch.Tensor.narrow`
    """

    parameter: torch.nn.Parameter
    dim: int = 0
    start: int = 0
    length: int | None = None

    def read(self) -> torch.Tensor:
        """Return a view of the rows; zeros take the place of a gradient that is None."""
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter)
        gradient = self.parameter.grad
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        return local if self.length is None else local.narrow(self.dim, self.start, self.length)

    @property
    def version(self) -> tuple[int, int]:
        """Identity of the gradient tensor and its number of in-place writes."""
        gradient = self.parameter.grad
        return id(gradient), -1 if gradient is None else gradient._version

    @property
    def nbytes(self) -> int:
        """Size of the rows in bytes; of a `DTensor`, of the whole gradient."""
        numel, shape = self.parameter.numel(), self.parameter.shape
        if self.length is not None:
            numel = numel // max(1, shape[self.dim]) * self.length
        return numel * self.parameter.element_size()


@dataclass
class _Bucket:
    """Slices that travel together in `flat`; `missing` are the parameters backward still adds to.

    versions  of the gradients when they were copied
    """

    group: AbortableProcessGroup
    slices: list[GradientSlice]
    missing: set[torch.nn.Parameter] = field(default_factory=set)
    versions: list[tuple[int, int]] = field(default_factory=list)
    flat: torch.Tensor | None = None
    work: dist.Work | None = None

    def start(self) -> None:
        """Copy the gradients and start their all-reduce."""
        self.flat = torch.cat([one.read().reshape(-1) for one in self.slices])
        self.versions = [one.version for one in self.slices]
        self.work = self.group.start_all_reduce(self.flat)

    def wait(self) -> Iterator[tuple[GradientSlice, torch.Tensor]]:
        """Wait for the sums; yield each slice with its part of them."""
        assert self.work is not None
        assert self.flat is not None
        self.group.wait(self.work)
        if [one.version for one in self.slices] != self.versions:
            raise ContractError(
                "overlap",
                "gradients changed after a backward pass (several passes in a microbatch, or "
                "something else than backward that writes them): pass overlap=False",
            )
        shapes = [one.read().shape for one in self.slices]
        parts = self.flat.split([shape.numel() for shape in shapes])
        for one, part, shape in zip(self.slices, parts, shapes, strict=True):
            yield one, part.view(shape)


class BucketedAllReduce:
    """One attempt to sum the gradients of one step over replicas.

    slices  in the order in which all ranks of their group reduce them: the model backward. Groups
            do not wait for each other
    """

    def __init__(
        self,
        slices: Iterable[tuple[AbortableProcessGroup, Sequence[GradientSlice]]],
        bucket_bytes: int,
    ) -> None:
        self._queues = [deque(_buckets(group, some, bucket_bytes)) for group, some in slices]
        self._started: list[_Bucket] = []

    @contextmanager
    def overlapped(
        self, parameters: Collection[torch.nn.Parameter] | None = None
    ) -> Iterator[None]:
        """Start each bucket when the enclosed backward pass has completed its last gradient.

        parameters  those that the pass adds to; None: all
        """
        waited_for = set[torch.nn.Parameter]()
        for bucket in (bucket for queue in self._queues for bucket in queue):
            bucket.missing = {one.parameter for one in bucket.slices}
            if parameters is not None:
                bucket.missing &= set(parameters)
            waited_for |= bucket.missing
        hooks = [one.register_post_accumulate_grad_hook(self._completed) for one in waited_for]
        try:
            yield
        finally:
            for hook in hooks:  # the next generation may share the parameters
                hook.remove()

    def finish(self) -> Iterator[tuple[GradientSlice, torch.Tensor]]:
        """Start what has not been started, wait for all, and yield each slice with its sum.

        Raises `PeerLostError`, and `ContractError` for a gradient that changed after its exchange
        had started.
        """
        for queue in self._queues:
            while queue:
                self._start(queue)
        for bucket in self._started:
            yield from bucket.wait()

    def _completed(self, parameter: torch.nn.Parameter) -> None:
        for queue in self._queues:
            for bucket in queue:
                bucket.missing.discard(parameter)
            while queue and not queue[0].missing:
                self._start(queue)

    def _start(self, queue: deque[_Bucket]) -> None:
        bucket = queue.popleft()
        bucket.start()
        self._started.append(bucket)


def _buckets(
    group: AbortableProcessGroup, slices: Sequence[GradientSlice], bucket_bytes: int
) -> Iterator[_Bucket]:
    """`slices` in order, one dtype each, cut where a bucket would exceed its size."""
    taken: list[GradientSlice] = []
    size, limit = 0, min(_FIRST_BYTES, bucket_bytes)
    for one in slices:
        is_full = size + one.nbytes > limit
        if taken and (is_full or taken[-1].parameter.dtype != one.parameter.dtype):
            yield _Bucket(group, taken)
            taken, size, limit = [], 0, bucket_bytes
        taken.append(one)
        size += one.nbytes
    if taken:
        yield _Bucket(group, taken)
