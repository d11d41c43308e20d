"""Timed blocks. One is made per record, a thousand per second: each line here counts.

A callable is loaded from its attribute before the call, which the interpreter then specializes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import nan
from threading import get_ident, get_native_id
from typing import Any, Self

from resihp.contracts import ContractError

from ._clocks import CudaClock, running_cuda
from ._record import Record, RecordFields
from ._stats import FailureLog
from ._workload import Work

FORWARD, _P2P = 0, 3
"""`Op.FORWARD` and `Op.P2P` as ints, which compare faster than the enum."""


class Recording:
    """State that the blocks of one monitor share.

    step, plan_version  of the next record
    open                innermost open block; None outside of all
    recorded            a record was made in the present step
    next_index          microbatches so far in the present step, by `chunk << 3 | op`
    now_ns              the host's clock
    device              clock of the device; None where blocks are timed by the host's clock
    put                 takes a finished block
    on_first_step       called as the first step, or pass outside of steps, begins, and then None
    thread_id           the training thread, by the system's number: the one that runs the first
                        step, and until then the one that made the monitor
    loop_thread         the same by Python's number, and pass_thread that of the last pass
    """

    open: Span | None
    device: CudaClock | None
    kind: type[HostSpan] | type[DeviceSpan]
    put: Callable[[RecordFields | Span], None]
    on_first_step: Callable[[], None] | None

    def __init__(
        self,
        failures: FailureLog,
        now_ns: Callable[[], int],
        device: CudaClock | None,
        *,
        look_for_cuda: bool,
    ) -> None:
        self.step = self.plan_version = 0
        self.open = None
        self.recorded = False
        self.next_index: dict[int, int] = {}
        self.now_ns, self.failures = now_ns, failures
        self.on_first_step = None
        self.pass_thread = 0
        self._adopt_thread()
        self.use(device)
        self._look_for_cuda = look_for_cuda

    def begin_step(self) -> HostSpan | DeviceSpan:
        """Return the span of a step that begins; CUDA is looked for until it is in use."""
        self.next_index.clear()
        self.recorded = False
        self.begin()
        if self._look_for_cuda:
            try:
                self.use(running_cuda())
            except Exception as error:  # noqa: BLE001 the boundary: the host's clock is used instead
                self.failures.add("looking for CUDA", error)
                self._look_for_cuda = False
        return self.kind(self, FORWARD, -1, 0, -1, None)

    def begin(self) -> None:
        """Take this thread for the loop's, if the first step or pass begins now."""
        if self.on_first_step is not None:
            self._adopt_thread()
            self.on_first_step()
            self.on_first_step = None

    def use(self, device: CudaClock | None) -> None:
        """Time blocks by events on `device`; None: by the host's clock, until CUDA is in use."""
        self.device = device
        self.kind = HostSpan if device is None else DeviceSpan
        self._look_for_cuda = device is None

    def reset(self, on_first_step: Callable[[], None]) -> None:
        """Drop the open block and the device, as in a forked child."""
        self.on_first_step = on_first_step
        if self.device is not None:
            self.use(None)
        self.open = None
        self._adopt_thread()

    def _adopt_thread(self) -> None:
        self.thread_id, self.loop_thread = get_native_id(), get_ident()


class TimedBlock:
    """A `with` block that may also be entered by `start` and left by `stop`, as callbacks do.

    A block whose code raised is left by `cancel` instead, and makes no record. `stop` and `cancel`
    of a block that is not started, or has ended, do nothing: callbacks come in odd orders.
    """

    __slots__ = ("_is_started",)

    def __enter__(self) -> Any:
        raise NotImplementedError

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        raise NotImplementedError

    def start(self) -> Self:
        """Enter the block; return it."""
        self._is_started = True
        self.__enter__()
        return self

    def stop(self) -> None:
        """Leave the block."""
        if self._ends():
            self.__exit__(None, None, None)

    def cancel(self) -> None:
        """Leave the block without a record, as by an exception."""
        if self._ends():
            self.__exit__(Exception, None, None)

    def _ends(self) -> bool:
        """Return whether the block was entered by `start`, and count it as left."""
        is_started = getattr(self, "_is_started", False)
        self._is_started = False
        return is_started


