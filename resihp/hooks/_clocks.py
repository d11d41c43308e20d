"""What time is told by: the host's monotonic clock, or events in a CUDA stream."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any


@dataclass(frozen=True)
class HostClock:
    """Monotonic nanoseconds of the host."""

    now_ns: Callable[[], int] = perf_counter_ns


class CudaClock:
    """Events in the current CUDA stream; they are read later, from the sender's thread.

    No call here waits for the device. `cuda` is the module `torch.cuda`, or what behaves like it.
    Events are used again, because making one costs more than recording it. While the current
    stream is being captured into a graph there is no time to tell, and `stamp` gives None.
    """

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._device = cuda.current_device()
        self._free: deque[Any] = deque()

    def stamp(self) -> Any:
        """An event at the present end of the current stream. Training thread."""
        if self._cuda.is_current_stream_capturing():
            return None
        try:
            event = self._free.pop()
        except IndexError:
            event = self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def adopt_thread(self) -> None:
        """Let the calling thread use this device, lest its first query opens a context on
        device 0, which costs hundreds of megabytes there."""
        self._cuda.set_device(self._device)

    def recycle(self, *events: Any) -> None:
        """Take back events whose times have been read."""
        self._free.extend(events)


def running_cuda() -> CudaClock | None:
    """A clock for CUDA if this process computes with it already; never loads or starts it."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return None
    return CudaClock(cuda)
