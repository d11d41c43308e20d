"""Host cache: blocks of host memory of a stated size, shared by all checkpoints in flight.

A chunk takes a block when it is copied and returns it once every level has read it, so that the
copier fills the cache while the levels drain it, and a state of any size passes through. Blocks
return in any order (a level may keep an image, a copy may begin at the file's other end), so that
they are lent from a heap and not in a strict circle; the lowest first, so that memory which is
never needed is never touched.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right

from torch import Tensor

from ..format.index import CHUNK_BYTES
from .host_buffer import HostBuffer

BLOCK_BYTES = CHUNK_BYTES
"""A block holds one chunk."""


class HostCache:
    """Blocks of 4 MiB; callers hold the lock of the checkpoints that share it.

    pinned    allocate page-locked memory, for copies from a device
    capacity  number of blocks
    returned  number of times that a block has been returned
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._buffers: list[HostBuffer] = []
        self._starts: list[int] = []
        self._free: list[int] = []
        self.capacity = self.returned = 0

    @property
    def free(self) -> int:
        """Number of blocks that no chunk uses."""
        return len(self._free)

    @property
    def is_idle(self) -> bool:
        """True if no chunk uses a block."""
        return len(self._free) == self.capacity

    def grow(self, blocks: int) -> Tensor | None:
        """Raise the capacity to `blocks`; returns the memory that was added, None if none was.

        An idle cache is allocated anew, as one contiguous region; the old one is dropped first.
        """
        if blocks <= self.capacity:
            return None
        if self.is_idle:
            self._buffers, self._starts, self._free, self.capacity = [], [], [], 0
        added = HostBuffer((blocks - self.capacity) * BLOCK_BYTES, pinned=self._pinned)
        self._buffers.append(added)
        self._starts.append(self.capacity)
        for block in range(self.capacity, blocks):
            heapq.heappush(self._free, block)
        self.capacity = blocks
        return added.tensor

    def take(self) -> int | None:
        """Return the lowest free block; None if all are in use."""
        return heapq.heappop(self._free) if self._free else None

    def put_back(self, block: int) -> None:
        """Return a block."""
        heapq.heappush(self._free, block)
        self.returned += 1

    def view(self, block: int) -> memoryview:
        """View the bytes of a block."""
        buffer, start = self._place(block)
        return buffer.view[start : start + BLOCK_BYTES]

    def tensor(self, block: int, blocks: int = 1) -> Tensor:
        """View a block, or several adjacent ones allocated together, as a tensor of bytes."""
        buffer, start = self._place(block)
        return buffer.tensor[start : start + blocks * BLOCK_BYTES]

    def _place(self, block: int) -> tuple[HostBuffer, int]:
        number = bisect_right(self._starts, block) - 1
        return self._buffers[number], (block - self._starts[number]) * BLOCK_BYTES