class Span(TimedBlock):
    """A block that becomes one record when it ends without an exception.

    While it is the innermost open block, `Waiting` blocks are credited to it. Once ended it is
    itself the entry of the buffer, and the sender reads its times.

    waiting              a `Waiting` block in it is open
    is_waiting_measured  no `Waiting` block is no waiting, instead of waiting that is not known
    """

    __slots__ = (
        "_outer", "_recording", "_start", "_stop", "_wait_start", "chunk", "is_waiting_measured",
        "microbatch", "op", "peer", "plan_version", "step", "waiting", "work",
    )  # fmt: skip
    _outer: Span | None
    step: int
    plan_version: int

    def __init__(
        self,
        recording: Recording,
        op: int,
        microbatch: int,
        chunk: int,
        peer: int,
        work: Work | None,
    ) -> None:
        self._recording = recording
        self.op = op
        self.microbatch = microbatch
        self.chunk = chunk
        self.peer = peer
        self.work = work
        self.waiting = self.is_waiting_measured = False

    def start(self) -> Self:
        """Enter the block, once: the buffer may still hold it when it has ended."""
        if not hasattr(self, "_is_started"):
            return super().start()
        error = ContractError("block", "was started before; each pass needs one of its own")
        self._recording.failures.add("a timed block", error)
        return self

    def leave(self) -> None:
        """End without a record, and with this the blocks inside it that nobody has ended. One that
        ends after a block around it ends nothing but itself."""
        recording = self._recording
        if recording.open is self:
            recording.open = self._outer
            return
        span, seen = recording.open, {self}
        while span is not None and span not in seen:
            seen.add(span)
            span = span._outer
        if span is not None:  # this one, or one that was entered twice
            recording.open = self._outer

    def leave_if_open(self) -> None:
        """End without a record if this is the innermost open block."""
        if self._recording.open is self:
            self.leave()

    def begin_wait(self) -> None:
        """Count the time from now until `end_wait` as waiting; to be called while `waiting` is not
        set, which this does."""
        raise NotImplementedError

    def end_wait(self) -> None:
        """End what `begin_wait` began."""
        raise NotImplementedError

    def ready(self) -> bool:
        """Return whether the times can be read."""
        raise NotImplementedError

    def times(self) -> tuple[float, float]:
        """`compute_ms` and `wait_ms`; to be read once."""
        raise NotImplementedError

    def settle(self) -> None:
        """Read the times of a span that is ready, and hold nothing of the device any more."""

    def start_ms(self) -> float:
        """Time at which the block was entered; NaN where it is not known."""
        return nan

    def record(self, tokens: int, sequences: int, sum_sq_len: int, max_len: int) -> Record:
        """Return the record of this span, with the work in it."""
        start_ms = self.start_ms() if self.op == _P2P and self.peer >= 0 else nan
        compute_ms, wait_ms = self.times()
        return Record(
            self.plan_version, self.step, self.microbatch, self.chunk, self.op, compute_ms, wait_ms,
            tokens, sequences, sum_sq_len, max_len, self.peer, start_ms,
        )  # fmt: skip


class HostSpan(Span):
    """A block timed by the host's monotonic clock."""

    __slots__ = ("_wait_ns",)

    def __enter__(self) -> HostSpan:
        recording = self._recording
        self._outer = recording.open
        recording.open = self
        self._wait_ns = 0
        now_ns = recording.now_ns
        self._start = now_ns()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        recording = self._recording
        now_ns = recording.now_ns
        stop_ns = now_ns()
        if recording.open is self:
            recording.open = self._outer
        else:
            self.leave()
        if kind is None:
            self._stop = stop_ns
            self.step = recording.step
            self.plan_version = recording.plan_version
            recording.recorded = True
            put = recording.put
            put(self)

    def own_ns(self) -> int:
        """Time since the block was entered, without waiting."""
        elapsed_ns: int = self._recording.now_ns() - self._start
        return elapsed_ns - self._wait_ns

    def begin_wait(self) -> None:
        self.waiting = True
        now_ns = self._recording.now_ns
        self._wait_start = now_ns()

    def end_wait(self) -> None:
        now_ns = self._recording.now_ns
        self._wait_ns += now_ns() - self._wait_start
        self.waiting, self.is_waiting_measured = False, True

    def ready(self) -> bool:
        return True

    def start_ms(self) -> float:
        return self._start * 1e-6

    def times(self) -> tuple[float, float]:
        elapsed_ns: int = self._stop - self._start
        if not self.is_waiting_measured:
            return elapsed_ns * 1e-6, nan
        return max(0, elapsed_ns - self._wait_ns) * 1e-6, self._wait_ns * 1e-6


class ThreadSpan(HostSpan):
    """A block in another thread than the loop's: never the innermost open one."""

    __slots__ = ()

    def __enter__(self) -> ThreadSpan:
        self._wait_ns = 0
        self._start = self._recording.now_ns()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self._stop = self._recording.now_ns()
            self.step, self.plan_version = self._recording.step, self._recording.plan_version
            self._recording.put(self)


