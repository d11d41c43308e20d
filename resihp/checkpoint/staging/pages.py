"""What the kernel is told of memory: to put tensors on huge pages, to find pages beforehand.

Direct writes out of small pages take twice as long: a disk's request holds a limited number of
pages, so that out of pages of 4 KiB it takes many. The kernel moves the memory behind the same
addresses (`madvise`, MADV_COLLAPSE of Linux 6.1); what it cannot move stays as it is. Fresh memory
is copied into slowly, as each page is found and cleared first; MADV_POPULATE_WRITE (Linux 5.14)
does that beforehand and leaves what has been written.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from threading import Event, Thread

from torch import Tensor

from resihp._shutdown import start_thread

from ..priority import FAR_BELOW, be_nice

_HUGE, _STRETCH = 2 << 20, 32 << 20
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 14, 23, 25


def begin(work: Callable[[Sequence[Tensor], Event], None], tensors: Sequence[Tensor]) -> None:
    """Call one of the functions below in a thread far below training, until the program ends."""
    is_over = Event()

    def run() -> None:
        be_nice(FAR_BELOW)
        work(tensors, is_over)

    if tensors and sys.platform == "linux":
        start_thread(Thread(target=run, name="resihp-pages", daemon=True), is_over.set)


def collapse(tensors: Sequence[Tensor], is_over: Event) -> None:
    """Move whole huge pages that belong to one tensor alone; what is on a device stays there."""
    for tensor in (one for one in tensors if one.device.type == "cpu"):
        if is_over.is_set():
            return
        start = -(-tensor.data_ptr() // _HUGE) * _HUGE
        nbytes = (tensor.data_ptr() + tensor.nbytes) // _HUGE * _HUGE - start
        if nbytes > 0:
            _advise(start, nbytes, _MADV_HUGEPAGE)
            _advise(start, nbytes, _MADV_COLLAPSE)


def populate(buffers: Sequence[Tensor], is_over: Event) -> None:
    """Find pages, a stretch at a time; they keep what has been written to them.

    From the end on, where the copy begins beside a disk that writes from the tensors. Pinned
    buffers have theirs.
    """
    for buffer in (one for one in buffers if not one.is_pinned()):
        for at in reversed(range(0, buffer.nbytes, _STRETCH)):
            nbytes = min(_STRETCH, buffer.nbytes - at)
            if is_over.is_set() or not _advise(
                buffer.data_ptr() + at, nbytes, _MADV_POPULATE_WRITE
            ):
                return


def _advise(start: int, nbytes: int, advice: int) -> bool:
    """Whether the kernel took the advice; others run meanwhile."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    done: int = madvise(start, nbytes, advice)
    return done == 0
