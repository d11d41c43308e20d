"""One training step of one rank: pipeline passes, gradient sum, agreement, update."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from resihp.contracts import Op, Plan
from resihp.layout import replica_of
from resihp.pipeline.orders import stage_order

from ..models import Packed
from ..worlds.comm import WaitClock
from ..worlds.world import World
from .data import Cursor
from .gradients import clip, squared_norm, sum_over_replicas
from .passes import Passes
from .setup import Setup
from .shard import Shard


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


class Engine:
    """Runs steps of one rank in one world."""

    def __init__(self, setup: Setup, world: World, shard: Shard, plan: Plan, waited: WaitClock):
        self.setup, self.world, self.shard, self.plan = setup, world, shard, plan
        self.whole = False
        self._waited = waited
        self._mine = replica_of(plan.layout, plan.quotas)[world.place.dp]
        self._order = stage_order(
            plan.schedule,
            stage=world.place.pp,
            stages=len(plan.layout.replicas[world.place.dp].stages),
            microbatches=len(self._mine),
        )
        self._passes = Passes(setup.model, world, shard)

    def accumulate(self, step: int) -> float:
        """All passes of this rank's microbatches. Returns its part of the mean loss."""
        batches = self._load(step)
        loss = 0.0
        for item in self._order:
            packed = batches[item.microbatch]
            timing, loss_weight = _Timing(self._waited), self._loss_weight(packed)
            outgoing = self._passes.run(item, packed, loss_weight)
            if item.op is Op.FORWARD and self.world.after is None:
                loss += outgoing.item() * loss_weight
            if self.setup.pacer is not None:
                flops = self._passes.flops(item, packed)
                self.setup.pacer.hold(flops, step, timing.compute_s)
            self._passes.send(item, outgoing)
            self._record(item.op, step, item.microbatch, timing, packed)
        self._passes.drain()
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
        optimizer, data = self.setup.optimizer, self.setup.data
        if optimizer.max_norm is not None:
            clip(self.shard, norm, optimizer.max_norm)
        optimizer.set_rate(self.shard.optimizer, step)
        self.shard.optimizer.step()
        self.discard()
        if isinstance(data, Cursor):
            data.finish(step)
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

    def _loss_weight(self, packed: Packed) -> float:
        """The token budget is the same for all microbatches, so the mean is over all of them."""
        return 1.0 / (len(packed.tokens) * self.plan.microbatches)

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