class DeviceSpan(Span):
    """A block timed by events in the current CUDA stream; the sender reads them later."""

    __slots__ = ("_clock", "_settled", "_waits")
    _clock: CudaClock
    _settled: tuple[float, float] | None

    def __enter__(self) -> DeviceSpan:
        recording = self._recording
        assert recording.device is not None
        self._clock = recording.device
        self._outer = recording.open
        recording.open = self
        self._waits: list[tuple[Any, Any]] = []
        self._settled = None
        self._start = self._stamp()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        recording = self._recording
        self.leave()
        if kind is not None:
            return
        self._stop = self._stamp()
        if self._start is not None and self._stop is not None:
            self.step = recording.step
            self.plan_version = recording.plan_version
            recording.recorded = True
            put = recording.put
            put(self)

    def begin_wait(self) -> None:
        self.waiting = True
        self._wait_start = self._stamp()

    def end_wait(self) -> None:
        start, stop = self._wait_start, self._stamp()
        if start is not None and stop is not None:
            self._waits.append((start, stop))
        self.waiting = False

    def ready(self) -> bool:
        return self._settled is not None or bool(self._stop.query())

    def settle(self) -> None:
        if self._settled is None and self.op != _P2P:  # the start of a transfer is told as well
            self._settled = self.times()
            self._start = self._stop = self._wait_start = None
            self._waits = []

    def start_ms(self) -> float:
        return self._clock.position_ms(self._start)

    def times(self) -> tuple[float, float]:
        if self._settled is not None:
            return self._settled
        elapsed_ms = float(self._start.elapsed_time(self._stop))
        waits = [float(start.elapsed_time(stop)) for start, stop in self._waits]
        self._clock.recycle(self._start, self._stop)
        for pair in self._waits:
            self._clock.recycle(*pair)
        if not waits and not self.is_waiting_measured:
            return elapsed_ms, nan
        return max(0.0, elapsed_ms - sum(waits)), sum(waits)

    def _stamp(self) -> Any:
        try:
            return self._clock.stamp()
        except Exception as error:  # noqa: BLE001 the boundary: a broken device fails training by itself
            self._recording.failures.add("a CUDA event", error)
            return None


class JoinedSpan(Span):
    """Finished spans that are parts of one pass, as the two halves of a split backward pass."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Span]) -> None:
        last = parts[-1]
        super().__init__(
            last._recording, last.op, last.microbatch, last.chunk, last.peer, parts[0].work
        )
        self.step, self.plan_version = last.step, last.plan_version
        self._parts = parts

    def ready(self) -> bool:
        return all(part.ready() for part in self._parts)

    def settle(self) -> None:
        for part in self._parts:
            part.settle()

    def times(self) -> tuple[float, float]:
        own, waits = zip(*(part.times() for part in self._parts), strict=True)
        return sum(own), sum(waits)


class Waiting(TimedBlock):
    """A block in which the innermost open span waits for other ranks."""

    __slots__ = ("_recording", "_span")

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def __enter__(self) -> None:
        span = self._recording.open
        if span is None or span.waiting:  # the outer wait counts nested ones
            self._span = None
            return
        self._span = span
        span.begin_wait()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        span = self._span
        if span is not None:
            span.end_wait()


class Exchange(TimedBlock):
    """A P2P or collective block: a record of its own, and waiting of the span around it."""

    __slots__ = ("_span", "_waiting")

    def __init__(self, recording: Recording, op: int, peer: int) -> None:
        outer = recording.open
        index, chunk = (-1, 0) if outer is None else (outer.microbatch, outer.chunk)
        self._span: Any = recording.kind(recording, op, index, chunk, peer, None)
        self._waiting = Waiting(recording)

    def __enter__(self) -> None:
        self._waiting.__enter__()
        self._span.__enter__()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._span.__exit__(kind, error, trace)
        self._waiting.__exit__(kind, error, trace)


class StepSpan(TimedBlock):
    """A training step. It becomes a record only if none was made within it.

    `after` is called once the step has ended without an exception.
    """

    __slots__ = ("_after", "_recording", "_span")

    def __init__(self, recording: Recording, after: Callable[[], None]) -> None:
        self._recording, self._after = recording, after

    def __enter__(self) -> None:
        self._span = self._recording.begin_step()
        self._span.__enter__()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        recording, span = self._recording, self._span
        if recording.recorded:
            span.leave()
        else:
            span.microbatch = 0
            span.__exit__(kind, error, trace)
        recording.step += 1
        if kind is None:
            self._after()
