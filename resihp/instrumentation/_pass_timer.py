"""Passes and steps of one rank, opened and closed by callbacks of the training framework."""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import nan
from threading import RLock, get_ident
from typing import Any, TypeAlias, TypeVar, TypeVarTuple

import torch

from resihp.contracts import Op
from resihp.hooks._spans import HostSpan, JoinedSpan, Recording, Span, StepSpan
from resihp.hooks._workload import Work

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

Arguments: TypeAlias = tuple[Any, ...]
Keywords: TypeAlias = dict[str, Any]

FORWARD, BACKWARD, OPTIMIZER = int(Op.FORWARD), int(Op.BACKWARD), int(Op.OPTIMIZER)
_DATA = int(Op.DATA)
_MANY_PASSES, _MANY_TIMES = 1_000, 10
"""Forward passes of a step whose end has been missed, rather than accumulation of gradients: so
many, and so many times the most of any step before."""


backward_under_way: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
"""Returns the number of the backward pass that this thread runs; -1 outside of any."""


class PassTimer:
    """Times the passes of the steps of one rank.

    A step begins with its first pass and ends with `end_update`, unless the user's code encloses
    steps in `monitor.step()` blocks of its own. A pass that an exception ended leaves no record.
    Passes inside a block of the user's are left to that block. Forward passes are those of one
    thread, the first that runs any: another one may call the model too, as an actor does. Its
    backward passes may run in autograd's threads. After an update by another thread, and in a step
    of the user's, the next forward pass tells the thread anew.

    measures_waiting  whether all waiting for other ranks is seen; where it is not, the waiting of
                      passes is unknown instead of 0
    on_step_end       called at the end of each step with the number of its forward passes
    is_stopped        whether no pass begins any more
    passes            forward passes of the step under way
    thread            that of the forward passes; 0 if none is known
    under_way         the pass under way, or one that raised since, and `op` its kind; -1 if none
    """

    def __init__(
        self, recording: Recording, between_steps: Callable[[], None], *, measures_waiting: bool
    ) -> None:
        self.recording = recording
        self.measures_waiting = measures_waiting
        self.on_step_end: Callable[[int], None] | None = None
        self.passes = self._most_passes = self._counted_step = 0
        self.is_stopped = False
        self._between_steps = between_steps
        self._stream = -1
        self._data_ns, self._is_data_marked = 0, False
        self.under_way: Span | None = None
        self.op = -1
        self._step: StepSpan | None = None
        self.thread = 0
        self._lock = RLock()  # another thread may end a step while this one begins a pass
        self._ends_with_backward = self._is_backward_seen = False
        self._halves: dict[tuple[int, int], Span] = {}

    def begin(self, op: int, *, chunk: int = 0, index: int = -1, work: Work | None = None) -> int:
        """Begin a pass; return its microbatch. `index` -1: the number of earlier forward passes of
        this step; -1 is returned for a pass that is left to the user's block, for one of another
        thread, and after `stop`."""
        if self.is_stopped:
            return -1
        recording, thread = self.recording, get_ident()
        if op == FORWARD and thread != self.thread and not self._claims(thread):
            return -1
        with self._lock:
            if self.under_way is not None:
                self.drop()
            outer = recording.open
            if outer is None:
                self._step = StepSpan(recording, self._between_steps)
                self._step.__enter__()
            elif outer.microbatch >= 0 or outer.op != FORWARD:  # as `_is_step`, without a call
                return -1
            if recording.step != self._counted_step:
                self._report_passes()
            if index < 0 and op != OPTIMIZER:
                index = self.passes
            if op == FORWARD:
                self.passes += 1
                if self.passes >= _MANY_PASSES and self._step is not None:
                    self._warn_of_no_update()
                if self._data_ns:
                    self._record_data()
            elif op == BACKWARD:
                self._is_backward_seen = True
            recording.pass_thread = thread  # autograd may use one of its own
            device = recording.device
            self._stream = -1 if device is None else device.stream()
            span = recording.kind(recording, op, index, chunk, -1, work)
            span.__enter__()
            span.is_waiting_measured = self.measures_waiting
            self.under_way, self.op = span, op
            return index

    def identify(self, *, chunk: int, index: int, work: Work | None = None) -> None:
        """Say which pass is under way, and that this thread runs it, where that was not known as it
        began."""
        span = self.under_way
        if span is not None:
            span.chunk, span.microbatch = chunk, index
            span.work = span.work if work is None else work
            self.recording.pass_thread = get_ident()

    def end(self) -> None:
        """End the pass under way."""
        with self._lock:
            span = self.under_way
            if span is None:
                return
            self.under_way, self.op = None, -1
            span.__exit__(None, None, None)
        if self._ends_with_backward and span.op == BACKWARD:
            self._end_step()

    def end_half(self, *, is_last: bool) -> None:
        """End one half of a split backward pass, which becomes a record with the other half."""
        span = self.under_way
        if span is None:
            return
        recording = self.recording
        key = (span.chunk, span.microbatch)
        first = self._halves.pop(key, None)
        finished: list[Any] = []
        put, recording.put = recording.put, finished.append
        try:
            self.end()
        finally:
            recording.put = put
        whole: list[Any] = [first, *finished] if first is not None else finished
        if is_last:
            put(JoinedSpan(whole))
        else:
            self._halves[key] = whole[0] if first is None else JoinedSpan(whole)

    def drop(self) -> None:
        """End the pass under way, if there is one, without a record."""
        with self._lock:
            span = self.under_way
            if span is not None:
                self.passes -= span.op == FORWARD
                span.leave_if_open()  # not so after the end of the user's step block
                self.under_way, self.op = None, -1

    def begin_update(self) -> None:
        """Begin the optimizer's update; that of a parameter inside its backward pass is part of
        the pass, after which the step ends. A backward pass that is over has raised."""
        if self.op == BACKWARD and backward_under_way() >= 0:
            self._ends_with_backward = True
            return
        self.drop()
        if self.recording.open is not None:
            self.begin(OPTIMIZER)

    def end_update(self) -> None:
        """End the optimizer's update, and the step with it, also where the update ran the passes:
        `optimizer.step(closure)`."""
        if not self.recording.pass_thread:
            self.recording.failures.warn_once(
                "passes",
                "the optimizer of an instrumented model was stepped before any forward pass was "
                "seen: give `instrument` what the loop calls, the wrapped or compiled model",
            )
        if self.op == OPTIMIZER:
            self.end()
        if self.under_way is None:
            self._end_step()
        self._release()

    def end_step(self) -> None:
        """End the step where no update ends it, as one that a gradient scaler skipped."""
        self.drop()
        self._end_step()
        self._release()

    def stop(self) -> None:
        """End the step, and begin no pass from now on, as of outputs from before."""
        self.end_step()
        self.is_stopped = True
        self._between_steps = _nothing  # which holds the monitor, and that this timer

    def safely(self, callback: Callable[[*Ts], R]) -> Callable[[*Ts], R | None]:
        """Return `callback` for use in training code: its failure is counted, not raised. The
        compiler, which traces the hooks of gradients too, sees nothing of it."""
        failures, compiling = self.recording.failures, torch.compiler.is_compiling

        def call(*args: *Ts) -> R | None:
            if compiling():  # a constant for the compiler
                return None
            try:
                return callback(*args)
            except Exception as error:  # noqa: BLE001 the boundary: training goes on
                failures.add("instrumentation", error)
                return None

        return call

    def around(
        self,
        begin: Callable[[Arguments, Keywords], object],
        end: Callable[[Arguments, Keywords, Any], object],
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a wrapper of functions that calls `begin` with the arguments before, and `end`
        with the arguments and the result after each call. If it raises, the pass under way is
        dropped instead."""
        before, after = self.safely(begin), self.safely(end)

        def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                try:
                    before(args, kwargs)
                    result = original(*args, **kwargs)
                except BaseException:
                    self.drop()
                    raise
                after(args, kwargs, result)
                return result

            return call

        return wrapper

    def begin_wait(self) -> Span | None:
        """Begin to wait for other ranks; return the span whose `end_wait` ends it: None outside of
        passes, in other threads and streams of the device, and within waiting that is counted
        already."""
        if get_ident() != self.recording.pass_thread:
            return None
        device = self.recording.device
        if device is not None and device.stream() != self._stream:
            return None
        return self.begin_final_wait()

    def begin_final_wait(self) -> Span | None:
        """Begin the waiting at the end of a backward pass, which autograd may leave to any of its
        threads, as `begin_wait` does."""
        span = self.recording.open
        if span is None or span.waiting or not self.measures_waiting:
            return None
        span.begin_wait()
        return span

    def begin_data(self) -> HostSpan | None:
        """Begin to wait for input; None in other threads than the loop's, inside other blocks and
        before the first step.

        The time becomes a record with the next forward pass, unless it was for an evaluation: see
        `mark_data`.
        """
        recording = self.recording
        outer = recording.open
        if get_ident() != recording.loop_thread or not (outer is None or _is_step(outer)):
            return None
        if recording.on_first_step is not None:
            return None
        if self._is_data_marked:
            self._data_ns, self._is_data_marked = 0, False
        block = HostSpan(recording, _DATA, -1, 0, -1, None)
        block.__enter__()
        return block

    def end_data(self, block: HostSpan) -> None:
        """End the waiting for input that `begin_data` began."""
        block.leave()
        self._data_ns += block.own_ns()

    def mark_data(self) -> None:
        """Mark the waiting for input so far, as a pass without gradients does: it was for an
        evaluation, unless a training forward pass comes before another batch is loaded."""
        self._is_data_marked = True

    def _record_data(self) -> None:
        recording, ms = self.recording, self._data_ns * 1e-6
        self._data_ns, self._is_data_marked = 0, False
        put = recording.put
        put((
            recording.plan_version, recording.step, -1, 0, _DATA, ms, nan, -1, -1, -1, -1, -1, nan,
        ))  # fmt: skip

    def _report_passes(self) -> None:
        self._most_passes = max(self._most_passes, self.passes)
        if self.passes and not self._is_backward_seen and _is_autograd_compiled():
            self.recording.failures.warn_once(
                "compiled autograd",
                "compiled autograd runs the backward passes, which are not timed under it: slow "
                "devices may not be found",
            )
        self._is_backward_seen = False
        if self.passes and self.on_step_end is not None:
            self.on_step_end(self.passes)
        self.passes, self._counted_step = 0, self.recording.step

    def _warn_of_no_update(self) -> None:
        if self.passes < _MANY_TIMES * self._most_passes:
            return
        self.recording.failures.warn_once(
            "updates",
            f"{self.passes:,} forward passes and no update of an optimizer that holds their "
            "parameters: give `instrument` the optimizer that the loop steps, or enclose steps in "
            "`monitor.step()`",
        )

    def _end_step(self) -> None:
        self._ends_with_backward = False
        for half in self._halves.values():
            self.recording.put(half)
        self._halves.clear()
        with self._lock:
            if self._step is None:
                return
            self.drop()  # what another thread has begun
            step, self._step = self._step, None
            step.__exit__(None, None, None)
            self._report_passes()

    def _claims(self, thread: int) -> bool:
        """Return whether the forward passes are those of this thread from now on."""
        recording = self.recording
        with self._lock:
            is_step_by_hand = recording.open is not None and recording.step != self._counted_step
            if not self.thread or is_step_by_hand:
                self.thread = thread
            return self.thread == thread

    def _release(self) -> None:
        """Forget the thread of the forward passes if updates are made by another one."""
        if self.thread != get_ident():
            self.thread = 0


def _nothing() -> None: ...


def _is_autograd_compiled() -> bool:
    """Return whether a backward pass of this process was compiled, as torch counts it."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return bool(counters.get("compiled_autograd"))


def _is_step(span: Span) -> bool:
    return span.op == FORWARD and span.microbatch < 0
