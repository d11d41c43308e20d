"""One training step of one rank: pipeline passes, gradient sum, agreement, update."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch

from resihp.contracts import ContractError, Op, Plan, Schedule
from resihp.pipeline.orders import Part, Pass, stage_order

from ..instep.ledger import Holding, Kept, Spans, indices
from ..instep.shares import full_shares
from ..models import Packed
from ..worlds.comm import WaitClock
from ..worlds.world import World
from .account import account, losses_of, norm_of, squared_norms
from .data import Cursor
from .gradients import clip
from .ordered import OrderedReduction
from .passes import Passes
from .reduction import BucketedReduction, Reduction
from .setup import Setup
from .shard import Shard
from .sums import Gradients, OrderedSums, Parts, Rest, Sums


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
    """Runs steps of one rank in one world.

    A step is `accumulate`, `reduce`, `update`. Until `update` the local sums stay as they are, so
    whatever happens before it loses no other replica's work. Before it, `total` holds the whole
    gradients, summed here or handed over by another world. `rest` is what remains of a step that
    another world has begun; None: the next step is a whole one.
    """

    def __init__(
        self,
        setup: Setup,
        world: World,
        shard: Shard,
        plan: Plan,
        waited: WaitClock,
        rest: Rest | None = None,
    ) -> None:
        self.setup, self.world, self.shard, self.plan = setup, world, shard, plan
        self._waited = waited
        if plan.schedule is Schedule.INTERLEAVED:
            raise ContractError("schedule", "interleaved needs several layer ranges per stage")
        self._passes = Passes(
            setup.model,
            world,
            shard,
            split=plan.schedule is Schedule.ZERO_BUBBLE,
            compute_dtype=setup.compute_dtype,
        )
        kind = OrderedSums if setup.deterministic else Sums
        self._sums = kind(shard.tensors, plan.microbatches)
        self.total: Gradients | None = None
        self._losses: dict[int, float] = {}
        self._start(rest or Rest(full_shares(plan)))

    @property
    def is_accumulated(self) -> bool:
        """Whether all passes of this rank in the present step are done."""
        return self._sums.finished == self._share.whole

    def holding(self, epoch: int) -> Holding:
        """What this rank's gradients stand for now."""
        summed = self.total is not None
        return holding(self.world, epoch, self._sums.finished, summed=summed)

    def parts_of(self, kept: Kept) -> Parts:
        """This rank's ranges of a sum that its replica holds."""
        if kept.total:
            assert self.total is not None
            return [((0, self.plan.microbatches), self.total)]
        return self._sums.parts()

    def losses_of(self, kept: Kept) -> Mapping[int, float]:
        """The losses that this rank knows of a kept sum's microbatches."""
        if kept.total:
            return self._losses
        is_mine = self.world.place.dp == kept.replica and self.world.after is None
        return self._sums.losses if is_mine else {}

    def accumulate(self, step: int) -> None:
        """All passes of this rank's microbatches; no other replica takes part."""
        batches, order = self._load(step), self._order()
        last_of = {item.microbatch: item for item in order}
        first_halves: dict[int, tuple[float, float]] = {}
        for item in order:
            packed, index = batches[item.microbatch], self._share.todo[item.microbatch]
            timing, loss_weight = _Timing(self._waited), self._loss_weight(packed)
            with self._adding(item, index, is_last=item is order[-1]):
                outgoing = self._passes.run(item, packed, loss_weight)
            if item.op is Op.FORWARD and self.world.after is None:
                self._losses[index] = outgoing.item() * loss_weight
            if item is last_of[item.microbatch]:
                self._sums.finish(index, self._losses.pop(index, 0.0))
            if self.setup.pacer is not None:
                flops = self._passes.flops(item, packed)
                self.setup.pacer.hold(flops, step, timing.compute_s)
            self._passes.send(item, outgoing)
            if item.part is Part.INPUT:
                first_halves[index] = timing.stop_ms()
                continue
            timing.earlier = first_halves.pop(index, (0.0, 0.0))
            self._record(item.op, step, index, timing, packed)
        self._passes.drain()

    def reduce(self, step: int, ready_epoch: int) -> Reduced:
        """Sum the gradients and agree that they are whole. Nothing is updated yet.

        The last all-reduce is the point of no return: a rank that comes out of it knows that all
        ranks hold whole gradients, so that the update of this step can always be completed.
        `ready_epoch` is the next world for which this rank is ready, or 0.
        """
        timing, everyone = _Timing(self._waited), self.world.everyone
        line = account(self._sums.finished, self._sums.losses, self.world, self.plan.microbatches)
        counting = everyone.start_all_reduce(line)  # on its way while the buckets are
        total = self._reduction.finish()
        everyone.complete(counting)
        self._losses, self.total = losses_of(line), total
        squares = squared_norms(total, self.world, self.setup.model.parameters)
        votes = torch.tensor([float(ready_epoch > 0), float(ready_epoch)], dtype=torch.float64)
        summed = everyone.all_reduce(torch.cat((votes, squares)))
        self._record(Op.COLLECTIVE, step, -1, timing)
        ready = (round(float(summed[0])), round(float(summed[1])))
        return Reduced(step, math.fsum(self._losses.values()), norm_of(summed[2:]), ready)

    def update(self, norm: float, step: int) -> None:
        """Clip the summed gradients and make the update. No communication."""
        timing = _Timing(self._waited)
        optimizer, data = self.setup.optimizer, self.setup.data
        assert self.total is not None, "only a gradient that is whole everywhere may be used"
        for param, tensor in self.shard.tensors.items():
            tensor.grad = self.total[param]
        if optimizer.max_norm is not None:
            clip(self.shard, norm, optimizer.max_norm)
        optimizer.set_rate(self.shard.optimizer, step)
        self.shard.optimizer.step()
        if isinstance(data, Cursor):
            data.finish(step)
        self._start(Rest(full_shares(self.plan)))
        self._record(Op.OPTIMIZER, step, -1, timing)

    def release(self) -> None:
        """Free the state; only the groups are left. What another shard shares lives on there."""
        for module in self.shard.parts.values():
            for owner in module.modules():
                owner._parameters.clear()
        self.shard.tensors.clear()
        self.shard.optimizer.state.clear()
        self.shard.optimizer.param_groups.clear()

    @contextmanager
    def _adding(self, item: Pass, microbatch: int, *, is_last: bool) -> Iterator[None]:
        """Around a pass, which may add to the gradients."""
        # A split pass may come back to a parameter, so nothing of it is sent before its end.
        sends_ahead = is_last and item.part is Part.WHOLE
        with (
            self._sums.adding(microbatch) if item.op is Op.BACKWARD else nullcontext(),
            self._reduction.during_last_pass() if sends_ahead else nullcontext(),
        ):
            yield

    def _start(self, rest: Rest) -> None:
        """Begin a step, or what is left of one."""
        self._share = rest.shares[self.world.place.dp]
        self._sums.start(rest.parts, {i: rest.losses[i] for i in indices(self._share.begun)})
        self.total, self._losses = None, {}
        self._reduction: Reduction
        if self.setup.deterministic:
            held = [share.whole for share in rest.shares]
            self._reduction = OrderedReduction(
                self.shard, self.world, self._sums, held, self.plan.microbatches
            )
        else:
            self._reduction = BucketedReduction(
                self.shard, self.world, self._sums, bucket_bytes=self.setup.bucket_bytes
            )

    def _order(self) -> tuple[Pass, ...]:
        """The passes of this rank's stage over its share."""
        place = self.world.place
        return stage_order(
            self.plan.schedule,
            stage=place.pp,
            stages=len(self.world.layout.replicas[place.dp].stages),
            microbatches=len(self._share.todo),
        )

    def _load(self, step: int) -> list[Packed]:
        timing = _Timing(self._waited)
        data, todo = self.setup.data, self._share.todo
        batches = [replace(data(step, index), step=step, index=index) for index in todo]
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


def holding(world: World, epoch: int, finished: Spans, *, summed: bool = False) -> Holding:
    """What gradients of `finished` microbatches stand for on this rank of `world`."""
    dp = world.place.dp
    return Holding(epoch, dp, len(world.layout.replicas[dp].ranks), finished, summed)


class _Timing:
    """Time since it was made, split into computing and waiting; `earlier` is added to it."""

    def __init__(self, waited: WaitClock) -> None:
        self.earlier = (0.0, 0.0)
        self._waited, self._waited_before = waited, waited.seconds
        self._start = time.perf_counter()

    @property
    def compute_s(self) -> float:
        return time.perf_counter() - self._start - (self._waited.seconds - self._waited_before)

    def stop_ms(self) -> tuple[float, float]:
        """Computing and waiting so far, in milliseconds, and what was `earlier`."""
        waited_s = self._waited.seconds - self._waited_before
        compute_ms = max(self.compute_s, 0.0) * 1e3
        return self.earlier[0] + compute_ms, self.earlier[1] + waited_s * 1e3
