"""Passes of one rank's stage: takes in what a pass needs, computes, sends on what came of it."""

from __future__ import annotations

import torch

from resihp.contracts import ContractError, Op
from resihp.pipeline.orders import Part, Pass

from ..models import Model, Packed
from ..worlds.world import World
from . import exchange
from .shard import Shard, part_ranges


class Passes:
    """Runs the passes of one stage in one world; gradients add up in the shard's tensors.

    `run` a pass, then `send` what it returned; `drain` when all passes of a step have run.
    """

    def __init__(self, model: Model, world: World, shard: Shard) -> None:
        self._model, self._world, self._parts = model, world, shard.parts
        params = model.parameters.parts(world.layout.replicas[world.place.dp], world.place.pp)
        self._ranges = {part: part_ranges(held, shard.ranges) for part, held in params.items()}
        self._running: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._box = exchange.Mailbox()

    def run(self, item: Pass, packed: Packed, loss_weight: float) -> torch.Tensor:
        """One pass. Returns what the neighbour needs: activation or gradient of the input.

        On the last stage a forward pass returns the sum of the token losses. `loss_weight` is
        what one token's loss counts in the loss of the step.
        """
        if item.part is not Part.WHOLE or item.chunk:
            raise ContractError("schedule", "the runtime runs whole passes of one chunk only")
        if item.op is Op.FORWARD:
            entry, output = self._running[item.microbatch] = self._forward(packed)
            return output.detach()
        entry, output = self._running.pop(item.microbatch)
        output.backward(self._gradient_of(output, packed, loss_weight))
        return entry if entry.grad is None else entry.grad

    def send(self, item: Pass, outgoing: torch.Tensor) -> None:
        """Send what `run` returned to the neighbour that needs it, without waiting."""
        if item.op is Op.FORWARD and self._world.after is not None:
            exchange.send_forward(self._box, self._world.after, outgoing)
        if item.op is Op.BACKWARD and self._world.before is not None:
            exchange.send_backward(self._box, self._world.before, outgoing)

    def drain(self) -> None:
        """Wait until everything that was sent has arrived."""
        self._box.drain()

    def flops(self, item: Pass, packed: Packed) -> float:
        """Floating-point operations of a pass; a backward pass takes twice a forward one."""
        forward = sum(self._model.flops(part, r, packed) for part, r in self._ranges.items())
        return forward * (2.0 if item.op is Op.BACKWARD else 1.0)

    def _forward(self, packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        """Run this stage; returns its input (a leaf that gathers gradient) and its output."""
        before, tokens = self._world.before, len(packed.tokens)
        hidden = entry = torch.empty(0)
        if before is not None:
            hidden = exchange.receive_forward(before, self._world.tp, tokens, self._model.width)
            hidden = entry = hidden.requires_grad_()
        for name, module in self._parts.items():
            hidden = module(packed) if name == "first" else module(hidden, packed)
        return entry, hidden

    def _gradient_of(
        self, output: torch.Tensor, packed: Packed, loss_weight: float
    ) -> torch.Tensor:
        """Gradient of the step's loss by this stage's output."""
        after, tokens = self._world.after, len(packed.tokens)
        if after is None:
            return torch.full_like(output, loss_weight)
        return exchange.receive_backward(after, self._world.tp, tokens, self._model.width)
