"""Passes of a module: plain, or wrapped by DDP, FSDP2, tensor parallelism and their combinations.

A backward pass begins when a gradient arrives at an output of the module and ends with the graph's
execution. The engine of autograd runs callbacks at its end in the order of their registration. The
one made here as the pass begins comes before that of DDP, which is registered with its last bucket
and waits for the other ranks: what follows it is waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import islice
from threading import get_ident
from typing import Any
from weakref import ref

import torch
from torch.autograd.function import BackwardCFunction
from torch.nn.parallel import DistributedDataParallel

from resihp.hooks._spans import Span
from resihp.hooks._stats import FailureLog

from ._call_arguments import Lengths, argument_names, work_of_call
from ._pass_timer import BACKWARD, FORWARD, PassTimer, backward_under_way
from ._patches import Patches, remove_wrappers

_MOST_OUTPUTS = 64
_MOST_BESIDE_LOSS = 8
"""Tensors of an output that are observed; fewer where the first is a loss, which leads to all."""
_MOST_VALUES = 1_000
"""Values of an output that are looked at."""
_DEPTH, _OBJECT_DEPTH = 6, 2
_CALL = "_compiled_call_impl"


def queue_callback() -> Callable[[Callable[[], None]], None] | None:
    """Return torch's function that has a callback run at the end of the present backward pass."""
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    return getattr(engine, "queue_callback", None)


