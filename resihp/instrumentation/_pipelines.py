"""Passes of the stages of `torch.distributed.pipelining`, under any of its schedules.

Each schedule calls the three methods of a stage that run one microbatch, and waits for transfers
outside of them. In a stage that is wrapped by DDP the backward pass ends with DDP's own waiting.
"""

from __future__ import annotations

from typing import Any

import torch

from resihp.contracts import ContractError, Schedule

from ._call_arguments import Lengths, work_of_call
from ._modules import FinalWait, backward_under_way, gradient_tensors
from ._pass_timer import BACKWARD, FORWARD, Arguments, Keywords, PassTimer
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
        if torch.is_grad_enabled():
            inner = _argument(args, kwargs, 1, "args") or ()
            named = _argument(args, kwargs, 2, "kwargs") or {}
            work = self._work_of_call(inner, named, self._lengths)
            index = _argument(args, kwargs, 0, "fwd_chunk_id")
            self._timer.begin(FORWARD, chunk=self._chunk, index=index, work=work)
        else:
            self._timer.forget_data()

    def _begin_backward(self, args: Arguments, kwargs: Keywords) -> None:
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
            for tensor in gradient_tensors(output):
                tensor.register_hook(self._on_gradient)

    def _expect(self, gradient: torch.Tensor) -> None:
        if self._timer.op == BACKWARD:
            self._gradients.expect(backward_under_way())


def _argument(args: Arguments, kwargs: Keywords, position: int, name: str) -> Any:
    return args[position] if len(args) > position else kwargs.get(name)


def _is_schedule(target: Any) -> bool:
    return hasattr(target, "_n_microbatches") or any(
        kind.__module__.startswith("torch.distributed.pipelining") for kind in type(target).__mro__
    )
