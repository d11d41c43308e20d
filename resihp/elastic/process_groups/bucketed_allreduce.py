"""Bucketed all-reduce of gradients, out of place and overlapped with the last backward passes.

The local gradients stay as they are, so that a failure during the exchange corrupts nothing. A
group's buckets are summed in order: those that were before a failure need not travel again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile

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
        local = _local(self.parameter.grad)
        return local if self.length is None else local.narrow(self.dim, self.start, self.length)

    @property
    def nbytes(self) -> int:
        """Size in bytes of the rows that this rank holds."""
        local = _local(self.parameter.detach())
        if self.length is not None:
            local = local.narrow(self.dim, self.start, self.length)
        return local.nbytes


def is_placed_apart(parameter: torch.nn.Parameter) -> bool:
    """Return whether the gradient has other placements than its parameter.

    That of a replicated parameter is partial where members of its mesh have used it on their own
    parts of a sequence (`SequenceParallel`). It must be redistributed before it is read here.
    """
    gradient = parameter.grad
    return (
        isinstance(parameter, DTensor)
        and isinstance(gradient, DTensor)
        and gradient.placements != parameter.placements
    )


class _GradientVersions:
    """Detects gradients that change after they were copied.

    Gradients of FSDP2 are views of one buffer, and share its counter of writes: it is read whenever
    backward has added to one of them.
    """

    def __init__(self) -> None:
        self._writes: dict[int, int] = {}  # by storage
        self._copied: dict[torch.nn.Parameter, int] = {}  # identity of its gradient
        self._is_late = False

    def added(self, parameter: torch.nn.Parameter) -> None:
        """Take note that backward has added to the gradient."""
        self._is_late |= parameter in self._copied
        storage, writes = self._state(parameter)
        self._writes[storage] = writes

    def copied(self, parameter: torch.nn.Parameter) -> None:
        """Take note that the gradient was copied."""
        self._copied[parameter] = id(parameter.grad)
        storage, writes = self._state(parameter)
        self._writes.setdefault(storage, writes)

    @property
    def have_changed(self) -> bool:
        """True if a gradient was written after it had been copied."""
        return self._is_late or any(
            id(parameter.grad) != gradient or not self._is_as_written(parameter)
            for parameter, gradient in self._copied.items()
        )

    def _is_as_written(self, parameter: torch.nn.Parameter) -> bool:
        storage, writes = self._state(parameter)
        return self._writes.get(storage) == writes

    @staticmethod
    def _state(parameter: torch.nn.Parameter) -> tuple[int, int]:
        """Return the storage of the gradient, and the number of in-place writes to it."""
        assert parameter.grad is not None
        local = _local(parameter.grad)
        return local.untyped_storage()._cdata, local._version


@dataclass
class _Bucket:
    """Slices that travel together in `flat`.

    missing  parameters to which backward still adds, with the number of times
    """

    group: AbortableProcessGroup
    slices: list[GradientSlice]
    missing: dict[torch.nn.Parameter, int] = field(default_factory=dict)
    flat: torch.Tensor | None = None
    work: dist.Work | None = None

    def start(self) -> None:
        """Copy the gradients and start their all-reduce."""
        self.flat = torch.cat([one.read().reshape(-1) for one in self.slices])
        if len(self.group) > 1:
            self.work = self.group.start_all_reduce(self.flat)

    def wait(self) -> None:
        """Wait for the sums. Raises `PeerLostError`."""
        if self.work is not None:
            self.group.wait(self.work)

    def sums(self) -> Iterator[tuple[GradientSlice, torch.Tensor]]:
        """Yield each slice with its part of the sums."""
        assert self.flat is not None
        shapes = [one.read().shape for one in self.slices]
        parts = self.flat.split([shape.numel() for shape in shapes])
        for one, part, shape in zip(self.slices, parts, shapes, strict=True):
            yield one, part.view(shape)

    @property
    def is_summed(self) -> bool:
        """True if `flat` is the sum over the group, without waiting for it."""
        if self.work is None:
            return self.flat is not None
        return self.group.has_succeeded(self.work)


class BucketedAllReduce:
    """One attempt to sum the gradients of one step over replicas.

    slices  in the order in which all ranks of their group reduce them: the model backward. Groups
            do not wait for each other
    summed  flat sums of the first buckets of the first group, from an earlier attempt: they do not
            travel again
    """

    def __init__(
        self,
        slices: Iterable[tuple[AbortableProcessGroup, Sequence[GradientSlice]]],
        bucket_bytes: int,
        summed: Sequence[torch.Tensor] = (),
    ) -> None:
        self._queues = [deque(_buckets(group, some, bucket_bytes)) for group, some in slices]
        self._started: list[_Bucket] = []
        self._versions = _GradientVersions()
        for flat in summed:
            self._started.append(self._queues[0].popleft())
            self._started[-1].flat = flat

    @contextmanager
    def overlapped(
        self,
        parameters: Collection[torch.nn.Parameter] | None = None,
        passes: Callable[[torch.nn.Parameter], int] = lambda _: 1,
    ) -> Iterator[None]:
        """Start each bucket when the enclosed backward passes have completed its last gradient.

        parameters  those that the passes add to; None: all
        passes      number of times that they add to a parameter
        """
        adds_to = {one.parameter for one in self._slices()}
        if parameters is not None:
            adds_to &= set(parameters)
        for bucket in (bucket for queue in self._queues for bucket in queue):
            added = {one.parameter for one in bucket.slices} & adds_to
            bucket.missing = {parameter: passes(parameter) for parameter in added}
        hooks = [one.register_post_accumulate_grad_hook(self._completed) for one in adds_to]
        try:
            yield
        finally:
            for hook in hooks:  # the next generation may share the parameters
                hook.remove()

    def start(self) -> None:
        """Start what has not been started."""
        for queue in self._queues:
            while queue:
                self._start(queue)

    def finish(self) -> Iterator[tuple[GradientSlice, torch.Tensor]]:
        """Start what has not been started, wait for all, and yield each slice with its sum.

        Raises `PeerLostError`, and `ContractError` for a gradient that changed after its exchange
        had started.
        """
        if self._versions.have_changed:
            raise ContractError(
                "overlap",
                "gradients changed after their exchange had started (several backward passes in a "
                "microbatch, a pipeline without scale_grads=False, or something else than backward "
                "that writes them): pass overlap=False if that is meant",
            )
        self.start()
        for bucket in self._started:
            bucket.wait()
            yield from bucket.sums()

    def summed(self) -> list[torch.Tensor]:
        """Return the flat sums of the leading buckets that are whole by now, without waiting."""
        done = takewhile(lambda bucket: bucket.is_summed, self._started)
        return [bucket.flat for bucket in done if bucket.flat is not None]

    def _slices(self) -> Iterator[GradientSlice]:
        for bucket in (*self._started, *(bucket for queue in self._queues for bucket in queue)):
            yield from bucket.slices

    def _completed(self, parameter: torch.nn.Parameter) -> None:
        if is_placed_apart(parameter):
            return  # complete when it is redistributed, behind the passes
        self._versions.added(parameter)
        for queue in self._queues:
            for bucket in queue:
                if parameter in bucket.missing:
                    bucket.missing[parameter] -= 1
                    if not bucket.missing[parameter]:
                        del bucket.missing[parameter]
            while queue and not queue[0].missing:
                bucket = self._start(queue)
                for one in bucket.slices:
                    self._versions.copied(one.parameter)

    def _start(self, queue: deque[_Bucket]) -> _Bucket:
        bucket = queue.popleft()
        bucket.start()
        self._started.append(bucket)
        return bucket


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


def _local(gradient: torch.Tensor) -> torch.Tensor:
    """Return the part of a gradient that this rank holds."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
