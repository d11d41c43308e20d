"""Passes and transfers of the stages of `torch.distributed.pipelining`, under any schedule.

Each schedule calls the three methods of a stage that run one microbatch, and waits for transfers
outside of them. In a stage that is wrapped by DDP the backward pass ends with DDP's own waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import nan
from typing import Any, NamedTuple
from weakref import ref

import torch

from resihp.contracts import ContractError, Op, Schedule

from ._call_arguments import Lengths, argument_names, work_of_call
from ._modules import FinalWait, gradient_tensors
from ._pass_timer import (
    BACKWARD,
    FORWARD,
    Arguments,
    Keywords,
    PassTimer,
    backward_under_way,
)
from ._patches import Patches

_METHODS = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")


def stages_of(target: Any) -> list[Any]:
    """Return the stages of this rank in a schedule or stage of torch's pipelines; none if `target`
    is neither. Raises `ContractError` for a schedule whose stages cannot be found."""
    if hasattr(target, _METHODS[0]):
        return [target]
    if not _is_schedule(target):
        return []
    stages = getattr(target, "_stages", None) or [getattr(target, "_stage", None)]
    if any(stage is None for stage in stages):
        raise ContractError("target", f"the stages of {type(target).__name__} cannot be found")
    return list(stages)


def microbatches_of(target: Any) -> int | None:
    """Return the microbatches of a step of a schedule; None for a stage, which does not know."""
    count = getattr(target, "_n_microbatches", None)
    return count if isinstance(count, int) and count > 0 else None


def schedule_of(target: Any) -> Schedule:
    """Return the order of passes that a schedule of torch stands for."""
    name = type(target).__name__
    if "ZeroBubble" in name or "ZBV" in name or "DualPipe" in name:
        return Schedule.ZERO_BUBBLE
    if len(getattr(target, "_stages", ())) > 1:
        return Schedule.INTERLEAVED
    return Schedule.ONE_F_ONE_B


class StagePasses:
    """Times the passes of one stage, the `chunk`-th of this rank."""

    def __init__(
        self, stage: Any, chunk: int, timer: PassTimer, lengths: Lengths | None, patches: Patches
    ) -> None:
        self._chunk, self._timer, self._lengths = chunk, timer, lengths
        self._stage: Callable[[], Any] = ref(stage)
        self._names = argument_names(stage.submod)
        self._gradients = FinalWait(timer)
        self._work_of_call = timer.safely(work_of_call)
        self._on_gradient = timer.safely(self._expect)
        ends = (self._end_forward, self._end_input, self._end_weight)
        begins = (self._begin_forward, self._begin_backward, self._begin_backward)
        for method, begin, end in zip(_METHODS, begins, ends, strict=True):
            patches.wrap(stage, method, timer.around(begin, end))

    def _begin_forward(self, args: Arguments, kwargs: Keywords) -> None:
        """Begin a pass: `forward_one_chunk(index, args, kwargs)` holds the arguments of the
        stage's module, which are () but on the first stage."""
        if torch.is_grad_enabled() and _has_backward(self._stage()):
            inner = _argument(args, kwargs, 1, "args") or ()
            named = _argument(args, kwargs, 2, "kwargs") or {}
            work = self._work_of_call(inner, named, self._lengths, self._names)
            index = _argument(args, kwargs, 0, "fwd_chunk_id")
            self._timer.begin(FORWARD, chunk=self._chunk, index=index, work=work)
        else:
            self._timer.mark_data()

    def _begin_backward(self, args: Arguments, kwargs: Keywords) -> None:
        if _has_backward(self._stage()):
            index = _argument(args, kwargs, 0, "bwd_chunk_id")
            self._timer.begin(BACKWARD, chunk=self._chunk, index=index)

    def _end_input(self, args: Arguments, kwargs: Keywords, _: Any) -> None:
        if _argument(args, kwargs, 2, "full_backward") in (None, True):
            self._timer.end()
        else:
            self._timer.end_half(is_last=False)

    def _end_weight(self, *_: Any) -> None:
        self._timer.end_half(is_last=True)

    def _end_forward(self, _: Arguments, __: Keywords, output: Any) -> None:
        """End a forward pass, and have DDP's waiting told from its backward pass."""
        if self._timer.op != FORWARD:
            return
        self._timer.end()
        if self._gradients.is_possible:
            for tensor in gradient_tensors(output, self._timer.recording.failures):
                tensor.register_hook(self._on_gradient)

    def _expect(self, gradient: torch.Tensor) -> None:
        if self._timer.op == BACKWARD:
            self._gradients.expect(backward_under_way())


