"""Passes of one rank's stage: takes in what a pass needs, computes, sends on what came of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from resihp.contracts import Op
from resihp.pipeline.orders import Part, Pass

from ..models import Model, Packed
from ..worlds.world import World
from . import exchange
from .shard import Shard, part_ranges
from .split_backward import SplitBackward


@dataclass
class _Running:
    """A microbatch whose forward pass has run here and whose backward pass has not.

    embedded  output of the first part where the backward pass is split behind it
    entry     leaf at which the gradient of the stage's input gathers
    output    what the stage made of it
    """

    embedded: torch.Tensor | None
    entry: torch.Tensor
    output: torch.Tensor
    halves: SplitBackward | None = None


class Passes:
    """Runs the passes of one stage in one world; gradients add up in the shard's tensors.

    `run` a pass, then `send` what it returned; `drain` when all passes of a step have run.
    `split` says that backward passes come in halves. `compute_dtype` is the precision of torch's
    autocast for the forward pass; None: none.
    """

    def __init__(
        self,
        model: Model,
        world: World,
        shard: Shard,
        *,
        split: bool = False,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self._model, self._world, self._parts = model, world, shard.parts
        params = model.parameters.parts(world.layout.replicas[world.place.dp], world.place.pp)
        self._ranges = {part: part_ranges(held, shard.ranges) for part, held in params.items()}
        # A pipeline of one stage has no bubble: its second half is the whole pass.
        self._split = split and (world.before is not None or world.after is not None)
        self._compute_dtype = compute_dtype
        self._running: dict[int, _Running] = {}
        self._box = exchange.Mailbox()

    def run(self, item: Pass, packed: Packed, loss_weight: float) -> torch.Tensor:
        """One pass. Returns what the neighbour needs: activation or gradient of the input.

        On the last stage a forward pass returns the sum of the token losses. `loss_weight` is
        what one token's loss counts in the loss of the step.
        """
        if item.op is Op.FORWARD:
            self._running[item.microbatch] = running = self._forward(packed)
            return running.output.detach()
        running = self._running[item.microbatch]
        if item.part is not Part.INPUT:
            del self._running[item.microbatch]
        if not self._split:
            return self._whole(item, running, packed, loss_weight)
        if item.part is Part.INPUT:
            running.halves = SplitBackward(running.entry, running.output)
            return running.halves.run_input(self._gradient(running, packed, loss_weight))
        assert running.halves is not None, "the input half comes first"
        running.halves.run_weights()
        if running.embedded is not None:
            running.embedded.backward(running.entry.grad)
        return running.entry

    def send(self, item: Pass, outgoing: torch.Tensor) -> None:
        """Send what `run` returned to the neighbour that needs it, without waiting."""
        if item.op is Op.FORWARD and self._world.after is not None:
            exchange.send_forward(self._box, self._world.after, outgoing)
        is_input = item.op is Op.BACKWARD and item.part is not Part.WEIGHT
        if is_input and self._world.before is not None:
            exchange.send_backward(self._box, self._world.before, outgoing)

    def drain(self) -> None:
        """Wait until everything that was sent has arrived."""
        self._box.drain()

    def flops(self, item: Pass, packed: Packed) -> float:
        """Floating-point operations of a pass; a backward pass takes twice a forward one."""
        forward = sum(self._model.flops(part, r, packed) for part, r in self._ranges.items())
        return forward * (2.0 if item.op is Op.BACKWARD and item.part is Part.WHOLE else 1.0)

    def _forward(self, packed: Packed) -> _Running:
        before, tokens = self._world.before, len(packed.tokens)
        embedded, entry = None, torch.empty(0)
        if before is not None:
            entry = exchange.receive_forward(before, self._world.tp, tokens, self._model.width)
            entry.requires_grad_()
        hidden = entry
        with torch.autocast(
            entry.device.type, self._compute_dtype, enabled=self._compute_dtype is not None
        ):
            for name, module in self._parts.items():
                if name != "first":
                    hidden = module(hidden, packed)
                    continue
                hidden = module(packed)
                if self._split:
                    embedded, entry = hidden, hidden.detach().requires_grad_()
                    hidden = entry
        return _Running(embedded, entry, hidden.float())

    def _whole(
        self, item: Pass, running: _Running, packed: Packed, loss_weight: float
    ) -> torch.Tensor:
        if item.part is not Part.INPUT:
            running.output.backward(self._gradient(running, packed, loss_weight))
        return running.entry if running.entry.grad is None else running.entry.grad

    def _gradient(self, running: _Running, packed: Packed, loss_weight: float) -> torch.Tensor:
        """Gradient of the step's loss by this stage's output."""
        after, tokens = self._world.after, len(packed.tokens)
        if after is None:
            return torch.full_like(running.output, loss_weight)
        return exchange.receive_backward(after, self._world.tp, tokens, self._model.width)
