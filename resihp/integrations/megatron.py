"""Megatron-Core: passes of its schedules, which report them to the timers of the configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch

from resihp.contracts import ContractError, Schedule
from resihp.hooks._workload import Form, Work, snapshot_of
from resihp.instrumentation import InstrumentedMonitor
from resihp.instrumentation._call_arguments import Lengths, argument_names, work_of_call
from resihp.instrumentation._instrument import monitor_of
from resihp.instrumentation._modules import FinalWait, before_gradient, gradient_tensors
from resihp.instrumentation._optimizers import OptimizerSteps
from resihp.instrumentation._pass_timer import (
    BACKWARD,
    FORWARD,
    Arguments,
    Keywords,
    backward_under_way,
)
from resihp.layout.rank_groups import RankDescription

from ._observer import TrainingObserver

__all__ = ["observe"]

_TRANSFER = ("-recv", "-send")
_LENGTHS = ("cu_seqlens_q_padded", "cu_seqlens_q")
"""Attributes of `PackedSeqParams`; tokens of padding take time too."""


def observe(
    model: Any, optimizer: Any = None, *, step: int = 0, **options: Any
) -> TrainingObserver:
    """Observe the training of a model by the schedules of Megatron-Core.

    Every rank calls it once, when the model is wrapped and the optimizer made. `config.timers`
    becomes a `MonitorTimers` that passes all calls on to the timers that were there. The last rank,
    which has the losses and Megatron's loggers, reads the verdicts: there `metrics()` of the result
    returns what to log, and `close()`, or the end of a `with` statement, prints a line. Nothing
    here fails or stops training.

    model      the module, or the list of this rank's model chunks, as the schedule gets it
    optimizer  Megatron's or torch's, whose update ends a step; None: a step ends where the schedule
               is called again
    step       number of the first step
    options    of `resihp.instrument`
    """
    distributed = torch.distributed
    is_alone = not (distributed.is_available() and distributed.is_initialized())
    last = 0 if is_alone else distributed.get_world_size() - 1
    observer = TrainingObserver(options, _instrument, logging_rank=last)
    observer.begin(model, optimizer, step)
    return observer


def _instrument(
    model: Any, optimizer: Any, *, lengths: Lengths | None = None, **options: Any
) -> InstrumentedMonitor:
    chunks = list(model) if isinstance(model, list | tuple) else [model]
    config = _config_of(chunks[0])
    monitor = monitor_of(partial(_describe, len(chunks)), **options)
    timer, patches = monitor._timer, monitor._patches
    if isinstance(optimizer, torch.optim.Optimizer):
        OptimizerSteps(timer, chunks, optimizer, patches)
    elif optimizer is not None:  # calls that skip the update end the step too
        begin, end = timer.begin_update, timer.end_update
        patches.wrap(optimizer, "step", timer.around(lambda *_: begin(), lambda *_: end()))
    passes = _SchedulePasses(monitor, ends_steps=optimizer is None)
    timers = MonitorTimers(passes, config)
    patches.add(timers.uninstall)
    for number, chunk in enumerate(chunks):
        work = partial(_work, argument_names(chunk), lengths)
        calls = _ChunkCalls(number, passes, work, timers.install)
        patches.add(chunk.register_forward_hook(_Hook(calls.after)).remove)
        before = _Hook(calls.before)
        handle = chunk.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        patches.add(handle.remove)
    return monitor


class MonitorTimers:
    """Timers for `config.timers` that record the passes of a schedule and pass each call on.

    Nothing synchronizes here; the inner timers do, if they are Megatron's and of log level 2.

    inner  timers that the configuration had; None: none
    """

    def __init__(self, passes: _SchedulePasses, config: Any) -> None:
        safely = passes.timer.safely
        self.inner: Any = None
        self._config = config
        self._transfer = (safely(passes.begin_transfer), safely(passes.end_transfer))
        self._events: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "forward-backward": (safely(passes.begin_step), _nothing),
            "forward-compute": (safely(passes.begin_forward), safely(passes.end_forward)),
            "backward-compute": (safely(passes.begin_backward), safely(passes.end_backward)),
        }
        self.install()

    def __call__(self, name: str, *args: Any, **kwargs: Any) -> _NamedTimer:
        """Return the timer of this name, as `megatron.core.Timers` does."""
        inner = None if self.inner is None else self.inner(name, *args, **kwargs)
        events = self._events.get(name)
        if events is None:
            events = self._transfer if name.endswith(_TRANSFER) else (_nothing, _nothing)
            self._events[name] = events
        return _NamedTimer(*events, inner)

    def __getattr__(self, name: str) -> Any:
        """Return what the inner timers have besides, as `log` and `write`."""
        return getattr(self.__dict__.get("inner"), name)

    def __reduce__(self) -> Any:
        return _same, (self.inner,)

    def install(self) -> bool:
        """Become the timers of the configuration; return False if they are already.

        A loop may replace them, as that of Megatron-LM does at its start and after an evaluation.
        """
        if self._config.timers is self:
            return False
        self.inner, self._config.timers = self._config.timers, self
        return True

    def uninstall(self) -> None:
        """Put back the timers that were there, unless a loop has done so."""
        if self._config.timers is self:
            self._config.timers = self.inner


class _NamedTimer:
    """One timer: start and stop are events here, and everything goes to the inner one."""

    __slots__ = ("_inner", "_on_start", "_on_stop")

    def __init__(
        self, on_start: Callable[[], object], on_stop: Callable[[], object], inner: Any
    ) -> None:
        self._on_start, self._on_stop, self._inner = on_start, on_stop, inner

    def start(self, *args: Any, **kwargs: Any) -> None:
        """Start; a barrier or synchronization of the inner timer comes before the pass."""
        if self._inner is not None:
            self._inner.start(*args, **kwargs)
        self._on_start()

    def stop(self, *args: Any, **kwargs: Any) -> None:
        """Stop; a barrier or synchronization of the inner timer comes after the pass."""
        self._on_stop()
        if self._inner is not None:
            self._inner.stop(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _SchedulePasses:
    """Passes of the model chunks of this rank, as a schedule reports them.

    A pass is that of the next microbatch until the call of a chunk, or the gradient of what it
    returned, says which it is. Passes of an evaluation, which has no gradients, are left out.
    """

    def __init__(self, monitor: InstrumentedMonitor, *, ends_steps: bool) -> None:
        self.timer = monitor._timer
        self._monitor, self._ends_steps = monitor, ends_steps
        self._is_known = True
        self._transfer: Any = None

    def begin_step(self) -> None:
        """End the step before, where no update does."""
        self.end_transfer()  # an error may have left it open
        if self._ends_steps and torch.is_grad_enabled():
            self.timer.end_step()

    def begin_forward(self) -> None:
        """Begin the pass of a microbatch that is not known yet."""
        if torch.is_grad_enabled():
            self.end_transfer()
            self.timer.begin(FORWARD)
            self._is_known = False

    def end_forward(self) -> None:
        """End the forward pass, with its loss."""
        if self.timer.op == FORWARD:
            self.timer.end()

    def begin_backward(self) -> None:
        """Begin a pass; without chunks backward passes have the order of the forward passes."""
        self.end_transfer()
        self.timer.begin(BACKWARD, index=self._count(BACKWARD, 0))
        self._is_known = False

    def end_backward(self) -> None:
        """End the backward pass."""
        if self.timer.op == BACKWARD:
            self.timer.end()

    def begin_transfer(self) -> None:
        """Note that this rank waits for its neighbour; time between passes makes no record."""
        if torch.is_grad_enabled():
            self.end_transfer()
            self._transfer = self._monitor.p2p().start()

    def end_transfer(self) -> None:
        """Note that this rank waits no longer."""
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.cancel()

    def identify_forward(self, chunk: int, work: Work | None) -> int:
        """Say which chunk the pass runs, and the work in it; return its microbatch, -1 for a pass
        that is not recorded or was identified before."""
        if self._is_known or self.timer.op != FORWARD:
            return -1
        index = self._count(FORWARD, chunk)
        self.identify(chunk, index, work)
        return index

    def identify(self, chunk: int, index: int, work: Work | None = None) -> None:
        """Say which pass is under way."""
        if not self._is_known:
            self._is_known = True
            self.timer.identify(chunk=chunk, index=index, work=work)

    def _count(self, op: int, chunk: int) -> int:
        """Return the number of earlier passes of a kind in this step."""
        counts = self.timer.recording.next_index
        key = chunk << 3 | op
        index = counts.get(key, 0)
        counts[key] = index + 1
        return index


class _ChunkCalls:
    """Calls of one model chunk, and the gradients of what they return.

    install  makes our timers those of the configuration; returns False if they are already
    """

    def __init__(
        self,
        chunk: int,
        passes: _SchedulePasses,
        work: Callable[[Arguments, Keywords], Work | None],
        install: Callable[[], bool],
    ) -> None:
        timer = passes.timer
        self._chunk, self._passes, self._timer, self._install = chunk, passes, timer, install
        self._index = -1
        self._gradients = FinalWait(timer)
        self._work = timer.safely(work)
        self._safe_before, self._safe_after = timer.safely(self._before), timer.safely(self._after)
        self._on_gradient = timer.safely(self._gradient_arrived)

    def before(self, _: Any, args: Arguments, kwargs: Keywords) -> None:
        """Forward pre-hook of the chunk."""
        self._safe_before(args, kwargs)

    def after(self, _: Any, __: Any, output: Any) -> None:
        """Forward hook of the chunk."""
        self._safe_after(output)

    def _before(self, args: Arguments, kwargs: Keywords) -> None:
        self._index = -1
        if not torch.is_grad_enabled() or backward_under_way() >= 0:
            return
        if self._install():  # the pass has begun without us
            self._passes.begin_step()
            self._passes.begin_forward()
        self._index = self._passes.identify_forward(self._chunk, self._work(args, kwargs))

    def _after(self, output: Any) -> None:
        if self._index >= 0:
            on_gradient = partial(self._on_gradient, self._index)
            for tensor in gradient_tensors(output, self._timer.recording.failures):
                before_gradient(tensor, on_gradient)

    def _gradient_arrived(self, index: int, _: Any) -> None:
        if self._timer.op == BACKWARD:
            self._passes.identify(self._chunk, index)
            if self._gradients.is_possible:
                self._gradients.expect(backward_under_way())


class _Hook:
    """A hook of a chunk that does nothing in copies and pickles of it."""

    def __init__(self, call: Callable[..., object]) -> None:
        self._call = call

    def __call__(self, *given: Any) -> None:
        self._call(*given)

    def __reduce__(self) -> Any:
        return _Hook, (_nothing,)


def _nothing(*_: Any) -> None:
    """Event without a meaning here."""


def _same(timers: Any) -> Any:
    """Return the timers of a configuration that is copied."""
    return timers


def _config_of(model: Any) -> Any:
    """Return the configuration of a model that may be wrapped, as Megatron finds it."""
    module = model
    while getattr(module, "config", None) is None:
        module = getattr(module, "module", None)
        if module is None:
            raise ContractError("model", f"{type(model).__name__} has no configuration of Megatron")
    return module.config


def _describe(chunks: int, rank: int) -> tuple[Schedule, RankDescription]:
    """Return the coordinates of a rank by `megatron.core.parallel_state`.

    Ranks that share a sequence (context parallelism) run each microbatch together, as those of a
    tensor-parallel group do, and count as one.
    """
    state = import_module("megatron.core.parallel_state")
    tensor = _ranks(state.get_tensor_and_context_parallel_group())
    pipeline = _ranks(state.get_pipeline_model_parallel_group())
    if len(pipeline) == 1:
        return Schedule.ONE_F_ONE_B, RankDescription(rank, tensor)
    schedule = Schedule.INTERLEAVED if chunks > 1 else Schedule.ONE_F_ONE_B
    return schedule, RankDescription(rank, tensor, pipeline, len(pipeline) * chunks, chunks)


def _ranks(group: Any) -> tuple[int, ...]:
    return tuple(torch.distributed.get_process_group_ranks(group))


def _work(
    names: Sequence[str], lengths: Lengths | None, args: Arguments, kwargs: Keywords
) -> Work | None:
    """Return the work in a call whose positional arguments have these `names`."""
    if lengths is not None:
        return work_of_call(args, kwargs, lengths)
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    packed = named.get("packed_seq_params")
    for name in _LENGTHS:
        value = getattr(packed, name, None)
        if value is not None:
            return snapshot_of(Form.CU_SEQLENS, value)
    named.pop("attention_mask", None)  # Megatron's is nonzero where a position does not attend
    return work_of_call(args, named, None)