_BOUNDARIES = {
    "get_fwd_recv_ops": -1,
    "get_fwd_send_ops": 0,
    "get_bwd_recv_ops": 0,
    "get_bwd_send_ops": -1,
}
"""Methods of a stage that make its transfers, and the number of the boundary that these cross, from
that of the stage: boundary n follows stage n."""
_P2P = int(Op.P2P)
_MOST_PENDING = 4_096


class _Place(NamedTuple):
    """Place of a transfer in the step; `chunk` is that of the stage before the boundary."""

    microbatch: int
    chunk: int


class PipelineTransfers:
    """Records the transfers of this rank's stages, those on the CPU, as both ends stamp them.

    A send says when it started. A receipt begins as the schedule waits for it, not when it is
    posted: of one that ends while the rank computes, nobody sees the end.
    """

    def __init__(self, stages: Sequence[Any], timer: PassTimer, patches: Patches) -> None:
        from torch.distributed.pipelining import schedules

        self._timer = timer
        self._pending: dict[int, tuple[Any, _Place, int]] = {}
        self._on_posted = timer.safely(self._note_posted)
        self._on_wait = timer.safely(self._begin_wait)
        self._on_received = timer.safely(self._record_received)
        self.is_possible = patches.wrap(schedules, "_wait_batch_p2p", self._wait) and patches.wrap(
            schedules, "_batch_p2p", self._post
        )
        for stage in stages if self.is_possible else ():
            for method, boundary in _BOUNDARIES.items():
                place = timer.around(_do_nothing, partial(self._place, stage, boundary))
                patches.wrap(stage, method, place)

    def _place(
        self, stage: Any, boundary: int, args: Arguments, kwargs: Keywords, operations: Any
    ) -> None:
        """Mark the operations that a method of a stage returned with their place."""
        if torch.is_grad_enabled() and _has_backward(stage):
            (microbatch,) = (*args, *kwargs.values())
            chunk = (stage.stage_index + boundary) // stage.group_size
            for operation in operations:
                operation.resihp_place = _Place(microbatch, chunk)

    def _post(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def post(operations: Any, *args: Any, **kwargs: Any) -> Any:
            start_ns = self._timer.recording.now_ns()
            works = original(operations, *args, **kwargs)
            self._on_posted(operations, works, start_ns)
            return works

        return post

    def _note_posted(self, operations: Any, works: Any, start_ns: int) -> None:
        if len(works) != len(operations):  # coalesced
            return
        for operation, work in zip(operations, works, strict=True):
            place = getattr(operation, "resihp_place", None)
            if place is None or operation.tensor.device.type != "cpu":
                continue
            if operation.op is torch.distributed.isend:
                self._record(place, operation.peer, start_ns, start_ns)
            else:
                if len(self._pending) >= _MOST_PENDING:
                    self._pending.clear()
                self._pending[id(work)] = work, place, operation.peer

    def _wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(works: Any, *args: Any, **kwargs: Any) -> Any:
            awaited = self._on_wait(works)
            start_ns = self._timer.recording.now_ns()
            result = original(works, *args, **kwargs)
            if awaited:
                self._on_received(awaited, start_ns)
            return result

        return wait

    def _begin_wait(self, works: Any) -> list[tuple[_Place, int]]:
        found = (self._pending.pop(id(work), None) for work in works)
        return [(each[1], each[2]) for each in found if each is not None]

    def _record_received(self, awaited: list[tuple[_Place, int]], start_ns: int) -> None:
        stop_ns = self._timer.recording.now_ns()
        for place, peer in awaited:
            self._record(place, peer, start_ns, stop_ns)

    def _record(self, place: _Place, peer: int, start_ns: int, stop_ns: int) -> None:
        recording = self._timer.recording
        put = recording.put
        put((
            recording.plan_version, recording.step, place.microbatch, place.chunk, _P2P,
            (stop_ns - start_ns) * 1e-6, nan, -1, -1, -1, -1, peer, start_ns * 1e-6,
        ))  # fmt: skip


def _do_nothing(args: Arguments, kwargs: Keywords) -> None:
    """Stand in for the begin of a call of which only the end matters."""


def _has_backward(stage: Any) -> bool:
    """Return whether the microbatches of a stage are those of a training. In an evaluation by the
    schedule's `eval` gradients may be on, and methods of backward passes are called in vain."""
    return bool(getattr(stage, "has_backward", True))


def _argument(args: Arguments, kwargs: Keywords, position: int, name: str) -> Any:
    return args[position] if len(args) > position else kwargs.get(name)


def _is_schedule(target: Any) -> bool:
    return hasattr(target, "_n_microbatches") or any(
        kind.__module__.startswith("torch.distributed.pipelining") for kind in type(target).__mro__
    )
