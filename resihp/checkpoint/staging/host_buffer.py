"""Host memory for checkpoints: allocation, and page advice to the kernel.

Direct writes from small pages take twice as long, because a disk request holds a limited number of
pages. `collapse` moves tensors to huge pages at unchanged addresses (MADV_COLLAPSE, Linux 6.1);
pages that cannot be moved stay as they are. Copies into fresh memory are slow, because the kernel
finds and clears each page first; `populate` does that in advance and keeps the contents
(MADV_POPULATE_WRITE, Linux 5.14).
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import sys
import weakref
from collections.abc import Callable, Sequence
from threading import Event, Thread

import torch
from torch import Tensor

from resihp._process_limits import BACKGROUND_NICENESS, lower_priority
from resihp._shutdown import start_thread
from resihp.contracts import CheckpointError

_log = logging.getLogger("resihp.checkpoint")

_HUGE_BYTES, _STRETCH_BYTES = 2 << 20, 32 << 20
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 14, 23, 25
_PORTABLE = 1
"""Flag of `cudaHostRegister`: pinned for all devices."""


class HostBuffer:
    """`nbytes` bytes at an address that is a multiple of 4096, as tensor and as memory view.

    Filled with zeros. The kernel allocates pages at the first access, for pinned memory at once.

    huge  use huge pages, if possible; not for buffers that are used in small parts
    """

    def __init__(self, nbytes: int, *, pinned: bool = False, huge: bool = True) -> None:
        memory = _map(nbytes, huge=huge)
        exporter = _pinned(memory) if pinned else memory
        with torch.inference_mode(False):  # other threads write into it, and in other modes
            self.tensor = torch.frombuffer(exporter, dtype=torch.uint8)[:nbytes]
        self.view: memoryview = self.tensor.numpy().data


def begin(work: Callable[[Sequence[Tensor], Event], None], tensors: Sequence[Tensor]) -> None:
    """Run `collapse` or `populate` in a thread of low priority; it stops at program end."""
    is_over = Event()

    def run() -> None:
        lower_priority(BACKGROUND_NICENESS)
        work(tensors, is_over)

    if tensors and sys.platform == "linux":
        start_thread(Thread(target=run, name="resihp-pages", daemon=True), is_over.set)


def collapse(tensors: Sequence[Tensor], is_over: Event) -> None:
    """Move CPU tensors to huge pages, as far as whole huge pages belong to one tensor alone."""
    for tensor in (one for one in tensors if one.device.type == "cpu"):
        if is_over.is_set():
            return
        start = -(-tensor.data_ptr() // _HUGE_BYTES) * _HUGE_BYTES
        nbytes = (tensor.data_ptr() + tensor.nbytes) // _HUGE_BYTES * _HUGE_BYTES - start
        if nbytes > 0:
            _advise(start, nbytes, _MADV_HUGEPAGE)
            _advise(start, nbytes, _MADV_COLLAPSE)


def populate(buffers: Sequence[Tensor], is_over: Event) -> None:
    """Allocate the pages of buffers that are not pinned, in stretches of 32 MiB."""
    for buffer in (one for one in buffers if not one.is_pinned()):
        for at in range(0, buffer.nbytes, _STRETCH_BYTES):
            nbytes = min(_STRETCH_BYTES, buffer.nbytes - at)
            if is_over.is_set() or not _advise(
                buffer.data_ptr() + at, nbytes, _MADV_POPULATE_WRITE
            ):
                return


def _map(nbytes: int, *, huge: bool) -> mmap.mmap:
    """Map anonymous memory, excluded from forks (no copy on write)."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(nbytes, 1), flags=flags)
    for advice in ("MADV_HUGEPAGE" if huge else "MADV_NOHUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            memory.madvise(getattr(mmap, advice))
    return memory


def _pinned(memory: mmap.mmap) -> ctypes.Array[ctypes.c_ubyte]:
    """Register memory with the device, until the view that is returned is freed.

    torch's own allocator of pinned memory rounds sizes up to a power of two.
    """
    view = (ctypes.c_ubyte * len(memory)).from_buffer(memory)
    start = ctypes.addressof(view)
    code = int(torch.cuda.cudart().cudaHostRegister(start, len(memory), _PORTABLE))
    if code:
        reason = f"{len(memory)} bytes of host memory cannot be pinned (CUDA error {code})"
        raise CheckpointError(reason)
    # Holds the mapping: one that is freed is unmapped before its own finalizers are called.
    unregister = weakref.finalize(view, _unpin, memory, start, torch.cuda.current_device())
    unregister.atexit = False  # the device's context may have ended by then
    return view


def _unpin(memory: mmap.mmap, start: int, device: int) -> None:
    """Undo the registration; called in any thread, which may have another current device."""
    with torch.cuda.device(device):
        code = int(torch.cuda.cudart().cudaHostUnregister(start))
    if code:
        _log.warning(
            "%d bytes of host memory stay registered with the device (CUDA error %d)",
            len(memory),
            code,
        )


def _advise(start: int, nbytes: int, advice: int) -> bool:
    """Call `madvise` without the interpreter lock; True if the kernel accepted the advice."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    done: int = madvise(start, nbytes, advice)
    return done == 0
