"""Memory of pipeline stages: peak bytes of ranks, layers that fit, schedules that fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import Action, Job, Layout, Op, Plan, RankAmount, Replica, Schedule, Stage
from resihp.pipeline.orders import (
    Part,
    Pass,
    chunks_run,
    most_in_flight,
    most_split,
    replica_orders,
)

Floats: TypeAlias = NDArray[np.float64]
Counts: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_] | np.bool_ | bool

_UNLIMITED = 1 << 30


@dataclass(frozen=True)
class MemoryFootprint:
    """Bytes of one layer, of its activations for one microbatch, and of embedding and head.

    A rank with share q of a stage holds the fraction q of weights, gradients and optimizer state,
    and of activations, apart from what every rank of the stage holds.

    layer, first, last  weights, gradients and optimizer state
    tied_bytes          of what first and last have in common, if one stage holds both
    activations         of a layer for one microbatch; `first_activations` those of the embedding
    layer_pass, head_pass  most that one pass needs on top, once
    layer_split, head_split  what is held between the halves of a split backward pass instead of
                        `activations`, and by the head
    layer_split_pass, head_split_pass  most that such a pass needs on top, once
    boundary_bytes      output of a stage, kept for each microbatch in flight
    reduce_share        of the state, again, for gradients summed over replicas
    update_share        of the state, again, that the optimizer copies for an update
    update              most that it needs besides, when no activations are held
    """

    layer: RankAmount
    first: RankAmount
    last: RankAmount
    tied_bytes: float
    activations: RankAmount
    budget_bytes: float | None
    first_activations: RankAmount
    layer_pass: RankAmount
    head_pass: RankAmount
    layer_split: RankAmount
    head_split: RankAmount
    layer_split_pass: RankAmount
    head_split_pass: RankAmount
    boundary_bytes: float
    reduce_share: float
    update_share: float
    update: RankAmount

    @classmethod
    def of(cls, job: Job, replicas: int) -> MemoryFootprint:
        """Footprint of a job with `replicas` replicas, which may share optimizer state.

        Without measured figures activations in bf16 with selective recomputation take 34 bytes per
        token and hidden unit, with full recomputation 2 (Korthikanti et al., 2022, eq. 2).
        """
        memory, model = job.memory, job.model
        held = min(1.0, memory.optimizer_copies / replicas) if memory.sharded_optimizer else 1.0
        per_param = memory.bytes_per_param + memory.optimizer_bytes_per_param * held
        layer, table = (model.layer_params, model.embedding_params) if model else (0, 0)
        reduced = memory.reduce_bytes_per_param if replicas > 1 else 0.0
        activations = memory.layer_activations or RankAmount(split=_derived_activations(job))
        between = max(activations, memory.layer_split, key=lambda one: one.of_share(1.0))
        whole = _less(memory.layer_pass, _less(between, activations))
        return cls(
            layer=_scaled(memory.layer_params or RankAmount(split=layer), per_param),
            first=_scaled(memory.first_params or RankAmount(split=table), per_param),
            last=_scaled(memory.last_params or RankAmount(split=table), per_param),
            tied_bytes=table * per_param if model and model.tied_embeddings else 0.0,
            activations=activations,
            budget_bytes=memory.budget_bytes,
            first_activations=memory.first_activations,
            layer_pass=memory.layer_pass,
            head_pass=memory.head_pass,
            layer_split=between,
            head_split=memory.head_split,
            layer_split_pass=memory.layer_split_pass or whole,
            head_split_pass=memory.head_split_pass or _less(memory.head_pass, memory.head_split),
            boundary_bytes=memory.boundary_bytes,
            reduce_share=reduced / per_param if per_param else 0.0,
            update_share=memory.update_bytes_per_param / per_param if per_param else 0.0,
            update=memory.update,
        )

    @property
    def is_known(self) -> bool:
        """True if the budget and the size of activations are known."""
        return self.budget_bytes is not None and self.activations.of_share(1.0) > 0.0

    def most_layers(self, widest: Floats, in_flight: Counts, split: Counts) -> NDArray[np.int64]:
        """Layers that fit into every stage, [chain, stage].

        widest     share of the layer that the stage's most loaded rank holds
        in_flight  microbatches of which the stage holds activations
        split      those of them between the halves of their backward pass; a chain of one stage
                   has no bubble, and runs both halves as one
        """
        if self.budget_bytes is None:
            return np.full(widest.shape, _UNLIMITED)
        stages = np.arange(widest.shape[1])
        split = split if len(stages) > 1 else np.zeros_like(split)
        first, last = stages == 0, stages == stages[-1]
        state = self._ends(widest, first, last)
        layer, head = self._working(widest, split, last)
        each, besides = self._held(widest, in_flight, split, first, last)
        held = _of_share(self.layer, widest)
        room = self.budget_bytes - state - besides - np.maximum(layer, head)
        fits = _layers_in(room, held + each)
        for share, more in self._after_passes(widest, first):
            left = (self.budget_bytes - more) / (1.0 + share) - state
            fits = np.minimum(fits, _layers_in(left, held))
        return np.asarray(np.clip(np.floor(fits + 1e-9), 0, _UNLIMITED), np.int64)

    def stage_bytes(
        self, stage: Stage, *, first: bool, last: bool, in_flight: int, split: int = 0
    ) -> list[float]:
        """Peak bytes of every rank of a stage; `in_flight` and `split` as in `most_layers`."""
        shares = np.array(stage.shares) / sum(stage.shares)
        split = 0 if first and last else split
        layers, is_last = stage.layer_count, np.array(last)
        state = layers * _of_share(self.layer, shares) + self._ends(shares, first, is_last)
        layer, head = self._working(shares, np.array(split), is_last)
        each, besides = self._held(shares, np.array(in_flight), np.array(split), first, is_last)
        most = layers * each + besides + np.maximum(layer if layers else 0.0, head)
        for share, more in self._after_passes(shares, first):
            most = np.maximum(most, share * state + more)
        found: list[float] = (state + most).tolist()
        return found

    def _ends(self, shares: Floats, first: Flags, last: Flags) -> Floats:
        """State of embedding and head."""
        ends = first * _of_share(self.first, shares) + last * _of_share(self.last, shares)
        return np.asarray(ends - (first & last) * self.tied_bytes * shares)

    def _held(
        self, shares: Floats, in_flight: Counts, split: Counts, first: Flags, last: Flags
    ) -> tuple[Floats, Floats]:
        """Activations of microbatches in flight: of each layer, and besides."""
        each = (in_flight - split) * _of_share(self.activations, shares)
        each = each + split * _of_share(self.layer_split, shares)
        besides = first * in_flight * _of_share(self.first_activations, shares)
        besides = besides + last * split * _of_share(self.head_split, shares)
        boundaries = in_flight * ~last + split  # outputs, and gradients of the input
        return each, besides + self.boundary_bytes * boundaries

    def _working(self, shares: Floats, split: Counts, last: Flags) -> tuple[Floats, Floats]:
        """Most that a pass needs on top, through a layer and through the head."""
        split_pass, split_head = self.layer_split_pass, self.head_split_pass
        is_split = split > 0
        layer = np.where(
            is_split, _of_share(split_pass, shares), _of_share(self.layer_pass, shares)
        )
        head = np.where(is_split, _of_share(split_head, shares), _of_share(self.head_pass, shares))
        return layer, np.asarray(last * head, np.float64)

    def _after_passes(self, shares: Floats, first: Flags) -> Iterator[tuple[float, Floats]]:
        """Memory needed beside the state once no activations are held: a share of the state, and
        bytes besides.

        First in the update, for which the sums over replicas take the place of the gradients; then
        while these are summed. The last pass still ends then; above the embedding it runs through a
        layer whose gradients are not summed yet, nor those of the embedding.
        """
        yield self.update_share, _of_share(self.update, shares)
        if self.reduce_share:
            later = first * (_of_share(self.layer, shares) + _of_share(self.first, shares))
            own_pass = _of_share(self.layer_pass, shares)
            yield self.reduce_share, np.maximum(own_pass - self.reduce_share * later, 0.0)


def _layers_in(room: Floats, each: Floats) -> Floats:
    """Layers of `each` bytes that fit into `room`; of no bytes any number, also without room."""
    unlimited = np.where(room >= 0.0, float(_UNLIMITED), 0.0)
    return np.where(each > 0.0, room / np.maximum(each, 1e-9), unlimited)


def _scaled(amount: RankAmount, factor: float) -> RankAmount:
    return RankAmount(split=amount.split * factor, whole=amount.whole * factor)


def _less(amount: RankAmount, other: RankAmount) -> RankAmount:
    return RankAmount(
        split=max(amount.split - other.split, 0.0), whole=max(amount.whole - other.whole, 0.0)
    )


def _of_share(amount: RankAmount, shares: Floats) -> Floats:
    return shares * amount.split + amount.whole


def _derived_activations(job: Job) -> float:
    """Bytes of one layer's activations where they have not been measured."""
    if job.memory.activation_bytes_per_layer is not None:
        return float(job.memory.activation_bytes_per_layer)
    tokens, hidden = job.tokens_per_microbatch or 0, job.model.hidden if job.model else 0
    return float((2 if job.recompute else 34) * tokens * hidden)