class ModulePasses:
    """Times the forward and backward passes of a module whose inputs are one microbatch.

    Forward passes without gradients (evaluation) are not recorded. A module that is called again
    inside its own backward pass (activation checkpointing) adds to that pass, and so does one that
    calls itself to its forward pass. Backward passes are not recorded where this torch has no
    `queue_callback`.

    The calls are timed where torch puts those of a module that was compiled in place: around all
    of its hooks, and without the longer way that torch takes for a module with hooks.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        timer: PassTimer,
        lengths: Lengths | None,
        patches: Patches,
    ) -> None:
        self._timer, self._lengths = timer, lengths
        self._names = argument_names(module)
        self._module: Callable[[], Any] = ref(module)
        self._gradients = FinalWait(timer, timer.end)
        self._begin = timer.safely(self._begin_backward)
        self._index, self._is_over = -1, False
        if not patches.wrap(module, _CALL, self._timed, may_be_none=True):
            patches.wrap(module, "forward", self._timed)  # its hooks are outside of the pass
        _hide_from_script(patches)
        patches.wrap(torch.nn.Module, "_replicate_for_data_parallel", _without_wrappers)
        if getattr(module, "broadcast_buffers", False):  # of DDP; it waits in C++
            patches.wrap(module, "_sync_buffers", self._waited)
        patches.wrap(DistributedDataParallel, "_post_forward", self._expecting_others)

    def _timed(self, compiled: Callable[..., Any] | None) -> Callable[..., Any]:
        compiling = torch.compiler.is_compiling  # a constant for the compiler
        module, before, after = self._module, self._before, self._after
        timer, failures = self._timer, self._timer.recording.failures

        def call(*args: Any, **kwargs: Any) -> Any:
            run = module()._call_impl if compiled is None else compiled
            if compiling() or timer.op == FORWARD:  # the module calls itself
                return run(*args, **kwargs)
            index = -1
            try:
                try:
                    index = before(args, kwargs)
                except Exception as error:  # noqa: BLE001 the boundary: training goes on
                    failures.add("instrumentation", error)
                output = run(*args, **kwargs)
            except BaseException:
                if timer.op == FORWARD and timer.thread == get_ident():
                    timer.drop()
                raise
            if index >= 0:
                try:
                    after(index, output)
                except Exception as error:  # noqa: BLE001 the boundary: training goes on
                    failures.add("instrumentation", error)
            return output

        return call

    def ending(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of `backward(loss, …)` that ends the forward pass under way, where calls
        of the module run their backward passes themselves: what they do after it is no pass."""
        end = self._timer.safely(self._end_with)

        def end_and_run(loss: Any, *args: Any, **kwargs: Any) -> Any:
            end(loss)
            return backward(loss, *args, **kwargs)

        return end_and_run

    def _end_with(self, loss: Any) -> None:
        if self._timer.op == FORWARD:
            self._after(self._index, loss)
            self._is_over = True

    def _waited(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*args: Any, **kwargs: Any) -> Any:
            span = self._timer.begin_wait()
            try:
                return original(*args, **kwargs)
            finally:
                if span is not None:
                    span.end_wait()

        return wait

    def _expecting_others(self, post_forward: Callable[..., Any]) -> Callable[..., Any]:
        expect = self._timer.safely(self._expect_other)
        hidden: Any = torch.compiler.disable  # what surrounds the passes of a DDP is not compiled

        def call(*args: Any, **kwargs: Any) -> Any:
            output = post_forward(*args, **kwargs)
            if self._timer.op != FORWARD:  # else it is part of the pass
                expect(output)
            return output

        return hidden(call)  # type: ignore[no-any-return]

    def _expect_other(self, output: Any) -> None:
        """Be told of a backward pass through the output of another DDP than this module."""
        if torch.is_grad_enabled() and self._gradients.is_possible:
            for tensor in gradient_tensors(output, self._timer.recording.failures):
                before_gradient(tensor, self._gradients.on_other)

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Begin a forward pass; return its microbatch, -1 if it is none."""
        timer = self._timer
        if not torch.is_grad_enabled():
            timer.mark_data()
            return -1
        if backward_under_way() >= 0:
            return -1
        work = None
        try:
            work = work_of_call(args, kwargs, self._lengths, self._names)
        except Exception as error:  # noqa: BLE001 the pass is timed without its work
            timer.recording.failures.add("instrumentation", error)
        index = timer.begin(FORWARD, work=work)
        if index < 0:
            return -1
        self._index, self._is_over = index, False
        if work is None:
            timer.recording.failures.warn_once(
                "work",
                "the arguments of a forward pass tell no work: give `instrument` `lengths=`, or "
                "slow devices may not be found",
            )
        return index

    def _after(self, index: int, output: Any) -> None:
        if self._is_over or self._timer.thread != get_ident():  # one of another thread follows
            return
        if self._timer.op != FORWARD and not self._timer.is_stopped:
            self._timer.recording.failures.warn_once(
                "passes",
                "another pass or an update began inside a forward pass, which is not recorded: "
                "in Lightning call `manual_backward`, outside of closures",
            )
        self._timer.end()
        if self._gradients.is_possible:
            begin = partial(self._begin, index)
            tensors = gradient_tensors(output, self._timer.recording.failures)
            for tensor in tensors:
                before_gradient(tensor, begin)
            if not tensors:
                self._timer.recording.failures.warn_once(
                    "outputs",
                    "a forward pass returned no tensor that gradients come to: its backward pass "
                    "is not recorded",
                )

    def _begin_backward(self, index: int, _: Any) -> None:
        under_way = backward_under_way()
        gradients = self._gradients
        if gradients.expected != under_way and self._timer.begin(BACKWARD, index=index) >= 0:
            gradients.expect(under_way)


def _hide_from_script(patches: Patches) -> None:
    """Have `torch.jit.script` leave the wrapper out as it does torch's other attributes of modules:
    it would refuse the module for it."""
    hidden = getattr(getattr(torch.jit, "_recursive", None), "ignored_attributes", None)
    if isinstance(hidden, list):
        hidden.append(_CALL)
        patches.add(partial(hidden.remove, _CALL))


def _without_wrappers(original: Callable[..., Any]) -> Callable[..., Any]:
    def replicate(module: torch.nn.Module) -> Any:
        replica = original(module)
        remove_wrappers(replica)  # which run the original
        return replica

    return replicate


class FinalWait:
    """Waiting of a backward pass after its last gradient, which is DDP's.

    The backward pass of another DDP may come first in the same graph. It waits before the callback
    of the pass that is timed, and so its waiting is looked for with a callback of its own.

    expected  number of the backward pass that is timed; -2 if none
    then      called at the end of each backward pass that was expected
    """

    def __init__(self, timer: PassTimer, then: Callable[[], None] | None = None) -> None:
        self._timer, self._then = timer, then
        self._queue = queue_callback()
        self.is_possible = self._queue is not None
        self.expected = -2
        self._waiting: Span | None = None
        self._expected_other = -2
        self.on_other = timer.safely(self._expect_other)
        self.on_end_of_other = timer.safely(self._other_waits)

    def expect(self, under_way: int) -> None:
        """Time the waiting of the backward pass that runs now, by `backward_under_way`; a second
        call in it does nothing."""
        queue = self._queue
        assert queue is not None
        if self.expected == under_way:
            return
        self.expected, self._waiting = under_way, None
        timer = self._timer
        queue(_Ending(self, timer.under_way, timer.recording.failures))

    def _expect_other(self, _: Any) -> None:
        under_way, queue = backward_under_way(), self._queue
        assert queue is not None
        if under_way not in (self._expected_other, self.expected):
            self._expected_other = under_way
            queue(partial(self.on_end_of_other, under_way))

    def _other_waits(self, under_way: int) -> None:
        if self.expected == under_way:
            self._waiting = self._timer.begin_final_wait()

    def begin_wait(self, then: Callable[[], None]) -> None:
        """Begin to wait as the last gradient is there; `then` is called after that of DDP."""
        queue = self._queue
        assert queue is not None
        if self._waiting is None:
            self._waiting = self._timer.begin_final_wait()
        queue(then)

    def end(self) -> None:
        """End the waiting, and with it the backward pass."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.end_wait()
        self.expected = -2
        if self._then is not None:
            self._then()


