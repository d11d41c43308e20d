"""Puts tensors on huge pages where they are: direct writes out of small pages take twice as long.

A disk's request holds a limited number of pages, so that out of pages of 4 KiB it takes many. The
kernel moves the memory behind the same addresses (`madvise`, MADV_COLLAPSE of Linux 6.1); what it
cannot move stays as it is.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from threading import Thread

from torch import Tensor

_HUGE = 2 << 20
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25


def collapse(tensors: Sequence[Tensor]) -> None:
    """Begin to, in a thread of its own; tensors on devices and small ones are left alone."""
    large = [tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.nbytes >= _HUGE]
    if large and sys.platform == "linux":
        Thread(target=_collapse, args=(large,), name="resihp-huge-pages", daemon=True).start()


def _collapse(tensors: Sequence[Tensor]) -> None:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for tensor in tensors:
        start = -(-tensor.data_ptr() // _HUGE) * _HUGE
        nbytes = (tensor.data_ptr() + tensor.nbytes) // _HUGE * _HUGE - start
        if nbytes > 0:  # whole huge pages of this tensor alone
            madvise(start, nbytes, _MADV_HUGEPAGE)
            madvise(start, nbytes, _MADV_COLLAPSE)
