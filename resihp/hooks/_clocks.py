"""Clocks: the host's monotonic clock, and events in a CUDA stream."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

from resihp._stream_captures import ignore_captures

_REFERENCE_MS = 10_000.0
"""Time between two events beyond which the device's 32-bit difference is too coarse."""


@dataclass(frozen=True)
class HostClock:
    """Monotonic nanoseconds of the host."""

    now_ns: Callable[[], int] = perf_counter_ns


class CudaClock:
    """Events in the current CUDA stream; they are read later, by the sender's thread.

    No call here waits for the device. Events are reused, because making one costs more than
    recording it. While the current stream is being captured into a graph no time can be measured,
    and `stamp` returns None.

    cuda     the module `torch.cuda` or a stand-in
    handles  returns the handle of a device's current stream; by `cuda` where None, which makes an
             object for each call
    """

    def __init__(self, cuda: Any, handles: Callable[[int], int] | None = None) -> None:
        self._cuda, self._handles = cuda, handles
        self._device = cuda.current_device()
        self._streams: dict[int, Any] = {}
        self._free: deque[Any] = deque()
        self._reference: Any = None
        self._reference_ms = 0.0

    def stamp(self) -> Any:
        """Record an event at the end of the current stream. Called by the training thread."""
        handles = self._handles
        if self._cuda.is_current_stream_capturing():
            return None
        try:
            event = self._free.pop()
        except IndexError:
            event = self._cuda.Event(enable_timing=True)
        if handles is None:
            event.record(self._cuda.current_stream())
            return event
        handle = handles(self._device)
        try:
            stream = self._streams[handle]
        except KeyError:
            stream = self._streams[handle] = self._cuda.current_stream(self._device)
        event.record(stream)
        return event

    def stream(self) -> int:
        """Return the handle of the current stream."""
        handles = self._handles
        if handles is not None:
            return handles(self._device)
        return int(self._cuda.current_stream().cuda_stream)

    def adopt_thread(self) -> None:
        """Set the device of the calling background thread: its first query would otherwise create a
        context on device 0, of hundreds of megabytes, and end a capture of a graph."""
        self._cuda.set_device(self._device)
        ignore_captures()

    def device_uuid(self) -> str | None:
        """Return the driver's name of the device; None where torch does not tell it."""
        properties = getattr(self._cuda, "get_device_properties", None)
        uuid = properties and getattr(properties(self._device), "uuid", None)
        return f"GPU-{uuid}" if uuid else None

    def position_ms(self, event: Any) -> float:
        """Return the time of an event that has passed, since the first one asked for. Called by the
        sender's thread."""
        if self._reference is None:
            self._reference = event
            return self._reference_ms
        since_ms = float(self._reference.elapsed_time(event))
        position_ms = self._reference_ms + since_ms
        if since_ms > _REFERENCE_MS:
            self._free.append(self._reference)
            self._reference, self._reference_ms = event, position_ms
        return position_ms

    def recycle(self, *events: Any) -> None:
        """Take back events whose times have been read."""
        self._free.extend(event for event in events if event is not self._reference)


def running_cuda() -> CudaClock | None:
    """Return a clock for CUDA if this process uses it already; never load or initialize it."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return None
    handles = getattr(getattr(torch, "_C", None), "_cuda_getCurrentRawStream", None)
    return CudaClock(cuda, handles)
