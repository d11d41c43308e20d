"""Bucketed sums of gradients, out of place and overlapped with the last backward passes.

All ranks of a group get a sum (all-reduce), or the holders of each slice alone (reduce-scatter).

The local gradients stay as they are, so that a failure during the exchange corrupts nothing. A
group's buckets are summed in order: those that were before a failure need not travel again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import ClassVar

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
        return self._rows.nbytes

    @property
    def numel(self) -> int:
        """Number of their elements."""
        return self._rows.numel()

    @property
    def _rows(self) -> torch.Tensor:
        local = _local(self.parameter.detach())
        return local if self.length is None else local.narrow(self.dim, self.start, self.length)


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


class GradientVersions:
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
        """Take note that the gradient was copied; from any thread."""
        storage, writes = self._state(parameter)
        self._writes.setdefault(storage, writes)
        self._copied[parameter] = id(parameter.grad)  # last, for `check` in another thread

    def check(self) -> None:
        """Raises `ContractError` if a gradient was written after it had been copied."""
        if self._is_late or any(
            id(parameter.grad) != gradient or not self._is_as_written(parameter)
            for parameter, gradient in list(self._copied.items())
        ):
            raise ContractError(
                "overlap",
                "gradients changed after their exchange had started (several backward passes in a "
                "microbatch, a pipeline without scale_grads=False, or something else than backward "
                "that writes them): pass overlap=False if that is meant",
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


@contextmanager
def calling_behind_gradients(
    parameters: Iterable[torch.nn.Parameter], call: Callable[[torch.nn.Parameter], None]
) -> Iterator[None]:
    """Call `call` whenever an enclosed backward pass has added to the gradient of a parameter."""
    hooks = [one.register_post_accumulate_grad_hook(call) for one in parameters]
    try:
        yield
    finally:
        for hook in hooks:  # the next generation may share the parameters
            hook.remove()


Holders = Callable[[GradientSlice], Sequence[int]]
"""The ranks that get the sum of a slice; the first of them makes it."""


@dataclass
class _Bucket:
    """Slices that travel together in `flat`.

    missing     parameters to which backward still adds, with the number of times
    is_sent_on  sums are on their way to other ranks after `wait`
    """

    is_sent_on: ClassVar[bool] = False

    group: AbortableProcessGroup
    slices: list[GradientSlice]
    missing: dict[torch.nn.Parameter, int] = field(default_factory=dict)
    flat: torch.Tensor | None = None
    work: dist.Work | None = None

    def start(self) -> None:
        """Copy the gradients and start their all-reduce."""
        flat = torch.cat([one.read().reshape(-1) for one in self.slices])
        if len(self.group) > 1:
            self.work = self.group.start_all_reduce(flat)
        self.flat = flat  # last, for `is_summed` in other threads

    def reduce(self) -> None:
        """Free what is no longer needed once `is_summed`."""

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
        if self.flat is None:
            return False
        return self.work is None or self.group.has_succeeded(self.work)


@dataclass
class _ScatteredBucket(_Bucket):
    """Slices whose sums their holders alone get.

    The first holder of a slice sums it, in the order of the ranks, and sends it on to the others:
    all have the same bits, and the bytes are those of an all-reduce at most.

    received  of the exchange in progress
    """

    is_sent_on = True

    holders: Holders = lambda _: ()
    received: torch.Tensor | None = None

    def __post_init__(self) -> None:
        ranks, rank = self.group.ranks, self.group.rank
        self._summed_by: dict[int, list[GradientSlice]] = {other: [] for other in ranks}
        self._sent_on_to: dict[int, list[GradientSlice]] = {other: [] for other in ranks}
        self._sent_on_by: dict[int, list[GradientSlice]] = {other: [] for other in ranks}
        for one in self.slices:
            first, *others = self.holders(one)
            self._summed_by[first].append(one)
            if rank in others:
                self._sent_on_by[first].append(one)
            for other in others if first == rank else ():
                self._sent_on_to[other].append(one)
        self._has_copies = any(len(self.holders(one)) > 1 for one in self.slices)

    def start(self) -> None:
        """Copy the gradients and start to send them to their first holders."""
        parts = [[one.read() for one in some] for some in self._summed_by.values()]
        own = sum(one.numel for one in self._summed_by[self.group.rank])
        self._start_exchange(parts, [own] * len(parts))

    def reduce(self) -> None:
        """Sum what was received, and free it. Raises `PeerLostError`."""
        if self.flat is not None:
            return
        super().wait()
        assert self.received is not None
        size = len(self.group)
        summed, *others = self.received.view(size, self.received.numel() // size)
        for other in others:
            summed.add_(other)
        self.flat = summed.clone()
        self.work = self.received = None

    def wait(self) -> None:
        """Sum what was received, and start to send it on. Raises `PeerLostError`."""
        self.reduce()
        assert self.flat is not None
        if self._has_copies:
            summed = self._summed_by[self.group.rank]
            parts = self.flat.split([one.numel for one in summed])
            sums = dict(zip(summed, parts, strict=True))
            sent = [[sums[one] for one in some] for some in self._sent_on_to.values()]
            into = [sum(one.numel for one in some) for some in self._sent_on_by.values()]
            self._start_exchange(sent, into)

    def sums(self) -> Iterator[tuple[GradientSlice, torch.Tensor]]:
        """Wait for what other ranks send on, and yield each slice held with its part of the sums.

        Raises `PeerLostError`.
        """
        super().wait()
        sent_on = [one for some in self._sent_on_by.values() for one in some]
        both = (self._summed_by[self.group.rank], self.flat), (sent_on, self.received)
        self.flat = self.received = self.work = None  # freed when they are used
        for slices, flat in both:
            parts = flat.split([one.numel for one in slices]) if flat is not None else ()
            for one, part in zip(slices, parts, strict=True):
                yield one, part.view(one.read().shape)

    @property
    def is_summed(self) -> bool:
        """True if the gradients to be summed here have come, without waiting for them."""
        return super().is_summed if self.work is None else self.group.has_succeeded(self.work)

    def _start_exchange(self, sent: Sequence[Sequence[torch.Tensor]], into: list[int]) -> None:
        """Start to send each rank some tensors, and to receive so many elements from each."""
        flats = [part.reshape(-1) for parts in sent for part in parts]
        flat = torch.cat(flats) if flats else self.slices[0].read().new_empty(0)
        self.received = flat.new_empty(sum(into))
        out = [sum(part.numel() for part in parts) for parts in sent]
        self.work = self.group.start_all_to_all(self.received, flat, into, out)


class BucketedAllReduce:
    """One attempt to sum the gradients of one step over replicas.

    slices  in the order in which all ranks of their group reduce them: the model backward. Groups
            do not wait for each other
    holders ranks that get the sum of a slice; None: all of its group
    summed  flat sums of the first buckets of the first group, from an earlier attempt: they do not
            travel again
    """

    def __init__(
        self,
        slices: Iterable[tuple[AbortableProcessGroup, Sequence[GradientSlice]]],
        bucket_bytes: int,
        summed: Sequence[torch.Tensor] = (),
        holders: Holders | None = None,
    ) -> None:
        self._queues = [
            deque(_buckets(_kind(group, some, holders), group, some, bucket_bytes))
            for group, some in slices
        ]
        self._started: list[_Bucket] = []
        self._versions = GradientVersions()
        for flat in summed:
            self._started.append(self._queues[0].popleft())
            self._started[-1].flat = flat
        every = (*self._started, *(bucket for queue in self._queues for bucket in queue))
        self._bucket_of = {one: bucket for bucket in every for one in bucket.slices}

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
        adds_to = {one.parameter for one in self._bucket_of}
        if parameters is not None:
            adds_to &= set(parameters)
        for bucket in (bucket for queue in self._queues for bucket in queue):
            added = {one.parameter for one in bucket.slices} & adds_to
            bucket.missing = {parameter: passes(parameter) for parameter in added}
        with calling_behind_gradients(adds_to, self._completed):
            yield

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
        self._versions.check()
        self.start()
        for bucket in self._started:
            bucket.wait()
            if not bucket.is_sent_on:
                yield from bucket.sums()
        for bucket in self._started:
            if bucket.is_sent_on:
                yield from bucket.sums()

    def summed(self) -> list[torch.Tensor]:
        """Return the flat sums of the leading buckets that are whole by now, without waiting."""
        done = takewhile(lambda bucket: bucket.is_summed, self._started)
        return [bucket.flat for bucket in done if bucket.flat is not None]

    def sum_of(self, one: GradientSlice) -> torch.Tensor | None:
        """Return the sum of a slice if all of its group get it and it is there by now.

        From any thread.
        """
        bucket = self._bucket_of[one]
        return dict(bucket.sums())[one] if bucket.is_summed and not bucket.is_sent_on else None

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
        for earlier in self._started:
            if earlier.is_summed:
                earlier.reduce()  # else all parts would be held until the end
        bucket = queue.popleft()
        bucket.start()
        self._started.append(bucket)
        return bucket


_Kind = Callable[[AbortableProcessGroup, list[GradientSlice]], _Bucket]


def _kind(
    group: AbortableProcessGroup, slices: Sequence[GradientSlice], holders: Holders | None
) -> _Kind:
    """Return the kind of buckets for `slices`: scattered where some ranks do not get the sums."""
    if holders is None or all(len(holders(one)) == len(group) for one in slices):
        return _Bucket
    return partial(_ScatteredBucket, holders=holders)


def _buckets(
    kind: _Kind,
    group: AbortableProcessGroup,
    slices: Sequence[GradientSlice],
    bucket_bytes: int,
) -> Iterator[_Bucket]:
    """`slices` in order, one dtype each, cut where a bucket would exceed its size."""
    taken: list[GradientSlice] = []
    size, limit = 0, min(_FIRST_BYTES, bucket_bytes)
    for one in slices:
        is_full = size + one.nbytes > limit
        if taken and (is_full or taken[-1].parameter.dtype != one.parameter.dtype):
            yield kind(group, taken)
            taken, size, limit = [], 0, bucket_bytes
        taken.append(one)
        size += one.nbytes
    if taken:
        yield kind(group, taken)


def _local(gradient: torch.Tensor) -> torch.Tensor:
    """Return the part of a gradient that this rank holds."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