class _Ending:
    """End of one backward pass, as autograd calls it. If the pass raises autograd frees it instead,
    and `span` is under way no longer. Failures are counted here, as a wrapper of `safely` would,
    for every microbatch passes here twice."""

    __slots__ = ("_failures", "_final", "_span")

    def __init__(self, final: FinalWait, span: Span | None, failures: FailureLog) -> None:
        self._final, self._span, self._failures = final, span, failures

    def __call__(self) -> None:
        try:
            self._final.begin_wait(self.end)
        except Exception as error:  # noqa: BLE001 the boundary: training goes on
            self._failures.add("instrumentation", error)

    def end(self) -> None:
        self._span = None
        try:
            self._final.end()
        except Exception as error:  # noqa: BLE001 the boundary: training goes on
            self._failures.add("instrumentation", error)

    def __del__(self) -> None:
        if self._span is not None:
            self._span.leave_if_open()


def before_gradient(tensor: torch.Tensor, call: Callable[[Any], None]) -> None:
    """Have `call` called before a gradient passes through `tensor`, which is no leaf.

    A view that is changed in place gets a new node: only that of its base stays in the graph. The
    view that a function in Python returns may not be changed.
    """
    node = tensor.grad_fn
    if tensor._is_view() and not isinstance(node, BackwardCFunction):
        base = tensor._base
        node = node if base is None or base.grad_fn is None else base.grad_fn
    if node is None:
        tensor.register_hook(call)
    else:  # cheaper than a hook of the tensor
        node.register_prehook(call)


def gradient_tensors(output: Any, failures: FailureLog) -> list[torch.Tensor]:
    """Return tensors in `output` through which gradients will come, the first few. Values that
    cannot be looked into are counted as failures."""
    if isinstance(output, torch.Tensor):  # the common case, and the cheap one
        return [output] if output.requires_grad and not output.is_leaf else []
    found: list[torch.Tensor] = []
    values = [(output, _DEPTH)]
    for value, depth in values:  # to which those in it are added
        if isinstance(value, torch.Tensor):
            if value.requires_grad and not value.is_leaf:
                found.append(value)
                if len(found) == (_MOST_OUTPUTS if found[0].ndim else _MOST_BESIDE_LOSS):
                    break
        elif depth and value is not None:
            try:
                inner, left = _inner(value, depth)
                values += [(each, left) for each in islice(inner, _MOST_VALUES - len(values))]
            except Exception as error:  # noqa: BLE001 the boundary: the others are looked at
                failures.add("instrumentation", error)
    return found


def _inner(value: Any, depth: int) -> tuple[Iterable[Any], int]:
    """Return what is in a value, and how deep that is to be searched."""
    if isinstance(value, Mapping):
        return value.values(), depth - 1
    if isinstance(value, list | tuple):
        return value, depth - 1
    if is_dataclass(value):
        return [getattr(value, field.name, None) for field in fields(value)], depth - 1
    if hasattr(value, "__dict__") and not isinstance(value, type | torch.nn.Module):
        return vars(value).values(), min(depth, _OBJECT_DEPTH) - 1
    return (), 0
