"""Captures of CUDA graphs, which other threads must not break."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache
from typing import Any

_THREAD_LOCAL = 1
"""`CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`: captures of other threads are none of this thread's."""


def ignore_captures() -> None:
    """Let this thread use CUDA while another one captures a graph in the default mode, `global`: a
    query of an event would otherwise fail, and the capture with it.

    To be called by a background thread of a process that uses CUDA; a second call changes nothing.
    """
    with suppress(OSError, AttributeError):  # ROCm, or a driver without the call
        _exchange_mode()(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))


@cache
def _exchange_mode() -> Any:
    return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
