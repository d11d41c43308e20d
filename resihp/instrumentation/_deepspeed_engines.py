"""Passes and updates of DeepSpeed's engines.

A call of a `DeepSpeedEngine` is a forward pass, as of any module; its optimizers are no torch
optimizers of the model's parameters, so that a step ends with `engine.step` where gradients have
been accumulated. A `PipelineEngine` runs the instructions of a schedule, by the functions in its
table `_INSTRUCTION_MAP`, and transfers between them.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch

from resihp.layout.rank_groups import RankDescription

from ._call_arguments import Lengths, work_of_call
from ._pass_timer import BACKWARD, FORWARD, Arguments, Keywords, PassTimer
from ._patches import Patches

_TABLE = "_INSTRUCTION_MAP"
_FORWARD, _BACKWARD, _UPDATE = "ForwardPass", "BackwardPass", "OptimizerStep"


def is_engine(target: Any) -> bool:
    """Return whether `target` is an engine of DeepSpeed."""
    return _is_of(target, "DeepSpeedEngine")


def is_pipeline_engine(target: Any) -> bool:
    """Return whether `target` is an engine of DeepSpeed that runs a pipeline."""
    return _is_of(target, "PipelineEngine")


def describe_pipeline_engine(engine: Any, rank: int) -> RankDescription:
    """Return the coordinates of a rank that holds a stage of a pipeline."""
    ranks = torch.distributed.get_process_group_ranks
    return RankDescription(
        rank,
        tuple(ranks(engine.grid.get_slice_parallel_group())),
        tuple(ranks(engine.grid.get_pipe_parallel_group())),
        int(engine.num_stages),
    )


def can_time_instructions(engine: Any) -> bool:
    """Return whether the passes of a pipeline can be told."""
    table = getattr(engine, _TABLE, None)
    names = {kind.__name__ for kind in table} if isinstance(table, dict) else set()
    return names >= {_FORWARD, _BACKWARD, _UPDATE}


class EngineUpdates:
    """Ends steps with the updates of an engine, which `engine.step` makes once gradients have been
    accumulated."""

    def __init__(self, engine: Any, timer: PassTimer, patches: Patches) -> None:
        self._engine, self._timer = engine, timer
        self._is_update = False
        patches.wrap(engine, "step", timer.around(self._begin, self._end))

    def _begin(self, *_: Any) -> None:
        managed = getattr(self._engine, "managed_gradient_accumulation", None)
        is_users = managed is not None and not managed()  # then each call is an update
        self._is_update = is_users or self._engine.is_gradient_accumulation_boundary()
        if self._is_update:
            self._timer.begin_update()

    def _end(self, *_: Any) -> None:
        if self._is_update:
            self._timer.end_update()


class InstructionPasses:
    """Times the passes and the update of a pipeline's stage.

    A buffer holds one microbatch from its forward to its backward pass.
    """

    def __init__(
        self, engine: Any, timer: PassTimer, lengths: Lengths | None, patches: Patches
    ) -> None:
        self._timer, self._lengths = timer, lengths
        self._microbatches: dict[int, int] = {}
        self._work_of_call = timer.safely(work_of_call)
        around = {
            _FORWARD: timer.around(self._begin_forward, self._end),
            _BACKWARD: timer.around(self._begin_backward, self._end),
            _UPDATE: timer.around(self._begin_update, self._end_update),
        }
        given = vars(engine).get(_TABLE)
        table = {
            kind: around[kind.__name__](run) if kind.__name__ in around else run
            for kind, run in getattr(engine, _TABLE).items()
        }

        reference = ref(engine)

        def undo() -> None:
            alive = reference()
            if alive is None or vars(alive).get(_TABLE) is not table:
                return
            if given is None:
                delattr(alive, _TABLE)
            else:
                setattr(alive, _TABLE, given)

        setattr(engine, _TABLE, table)
        patches.add(undo)

    def _begin_forward(self, args: Arguments, kwargs: Keywords) -> None:
        if torch.is_grad_enabled():
            engine, buffer = args[0], kwargs["buffer_id"]
            inputs = engine.pipe_buffers["inputs"][buffer]
            work = self._work_of_call(
                inputs if isinstance(inputs, tuple) else (inputs,),
                {},
                self._lengths if engine.is_first_stage() else None,
                (),
            )
            self._microbatches[buffer] = self._timer.begin(FORWARD, work=work)

    def _begin_backward(self, _: Arguments, kwargs: Keywords) -> None:
        self._timer.begin(BACKWARD, index=self._microbatches.get(kwargs["buffer_id"], -1))

    def _end(self, *_: Any) -> None:
        if self._timer.op >= 0:
            self._timer.end()

    def _begin_update(self, *_: Any) -> None:
        self._timer.begin_update()

    def _end_update(self, *_: Any) -> None:
        self._timer.end_update()


def _is_of(target: Any, name: str) -> bool:
    return any(
        kind.__name__ == name and kind.__module__.partition(".")[0] == "deepspeed"
        for kind in type(target).__mro__
    )