def fits(job: Job, layout: Layout, quotas: Sequence[int], schedule: Schedule) -> bool:
    """True if every rank of `layout` has enough memory under `schedule`."""
    budget = job.memory.budget_bytes
    return budget is None or peak_bytes(job, layout, quotas, schedule) <= budget


def peak_bytes(job: Job, layout: Layout, quotas: Sequence[int], schedule: Schedule) -> float:
    """Most memory that any rank of `layout` needs under `schedule`."""
    return fullest_rank(job, layout, quotas, schedule)[0]


def fullest_rank(
    job: Job, layout: Layout, quotas: Sequence[int], schedule: Schedule
) -> tuple[float, int]:
    """Most memory that any rank of `layout` needs under `schedule`, and the first such rank.

    Of replicas that are alike, which are most of a large job's, the first one is looked at.
    """
    footprint = MemoryFootprint.of(job, layout.dp)
    chunks = chunks_run(job, layout.replicas, schedule)
    alike: dict[tuple[object, ...], Iterator[tuple[float, int]]] = {}
    for replica, quota, count in zip(layout.replicas, quotas, chunks, strict=True):
        held = tuple([(stage.layer_count, stage.shares) for stage in replica.stages])
        peaks = _stage_peaks(job, footprint, replica, quota, schedule, count)
        alike.setdefault((held, replica.in_flight, quota, count), peaks)
    return max(chain.from_iterable(alike.values()), key=itemgetter(0))


