"""Timed blocks. One is made for every record, so each line here is paid for a thousand times a
second."""

from __future__ import annotations

from math import nan
from typing import TYPE_CHECKING, Any

from ._workload import Work

if TYPE_CHECKING:
    from ._buffer import Row
    from ._clocks import CudaClock
    from .monitor import Monitor


class Span:
    """A block that becomes one record when it ends without an exception.

    While it is the innermost open one, `waiting` blocks are credited to it. Once ended it goes
    into the buffer as it is, and the sender asks it for its times.
    """

    __slots__ = (
        "_monitor", "_outer", "_start", "_stop", "blocked", "chunk", "microbatch", "op", "peer",
        "plan_version", "step", "work",
    )  # fmt: skip
    _outer: Span | None
    step: int
    plan_version: int

    def __init__(
        self, monitor: Monitor, op: int, microbatch: int, chunk: int, peer: int, work: Work | None
    ) -> None:
        self._monitor = monitor
        self.op = op
        self.microbatch = microbatch
        self.chunk = chunk
        self.peer = peer
        self.work = work
        self.blocked = False

    def leave(self) -> None:
        """End without a record."""
        self._monitor._open = self._outer

    def stamp(self) -> Any:
        """The present, on the clock that times this span."""
        raise NotImplementedError

    def add_wait(self, start: Any, stop: Any) -> None:
        """Count the time between two stamps as waiting."""
        raise NotImplementedError

    def ready(self) -> bool:
        """Whether the times may be read."""
        raise NotImplementedError

    def times(self) -> tuple[float, float]:
        """`compute_ms` and `wait_ms`; to be asked once."""
        raise NotImplementedError

    def row(self) -> Row:
        """What `Monitor.record` would have put into the buffer."""
        return (
            self.plan_version, self.step, self.microbatch, self.chunk, self.op, *self.times(),
            -1, -1, -1, -1, self.peer,
        )  # fmt: skip


class HostSpan(Span):
    """Timed by the host's monotonic clock."""

    __slots__ = ("_wait_ns",)

    def __enter__(self) -> HostSpan:
        monitor = self._monitor
        self._outer = monitor._open
        monitor._open = self
        self._wait_ns = -1
        self._start = monitor._now_ns()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        monitor = self._monitor
        self._stop = monitor._now_ns()
        monitor._open = self._outer
        if kind is None:
            self.step = monitor.current_step
            self.plan_version = monitor.plan_version
            monitor._recorded = True
            monitor._put(self)

    def stamp(self) -> int:
        return self._monitor._now_ns()

    def add_wait(self, start: int, stop: int) -> None:
        self._wait_ns = max(0, self._wait_ns) + stop - start

    def ready(self) -> bool:
        return True

    def times(self) -> tuple[float, float]:
        elapsed_ns: int = self._stop - self._start
        if self._wait_ns < 0:
            return elapsed_ns * 1e-6, nan
        return max(0, elapsed_ns - self._wait_ns) * 1e-6, self._wait_ns * 1e-6


class DeviceSpan(Span):
    """Timed by events in the current CUDA stream, which the sender reads once they are past."""

    __slots__ = ("_clock", "_waits")
    _clock: CudaClock

    def __enter__(self) -> DeviceSpan:
        monitor = self._monitor
        assert monitor._device is not None
        self._clock = monitor._device
        self._outer = monitor._open
        monitor._open = self
        self._waits: list[tuple[Any, Any]] = []
        self._start = self.stamp()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        monitor = self._monitor
        monitor._open = self._outer
        if kind is not None:
            return
        self._stop = self.stamp()
        if self._start is not None and self._stop is not None:
            self.step = monitor.current_step
            self.plan_version = monitor.plan_version
            monitor._recorded = True
            monitor._put(self)

    def stamp(self) -> Any:
        try:
            return self._clock.stamp()
        except Exception as error:  # noqa: BLE001 the boundary: a device in trouble fails training by itself
            self._monitor._failures.add("a CUDA event", error)
            return None

    def add_wait(self, start: Any, stop: Any) -> None:
        if start is not None and stop is not None:
            self._waits.append((start, stop))

    def ready(self) -> bool:
        return bool(self._stop.query())

    def times(self) -> tuple[float, float]:
        elapsed_ms = float(self._start.elapsed_time(self._stop))
        waits = [float(start.elapsed_time(stop)) for start, stop in self._waits]
        self._clock.recycle(self._start, self._stop)
        for pair in self._waits:
            self._clock.recycle(*pair)
        if not waits:
            return elapsed_ms, nan
        return max(0.0, elapsed_ms - sum(waits)), sum(waits)


class Waiting:
    """A block in which the innermost open span waits for others."""

    __slots__ = ("_monitor", "_span", "_start")

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def __enter__(self) -> None:
        span = self._monitor._open
        if span is None or span.blocked:  # a wait within a wait is counted by the outer one
            self._span = None
            return
        span.blocked = True
        self._span = span
        self._start = span.stamp()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        span = self._span
        if span is not None:
            span.add_wait(self._start, span.stamp())
            span.blocked = False


class Exchange:
    """A P2P or collective block: a record of its own, and waiting of the span around it."""

    __slots__ = ("_span", "_waiting")

    def __init__(self, span: Span, waiting: Waiting) -> None:
        self._span: Any = span
        self._waiting = waiting

    def __enter__(self) -> None:
        self._waiting.__enter__()
        self._span.__enter__()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._span.__exit__(kind, error, trace)
        self._waiting.__exit__(kind, error, trace)


class Step:
    """A training step. It is a record only if there was none within it."""

    __slots__ = ("_monitor", "_span")

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def __enter__(self) -> None:
        self._span = self._monitor._begin_step()
        self._span.__enter__()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        monitor, span = self._monitor, self._span
        if monitor._recorded:
            span.leave()
        else:
            span.microbatch = 0
            span.__exit__(kind, error, trace)
        monitor.current_step += 1
        if kind is None:
            monitor.between_steps()
