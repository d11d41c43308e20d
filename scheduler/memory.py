"""Memory of pipeline stages: peak bytes of ranks, layers that fit, schedules that fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import Job, Layout, Op, Plan, Replica, Schedule, Stage
from resihp.pipeline.orders import Part, Pass, job_orders, most_in_flight

_UNLIMITED = 1 << 30


@dataclass(frozen=True)
class MemoryFootprint:
    """Bytes of one layer, of its activations for one microbatch, and of embedding and head.

    A rank with share q of a stage holds the fraction q of each: weights, gradients and optimizer
    state are split like the layers.
    """

    layer_bytes: float
    activation_bytes: float
    first_bytes: float
    last_bytes: float
    budget_bytes: float | None

    @classmethod
    def of(cls, job: Job, replicas: int) -> MemoryFootprint:
        """Footprint of a job with `replicas` replicas, which may share optimizer state.

        Activations in bf16 with selective recomputation take 34 bytes per token and hidden unit,
        with full recomputation 2 (Korthikanti et al., 2022, eq. 2).
        """
        memory, model = job.memory, job.model
        owners = replicas if memory.sharded_optimizer else 1
        per_param = memory.bytes_per_param + memory.optimizer_bytes_per_param / owners
        activation = memory.activation_bytes_per_layer
        if activation is None:
            tokens = job.tokens_per_microbatch or 0
            activation = (2 if job.recompute else 34) * tokens * (model.hidden if model else 0)
        if model is None:
            return cls(0.0, float(activation), 0.0, 0.0, memory.budget_bytes)
        ends = model.embedding_params * per_param
        return cls(
            model.layer_params * per_param, float(activation), ends, ends, memory.budget_bytes
        )

    @property
    def is_known(self) -> bool:
        """True if the budget and the size of activations are known."""
        return self.budget_bytes is not None and self.activation_bytes > 0.0

    def most_layers(
        self, widest: NDArray[np.float64], in_flight: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Layers that fit into every stage, [chain, stage].

        widest     share of the layer that the stage's most loaded rank holds
        in_flight  microbatches of which the stage holds activations
        """
        if self.budget_bytes is None:
            return np.full(widest.shape, _UNLIMITED)
        room = np.full(widest.shape, self.budget_bytes) / widest
        room[:, 0] -= self.first_bytes
        room[:, -1] -= self.last_bytes
        each = self.layer_bytes + self.activation_bytes * in_flight
        fits = np.floor(room / np.maximum(each, 1e-9) + 1e-9)
        return np.asarray(np.clip(fits, 0, _UNLIMITED), np.int64)

    def stage_bytes(self, stage: Stage, *, first: bool, last: bool, in_flight: int) -> list[float]:
        """Peak bytes of every rank of a stage."""
        units = sum(stage.shares)
        layers = stage.layer_count
        whole = layers * (self.layer_bytes + self.activation_bytes * in_flight)
        whole += first * self.first_bytes + last * self.last_bytes
        return [whole * share / units for share in stage.shares]


def fits(job: Job, layout: Layout, quotas: Sequence[int], schedule: Schedule) -> bool:
    """True if every rank of `layout` has enough memory under `schedule`."""
    footprint = MemoryFootprint.of(job, layout.dp)
    pairs = zip(layout.replicas, quotas, strict=True)
    return all(replica_fits(job, footprint, *pair, schedule) for pair in pairs)


def replica_fits(
    job: Job, footprint: MemoryFootprint, replica: Replica, quota: int, schedule: Schedule
) -> bool:
    """True if every rank of a replica has enough memory for `quota` microbatches."""
    budget, last = footprint.budget_bytes, len(replica.stages) - 1
    if budget is None:
        return True
    if replica.in_flight:
        limit: Sequence[int] = replica.in_flight
    elif replica.chunks == 1:
        limit = most_in_flight(schedule, last + 1, job.max_in_flight)
    else:
        orders = job_orders(job, last + 1, quota, Schedule.INTERLEAVED, replica.chunks)
        limit = [most_held(order) for order in orders]
    for index, stage in enumerate(replica.stages):
        held = footprint.stage_bytes(
            stage, first=index == 0, last=index == last, in_flight=min(limit[index], quota)
        )
        if max(held) > budget:
            return False
    return True


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
    """Schedule that a running plan is timed under: its own, else the first that plans may use."""
    if any(replica.chunks > 1 for replica in plan.layout.replicas):
        return Schedule.INTERLEAVED
    schedules = plan_schedules(job)
    return plan.schedule if plan.schedule in schedules else schedules[0]