def replica_fits(
    job: Job, footprint: MemoryFootprint, replica: Replica, quota: int, schedule: Schedule
) -> bool:
    """True if every rank of a replica has enough memory for `quota` microbatches."""
    budget = footprint.budget_bytes
    if budget is None:
        return True
    peaks = _stage_peaks(job, footprint, replica, quota, schedule, replica.chunks)
    return all(peak <= budget for peak, _ in peaks)


def _stage_peaks(
    job: Job,
    footprint: MemoryFootprint,
    replica: Replica,
    quota: int,
    schedule: Schedule,
    chunks: int,
) -> Iterator[tuple[float, int]]:
    """Most memory that a rank of each stage needs for `quota` microbatches, and that rank."""
    last = len(replica.stages) - 1
    if replica.in_flight:
        limit: Sequence[int] = replica.in_flight
    elif chunks == 1:
        limit = most_in_flight(schedule, last + 1, job.max_in_flight)
    else:
        given = quota, Schedule.INTERLEAVED
        orders = replica_orders(replica, *given, max_in_flight=job.max_in_flight, chunks=chunks)
        limit = [most_held(order) for order in orders]
    between = most_split(schedule, last + 1, job.max_in_flight)
    for index, stage in enumerate(replica.stages):
        held = footprint.stage_bytes(
            stage,
            first=index == 0,
            last=index == last,
            in_flight=min(limit[index], quota),
            split=min(between[index], quota),
        )
        yield max(zip(held, stage.ranks, strict=True), key=itemgetter(0))


def most_held(order: Sequence[Pass]) -> int:
    """Peak number of microbatches in flight in a stage, in units of all of its chunks."""
    chunks = 1 + max((item.chunk for item in order), default=0)
    held = most = 0
    for item in order:
        if item.op is Op.FORWARD:
            held += 1
            most = max(most, held)
        elif item.part is not Part.INPUT:
            held -= 1
    return -(-most // chunks)


def most_between(order: Sequence[Pass]) -> int:
    """Peak number of microbatches between the halves of their backward pass in a stage."""
    held = most = 0
    for item in order:
        held += (item.part is Part.INPUT) - (item.part is Part.WEIGHT)
        most = max(most, held)
    return most


def plan_schedules(job: Job) -> tuple[Schedule, ...]:
    """Schedules that plans of the job may use, the preferred one first.

    Those that the job permits; by default its own schedule, and eager 1F1B in addition to 1F1B.
    Eager 1F1B runs the same passes on the same data and sums gradients in the same order; it starts
    forwards earlier and so holds more activations. By default it is only permitted if the memory
    budget and the size of activations are known. A split backward runs other passes, so the job
    has to permit it. For interleaved stages the arrangement is searched under 1F1B, and the chunks
    are derived from it (`search.interleaved`).
    """
    if job.schedules:
        return job.schedules
    if job.schedule not in (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED):
        return (job.schedule,)
    footprint = MemoryFootprint.of(job, job.layout.dp)
    if job.schedule is Schedule.INTERLEAVED or not footprint.is_known:
        return (Schedule.ONE_F_ONE_B,)
    return Schedule.ONE_F_ONE_B, Schedule.EAGER_1F1B


def own_schedule(job: Job, plan: Plan) -> Schedule:
    """Schedule that a running plan is timed under: its own, else the first that plans may use.

    A job that takes on no other schedule live keeps its own.
    """
    if Action.LAYOUT not in job.actions:
        return plan.schedule
    is_interleaved = plan.schedule is Schedule.INTERLEAVED
    if is_interleaved or any(replica.chunks > 1 for replica in plan.layout.replicas):
        return Schedule.INTERLEAVED
    schedules = plan_schedules(job)
    return plan.schedule if plan.schedule in schedules else schedules[0]
