"""One training step of one rank: pipeline passes, gradient sum, agreement, update."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from resihp.contracts import ContractError, Op, Plan
from resihp.layout import replica_of
from resihp.pipeline.orders import Part, stage_order

from ..models import Model, Packed
from ..worlds.comm import WaitClock
from ..worlds.world import World
from . import exchange
from .gradients import clip, squared_norm, sum_over_replicas
from .pacing import Pacer
from .shard import AdamW, Shard, part_ranges

DataSource = Callable[[int, int], Packed]
"""Microbatch `index` (over all replicas) of `step`; the same on every rank, however laid out."""


class Recorder(Protocol):
    """Takes microbatch records; `resihp.hooks.Monitor.record` is one."""

    def __call__(
        self,
        *,
        op: Op,
        step: int,
        microbatch: int,
        compute_ms: float,
        wait_ms: float,
        tokens: int = -1,
        sequences: int = -1,
        sum_sq_len: int = -1,
        max_len: int = -1,
    ) -> None: ...


@dataclass(frozen=True)
class Reduced:
    """A step whose gradients are summed everywhere, so that every rank can make the update.

    loss   mean over the tokens of the step
    norm   of the whole gradient
    ready  how many ranks stand ready for the world of `epoch`, and the sum of those epochs
    """

    step: int
    loss: float
    norm: float
    ready: tuple[int, int]


@dataclass(frozen=True)
class Setup:
    """What stays the same in every world."""

    model: Model
    optimizer: AdamW
    data: DataSource
    record: Recorder
    pacer: Pacer | None


class Engine:
    """Runs steps of one rank in one world."""

    def __init__(self, setup: Setup, world: World, shard: Shard, plan: Plan, waited: WaitClock):
        self.setup, self.world, self.shard, self.plan = setup, world, shard, plan
        self.whole = False
        self._waited = waited
        self._mine = replica_of(plan.layout, plan.quotas)[world.place.dp]
        self._ranges = {part: part_ranges(part, shard.ranges) for part in shard.parts}
        self._order = stage_order(
            plan.schedule,
            stage=world.place.pp,
            stages=len(plan.layout.replicas[world.place.dp].stages),
            microbatches=len(self._mine),
        )
        if any(item.part is not Part.WHOLE or item.chunk for item in self._order):
            raise ContractError("schedule", f"the runtime cannot run {plan.schedule}")
        self._box = exchange.Mailbox()

    def accumulate(self, step: int) -> float:
        """All passes of this rank's microbatches. Returns its part of the mean loss."""
        batches = self._load(step)
        running: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        loss = 0.0
        for item in self._order:
            packed = batches[item.microbatch]
            timing = _Timing(self._waited)
            if item.op is Op.FORWARD:
                running[item.microbatch] = self._forward(packed)
                if self.world.after is None:
                    loss += running[item.microbatch][1].item() / self._tokens_per_step(packed)
                outgoing = running[item.microbatch][1]
            else:
                outgoing = self._backward(packed, running.pop(item.microbatch))
            self._hold(packed, item.op, step, timing)
            self._send(item.op, outgoing)
            self._record(item.op, step, item.microbatch, timing, packed)
        self._box.drain()
        return loss if self.world.place.tp == 0 else 0.0

    def reduce(self, step: int, loss: float, ready_epoch: int) -> Reduced:
        """Sum the gradients and agree that they are whole. Nothing is updated yet.

        The last all-reduce is the point of no return: a rank that comes out of it knows that all
        ranks hold whole gradients, so that the update of this step can always be completed.
        `ready_epoch` is the next world for which this rank is ready, or 0.
        """
        timing = _Timing(self._waited)
        sum_over_replicas(self.shard, self.world)
        self.whole = True
        votes = [loss, float(ready_epoch > 0), float(ready_epoch)]
        mine = torch.tensor([0.0, *votes], dtype=torch.float64)
        mine[0] = squared_norm(self.shard, self.world)
        total = self.world.everyone.all_reduce(mine).tolist()
        self._record(Op.COLLECTIVE, step, -1, timing)
        ready = (round(total[2]), round(total[3]))
        return Reduced(step, total[1], total[0] ** 0.5, ready)

    def update(self, norm: float, step: int) -> None:
        """Clip and make the update. No communication."""
        timing = _Timing(self._waited)
        clip(self.shard, norm, self.setup.optimizer.max_norm)
        for group in self.shard.optimizer.param_groups:
            group["lr"] = self.setup.optimizer.rate(step)
        self.shard.optimizer.step()
        self.discard()
        self._record(Op.OPTIMIZER, step, -1, timing)

    def discard(self) -> None:
        """Throw the gradients away."""
        self.shard.optimizer.zero_grad(set_to_none=True)
        self.whole = False

    def release(self) -> None:
        """Free the state; only the groups are left. What another shard shares lives on there."""
        for module in self.shard.parts.values():
            for owner in module.modules():
                owner._parameters.clear()
        self.shard.tensors.clear()
        self.shard.optimizer.state.clear()
        self.shard.optimizer.param_groups.clear()

    def _load(self, step: int) -> list[Packed]:
        timing = _Timing(self._waited)
        batches = [self.setup.data(step, index) for index in self._mine]
        self._record(Op.DATA, step, -1, timing)
        return batches

    def _forward(self, packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        """Run this stage; returns its input (a leaf that gathers gradient) and its output."""
        before, tokens = self.world.before, len(packed.tokens)
        hidden = entry = torch.empty(0)
        if before is not None:
            hidden = exchange.receive_forward(before, self.world.tp, tokens, self.setup.model.width)
            hidden = entry = hidden.requires_grad_()
        for name, module in self.shard.parts.items():
            hidden = module(packed) if name == "first" else module(hidden, packed)
        return entry, hidden

    def _backward(self, packed: Packed, passed: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Run this stage backward; returns the gradient of its input."""
        entry, output = passed
        if self.world.after is None:
            output.backward(torch.full_like(output, 1.0 / self._tokens_per_step(packed)))
        else:
            grad = exchange.receive_backward(
                self.world.after, self.world.tp, len(packed.tokens), self.setup.model.width
            )
            output.backward(grad)
        return entry if entry.grad is None else entry.grad

    def _send(self, op: Op, outgoing: torch.Tensor) -> None:
        if op is Op.FORWARD and self.world.after is not None:
            exchange.send_forward(self._box, self.world.after, outgoing)
        if op is Op.BACKWARD and self.world.before is not None:
            exchange.send_backward(self._box, self.world.before, outgoing)

    def _tokens_per_step(self, packed: Packed) -> int:
        """The token budget is the same for all microbatches, so the mean is over all of them."""
        return len(packed.tokens) * self.plan.microbatches

    def _hold(self, packed: Packed, op: Op, step: int, timing: _Timing) -> None:
        if self.setup.pacer is not None:
            parts: Mapping[str, Mapping[str, tuple[int, int]]] = self._ranges
            flops = sum(self.setup.model.flops(part, r, packed) for part, r in parts.items())
            passes = 2.0 if op is Op.BACKWARD else 1.0
            self.setup.pacer.hold(passes * flops, step, timing.compute_s)

    def _record(
        self, op: Op, step: int, microbatch: int, timing: _Timing, packed: Packed | None = None
    ) -> None:
        compute_ms, wait_ms = timing.stop_ms()
        if packed is None:
            self.setup.record(
                op=op, step=step, microbatch=microbatch, compute_ms=compute_ms, wait_ms=wait_ms
            )
            return
        self.setup.record(
            op=op,
            step=step,
            microbatch=microbatch,
            compute_ms=compute_ms,
            wait_ms=wait_ms,
            tokens=len(packed.tokens),
            sequences=len(packed.seq_lens),
            sum_sq_len=packed.sum_sq_len,
            max_len=max(packed.seq_lens),
        )


class _Timing:
    """Time since it was made, split into computing and waiting."""

    def __init__(self, waited: WaitClock) -> None:
        self._waited, self._waited_before = waited, waited.seconds
        self._start = time.perf_counter()

    @property
    def compute_s(self) -> float:
        return time.perf_counter() - self._start - (self._waited.seconds - self._waited_before)

    def stop_ms(self) -> tuple[float, float]:
        """Computing and waiting so far, in milliseconds."""
        return max(self.compute_s, 0.0) * 1e3, (self._waited.seconds - self._waited_before) * 1e3
