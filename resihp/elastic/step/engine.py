"""Training step of one rank: pipeline passes, gradient all-reduce, commit vote, update."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch

from resihp.contracts import ContractError, Op, Plan, Schedule
from resihp.layout import StateRange
from resihp.pipeline.orders import Part, Pass

from ..microbatches.assignment import full_assignments
from ..microbatches.counts import (
    MicrobatchReport,
    StepCounts,
    count_rows,
    missing_microbatches,
    read_counts,
)
from ..microbatches.ledger import GradientHolding, SurvivingSum, indices, spans
from ..microbatches.stealing import Claims
from ..models import Packed
from ..process_groups.abortable import WaitClock
from ..process_groups.layout_groups import LayoutGroups
from .data import Cursor
from .gradient_accumulation import (
    DeterministicGradientSum,
    GradientSum,
    Parts,
    StepRemainder,
)
from .gradient_allreduce import (
    DeterministicAllReduce,
    GradientAllReduce,
    SummedGradients,
    clip,
    norm_of,
    squared_norms,
)
from .schedule import check_schedule, order_of
from .setup import Setup
from .shard import Shard
from .stage_runner import StageRunner
from .state_sharding import GradientReduceScatter, ParameterAllGather
from .step_microbatches import StepMicrobatches
from .telemetry import PassRecorder


@dataclass(frozen=True)
class ReducedStep:
    """Step whose gradients are summed on all ranks, so that every rank can update.

    loss   mean over the tokens of the step
    norm   of the whole gradient
    ready  number of ranks ready for the next generation, and the sum of their generation numbers
    is_due the state after this step must be saved
    stolen microbatches that another replica has computed than the one they were assigned to
    """

    step: int
    loss: float
    norm: float
    ready: tuple[int, int]
    is_due: bool = False
    stolen: int = 0


class Engine:
    """Runs steps of one rank in one generation.

    A step is `accumulate`, `reduce`, `update`, `gather`. The local sums do not change until
    `update`, so that a failure before it loses no other replica's work. `total` holds the whole
    gradients before `update`, of the rows whose optimizer state this rank holds, summed here or
    transferred from the previous generation. `rest` is the remainder of a step that the previous
    generation began; None: the next step is a whole one.

    is_ending       set while the last pass of this rank in a step runs, and behind it
    is_accumulated  all passes of this rank in the current step are done
    is_gathered     no update of other ranks is missing in the parameters
    can_claim       all ranks could reach the store in the last step, so that replicas may claim
                    microbatches in the next one; equal on all ranks
    """

    def __init__(
        self,
        setup: Setup,
        groups: LayoutGroups,
        shard: Shard,
        plan: Plan,
        waited: WaitClock,
        rest: StepRemainder | None = None,
    ) -> None:
        self.setup, self.groups, self.shard, self.plan = setup, groups, shard, plan
        self._telemetry = PassRecorder(setup.record, waited, groups.device)
        check_schedule(plan, setup.max_in_flight)
        self._passes = StageRunner(
            setup.model,
            groups,
            shard,
            split=plan.schedule is Schedule.ZERO_BUBBLE,
            compute_dtype=setup.compute_dtype,
            recompute=setup.recompute,
            compile_backend=setup.compile_backend,
            record_transfer=setup.record_transfer,
        )
        kind = DeterministicGradientSum if setup.deterministic else GradientSum
        self._sums = kind(shard.tensors, plan.microbatches)
        self.total: SummedGradients | None = None
        self._gather = None
        if groups.state is not None:
            self._gather = ParameterAllGather(shard, groups, setup.bucket_bytes)
        self.is_gathered = self._gather is None
        self.is_ending = threading.Event()
        self.can_claim = True
        self._overlapped: GradientAllReduce | None = None
        self._losses: dict[int, float] = {}
        self._start(rest or StepRemainder(full_assignments(plan)))

    def holding(self, generation: int) -> GradientHolding:
        """Describe the gradients that this rank holds now."""
        summed = self.total is not None
        return self.groups.holding(generation, self._sums.finished, summed=summed)

    def parts_of(self, kept: SurvivingSum) -> Parts:
        """Return this rank's shard of a sum that its replica holds."""
        if kept.total:
            assert self.total is not None
            total = {param: gradient for (param, _), gradient in self.total.items()}
            return [((0, self.plan.microbatches), total)]
        return self._sums.parts()

    def losses_of(self, kept: SurvivingSum) -> Mapping[int, float]:
        """Return the losses of a kept sum's microbatches that this rank knows."""
        if kept.total:
            return self._losses
        is_mine = self.groups.place.dp == kept.replica and self.groups.after is None
        return self._sums.losses if is_mine else {}

    @property
    def loss(self) -> float:
        """Mean over the tokens of the step, once there is a `total`."""
        return math.fsum(self._losses.values())

    def sum_of(self, held: StateRange) -> torch.Tensor | None:
        """Return the whole gradient of some rows in this step if it is there by now.

        From any thread, on the CPU, in steps in which no replica claims microbatches. It stays as
        it is until `update`.
        """
        if self.total is not None:
            return self.total[held]
        return self._overlapped.sum_of(held) if self._overlapped is not None else None

    def accumulate(
        self,
        step: int,
        is_broken: Callable[[], bool] = lambda: False,
        claims: Claims | None = None,
    ) -> None:
        """Run all passes of this rank's microbatches; no other replica takes part.

        With `claims`, replicas of one stage take pending microbatches from each other. A replica of
        one stage stops between two microbatches once the generation `is_broken`, if survivors of
        another replica could take over part of the remaining ones.
        """
        mine = self._microbatches
        mine.begin(step, claims)
        loaded = {packed.index: packed for packed in self._load(step, mine.own)}
        with self.setup.casting_once():
            if not mine.is_one_by_one and loaded:
                self._run(list(loaded.values()), lambda: True)
            while mine.following is not None and not mine.is_stopped:
                packed = loaded.pop(mine.following, None)
                packed = packed or self._load(step, [mine.following])[0]
                mine.ask()
                self._run([packed], lambda: mine.advance(is_broken))
                mine.check(is_broken)
        self._passes.drain()
        self.is_accumulated = not mine.is_stopped
        if self.is_accumulated:
            self._sums.complete()
            self.is_ending.set()

    def reduce(
        self, step: int, ready_generation: int, *, is_due: bool = False, can_claim: bool = False
    ) -> ReducedStep:
        """Sum the gradients and vote that they are whole; update nothing.

        The last all-reduce commits the step: a rank that leaves it knows that all ranks hold whole
        gradients, so that the update can be completed after any later loss.
        `ready_generation` is the next generation that this rank has prepared, or 0; `is_due` asks
        all ranks to save the state after this step; `can_claim`: this rank reaches the store.
        """
        timing, everyone = self._telemetry.start(), self.groups.everyone
        counts = self._count(step)
        total = (self._overlapped or self._ordered_sum(counts)).finish()
        squares = squared_norms(total, self.groups, self.setup.model.parameters)
        self._losses, self.total = dict(enumerate(counts.losses)), total
        votes = torch.tensor(
            [ready_generation > 0, ready_generation, is_due, can_claim],
            dtype=torch.float64,
            device=self.groups.device,
        )
        summed = everyone.all_reduce(torch.cat((votes, squares)))
        self._telemetry.record(Op.COLLECTIVE, step, timing)
        ready = (round(float(summed[0])), round(float(summed[1])))
        self.can_claim = round(float(summed[3])) == len(everyone)
        norm = norm_of(summed[4:])
        stolen = self._microbatches.stolen(counts.replicas)
        return ReducedStep(step, self.loss, norm, ready, bool(summed[2] > 0), stolen)

    def update(self, norm: float, step: int) -> None:
        """Clip the summed gradients and update, without communication.

        What is held in part is to be gathered after it.
        """
        timing = self._telemetry.start()
        optimizer, data = self.setup.optimizer, self.setup.data
        assert self.total is not None, "only a gradient that is whole everywhere may be used"
        for held, tensor in self.shard.slices.items():
            tensor.grad = self.total[held]
        if optimizer.max_norm is not None:
            clip(self.shard, norm, optimizer.max_norm)
        optimizer.set_rate(self.shard.optimizer, step)
        self.shard.optimizer.step()
        self.is_gathered = self._gather is None
        for tensor in self.shard.slices.values():
            tensor.grad = None
        if isinstance(data, Cursor):
            data.finish(step)
        self._start(StepRemainder(full_assignments(self.plan)))
        self._telemetry.record(Op.OPTIMIZER, step, timing)

    def gather(self) -> None:
        """Fill parameters of which other ranks alone hold the optimizer state, and update them.

        All ranks of the layout do, after an update and after a change. Raises `PeerLostError`.
        """
        if self._gather is not None:
            self._gather.run()
            self.is_gathered = True

    def release(self) -> None:
        """Free the state but not the groups; tensors shared with another shard stay there.

        One tensor after the other: the system takes its pages back under the interpreter's lock.
        """
        shard, self._overlapped = self.shard, None
        for module in shard.parts.values():
            for owner in module.modules():
                owner._parameters.clear()
        shard.slices.clear()
        shard.optimizer.param_groups.clear()
        for held in (self.total or {}, shard.optimizer.state, shard.tensors):
            while held:
                held.popitem()
                time.sleep(0)  # others may run

    # Passes.

    def _run(self, batches: Sequence[Packed], is_last: Callable[[], bool]) -> None:
        """Run the passes of some microbatches; `is_last` before the last one: no other follows."""
        order = order_of(self.plan, self.groups, len(batches), self.setup.max_in_flight)
        last_of = {item.microbatch: item for item in order}
        first_halves: dict[int, tuple[float, float]] = {}
        for item in order:
            packed = batches[item.microbatch]
            sends_ahead = item is order[-1] and is_last()
            timing = self._telemetry.start()
            # Weight of a token: all microbatches have the same number of tokens.
            loss_weight = 1.0 / (len(packed.tokens) * self.plan.microbatches)
            kernels = self.setup.attention_kernels()
            with self._adding(item, packed.index, is_last=sends_ahead), kernels:
                outgoing = self._passes.run(item, packed, loss_weight)
            timing.finish()  # what is sent next is stamped, and its receiver waits from then on
            if item.op is Op.FORWARD and self.groups.target(item.chunk) is None:
                self._losses[packed.index] = outgoing.item() * loss_weight
            if item is last_of[item.microbatch]:
                self._sums.finish(packed.index, self._losses.pop(packed.index, 0.0))
            if self.setup.pacer is not None:
                flops = self._passes.flops(item, packed)
                timing.device_s = self.setup.pacer.hold(flops, packed.step, timing.compute_s)
            self._passes.send(item, outgoing, packed)
            if item.part is Part.INPUT:
                first_halves[packed.index] = timing.stop_ms()
                continue
            timing.earlier = first_halves.pop(packed.index, (0.0, 0.0))
            self._telemetry.record_pass(item.op, packed, timing, chunk=item.chunk)

    @contextmanager
    def _adding(self, item: Pass, microbatch: int, *, is_last: bool) -> Iterator[None]:
        """Enclose a pass, which may add to the gradients."""
        # A split pass may come back to a parameter, so nothing of it is sent before its end.
        overlapped = self._overlapped if is_last and item.part is Part.WHOLE else None
        if overlapped is not None:
            self.is_ending.set()
        with (
            self._sums.adding(microbatch) if item.op is Op.BACKWARD else nullcontext(),
            overlapped.during_last_pass(self._passes.params(item))
            if overlapped is not None
            else nullcontext(),
        ):
            yield

    # Counts and sums.

    def _count(self, step: int) -> StepCounts:
        """Count all microbatches of the step, each once.

        One that no replica has claimed, because the store did not answer, is computed now by the
        replica that it was assigned to; all ranks know of it from the count.
        """
        everyone = self.groups.everyone
        while True:
            counted = self._counts()
            counting = everyone.start_all_reduce(counted)  # on its way while the buckets are
            if self._overlapped is not None:
                self._overlapped.start()
            everyone.wait(counting)
            missing = missing_microbatches(counted) if self._microbatches.is_claimed else ()
            if not missing:
                return read_counts(counted)
            self._microbatches.is_claimed = False
            if self._overlapped is not None:
                self._overlapped.discard()
                self._overlapped = self._new_all_reduce()
            for index in self._microbatches.own:
                if index in missing:
                    self._run(self._load(step, [index]), lambda: False)

    def _counts(self) -> torch.Tensor:
        """Rows of this rank in the counts of the step; one rank of the last stage gives losses."""
        groups, losses = self.groups, self._sums.losses
        gives_loss = groups.after is None and groups.place.tp == 0
        reports = {
            index: MicrobatchReport(losses[index] if gives_loss else None)
            for index in indices(self._sums.finished)
        }
        rows = count_rows(
            reports,
            self.plan.microbatches,
            members=len(groups.layout.replicas[groups.place.dp].ranks),
            replica=groups.place.dp,
        )
        return rows.to(groups.device)

    def _new_all_reduce(self) -> GradientAllReduce | None:
        """Return the sum that overlaps with backward; None: the order of summation is fixed."""
        if self.setup.deterministic:
            return None
        kind = GradientAllReduce if self.groups.state is None else GradientReduceScatter
        return kind(self.shard, self.groups, self._sums, self.setup.bucket_bytes)

    def _ordered_sum(self, counts: StepCounts) -> GradientAllReduce:
        """Return the sum in the fixed order, over what each replica has computed."""
        held = [
            spans(index for index, computed_by in enumerate(counts.replicas) if computed_by == dp)
            for dp in range(self.groups.layout.dp)
        ]
        return DeterministicAllReduce(
            self.shard, self.groups, self._sums, held, self.plan.microbatches
        )

    # Assignments and data.

    def _start(self, rest: StepRemainder) -> None:
        """Begin a step, or the remainder of one."""
        self._microbatches = StepMicrobatches(self.setup, self.groups, self.plan, rest.shares)
        begun = indices(rest.shares[self.groups.place.dp].begun)
        self._sums.start(rest.parts, {index: rest.losses[index] for index in begun})
        self.total, self._losses = None, {}
        self.is_accumulated = False
        self.is_ending.clear()
        self._overlapped = self._new_all_reduce()

    def _load(self, step: int, microbatches: Sequence[int]) -> list[Packed]:
        timing = self._telemetry.start()
        batches = [self._microbatch(step, index) for index in microbatches]
        self._telemetry.record(Op.DATA, step, timing)
        return batches

    def _microbatch(self, step: int, index: int) -> Packed:
        packed: object = self.setup.data(step, index)
        if not isinstance(packed, Packed):
            kind = type(packed).__name__
            raise ContractError("data", f"must give resihp.elastic.models.Packed, not {kind}")
        return replace(packed.to(self.setup.device), step=step, index=index)
