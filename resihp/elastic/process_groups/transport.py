"""Transfer of tensors from one rank to others, whatever the medium."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from .abortable import AbortableProcessGroup

Transfer = Iterator[int]
"""A transfer under way: bytes received by each part of it, complete when exhausted.

Raises `PeerLostError` if a peer is lost or the ranks abandon the generation.
"""


def complete(transfer: Transfer) -> int:
    """Wait for a transfer; returns the bytes received."""
    return sum(transfer)


class Transport(Protocol):
    """Moves tensors from the rank `source` to one peer or several.

    1. The source calls `send` and each peer calls `recv`, in the same order, with tensors of equal
       shapes and dtypes.
    2. Both start the transfer and return without waiting. Each side then iterates over its own.
    3. The tensors given to `send` stay unchanged until all peers have confirmed their receipt:
       with `is_zero_copy` the peers read them in place.
    4. To abort, stop iterating and close the group.

    is_zero_copy  tensors may have any strides and are copied once; otherwise they are contiguous
    """

    source: int
    is_zero_copy: bool

    def send(self, tensors: Sequence[torch.Tensor]) -> Transfer:
        """Start to send `tensors`; called by the source."""
        ...

    def recv(self, tensors: Sequence[torch.Tensor]) -> Transfer:
        """Start to fill `tensors` with those of the source; called by each peer."""
        ...


class ProcessGroupTransport:
    """Broadcasts over a process group; works between any two hosts."""

    is_zero_copy = False

    def __init__(self, group: AbortableProcessGroup, source: int) -> None:
        self.source, self._group = source, group

    def send(self, tensors: Sequence[torch.Tensor]) -> Transfer:
        """Start to broadcast `tensors`."""
        return self._finish([(self._start(tensor), 0) for tensor in tensors])

    def recv(self, tensors: Sequence[torch.Tensor]) -> Transfer:
        """Start to receive into `tensors`."""
        return self._finish([(self._start(tensor), tensor.nbytes) for tensor in tensors])

    def _start(self, tensor: torch.Tensor) -> dist.Work:
        return self._group.start_broadcast(tensor, self.source)

    def _finish(self, works: Sequence[tuple[dist.Work, int]]) -> Transfer:
        for work, received_bytes in works:
            self._group.wait(work)
            yield received_bytes
