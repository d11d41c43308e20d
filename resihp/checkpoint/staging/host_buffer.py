"""Host memory that is allocated once, aligned for direct I/O, pinned on request."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from ..format.checksum import ROW_BYTES


class HostBuffer:
    """`nbytes` bytes that start at a multiple of 4096; the same memory as tensor and as view.

    Zeros, whose pages the kernel finds when they are first touched; pinned ones at once.
    """

    def __init__(self, nbytes: int, *, pinned: bool = False) -> None:
        self.tensor = _pinned(nbytes) if pinned else _mapped(nbytes)
        self.view: memoryview = self.tensor.numpy().data


def _mapped(nbytes: int) -> Tensor:
    """Huge pages where there are any; kept from forked children, so that no write has to copy."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(nbytes, 1), flags=flags)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            memory.madvise(getattr(mmap, advice))
    return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]


def _pinned(nbytes: int) -> Tensor:
    memory = torch.empty(nbytes + ROW_BYTES, dtype=torch.uint8, pin_memory=True)
    start = -memory.data_ptr() % ROW_BYTES
    return memory[start : start + nbytes].zero_()
