"""Sums a loop's gradients over replicas in buckets, out of place, while backward still runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from resihp.contracts import ContractError

from ..process_groups.abortable import AbortableProcessGroup

# Backward completes the last layers first; a small first bucket is on its way early.
_FIRST_BYTES = 1 << 20


@dataclass
class _Bucket:
    """Places of parameters whose gradients travel together. `read` is what they were then."""

    places: list[int]
    missing: set[int] = field(default_factory=set)
    read: list[tuple[int, int]] = field(default_factory=list)
    flat: torch.Tensor | None = None
    work: dist.Work | None = None


class LoopAllReduce:
    """One attempt to sum one step. The local gradients stay as they are.

    Buckets start in one order, that of the parameters backward, so that all replicas agree on it.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        group: AbortableProcessGroup,
        bucket_bytes: int,
    ) -> None:
        self._parameters, self._group = parameters, group
        self._waiting = deque(_buckets(parameters, bucket_bytes))
        self._started: list[_Bucket] = []

    @contextmanager
    def during_last_backward(self) -> Iterator[None]:
        """Start each bucket as soon as backward has completed its last gradient."""
        for bucket in self._waiting:
            bucket.missing = set(bucket.places)
        hooks = [
            parameter.register_post_accumulate_grad_hook(self._on_gradient(place))
            for place, parameter in enumerate(self._parameters)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def finish(self) -> list[torch.Tensor]:
        """The sums, in the shapes of the local gradients. Waits for all replicas.

        Raises `ContractError` if a gradient has changed since it was sent.
        """
        if len(self._group) == 1:
            return local_gradients(self._parameters)
        while self._waiting:
            self._start(self._waiting.popleft())
        total: dict[int, torch.Tensor] = {}
        for bucket in self._started:
            assert bucket.work is not None
            assert bucket.flat is not None
            self._group.wait(bucket.work)
            if self._seen(bucket) != bucket.read:
                raise ContractError(
                    "overlap",
                    "gradients changed after a backward pass (several passes in a microbatch, or "
                    "something else than backward that writes them): pass overlap=False",
                )
            local = local_gradients([self._parameters[place] for place in bucket.places])
            parts = bucket.flat.split([gradient.numel() for gradient in local])
            total |= {
                place: part.view_as(gradient)
                for place, part, gradient in zip(bucket.places, parts, local, strict=True)
            }
        return [total[place] for place in range(len(self._parameters))]

    def _on_gradient(self, place: int) -> Callable[[torch.Tensor], None]:
        def ready(_: torch.Tensor) -> None:
            for bucket in self._waiting:
                bucket.missing.discard(place)
            while self._waiting and not self._waiting[0].missing:
                self._start(self._waiting.popleft())

        return ready

    def _start(self, bucket: _Bucket) -> None:
        local = local_gradients([self._parameters[place] for place in bucket.places])
        bucket.flat = torch.cat([gradient.reshape(-1) for gradient in local])
        bucket.read = self._seen(bucket)
        bucket.work = self._group.start_all_reduce(bucket.flat)
        self._started.append(bucket)

    def _seen(self, bucket: _Bucket) -> list[tuple[int, int]]:
        """Which tensors the bucket's gradients are, and how often they have been written."""
        gradients = [self._parameters[place].grad for place in bucket.places]
        return [(id(gradient), gradient._version) for gradient in gradients if gradient is not None]


def local_gradients(parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    """This process's part of each gradient; zeros where nothing was computed."""
    found = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        found.append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
    return found


def _buckets(parameters: Sequence[torch.nn.Parameter], bucket_bytes: int) -> list[_Bucket]:
    """The parameters backward, one type each, cut where a bucket would grow beyond its size."""
    buckets: list[_Bucket] = []
    size, limit = 0, min(_FIRST_BYTES, bucket_bytes)
    for place in reversed(range(len(parameters))):
        parameter = parameters[place]
        added = parameter.numel() * parameter.element_size()
        fits = buckets and size + added <= limit
        if not fits or parameters[buckets[-1].places[-1]].dtype != parameter.dtype:
            limit = min(_FIRST_BYTES, bucket_bytes) if not buckets else bucket_bytes
            buckets.append(_Bucket([]))
            size = 0
        buckets[-1].places.append(place)
        size += added
    return buckets
