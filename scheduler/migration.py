"""State that ranks receive when one layout replaces another, and the time that takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from resihp.contracts import Job, Layout, Plan


@dataclass(frozen=True, kw_only=True)
class PlanOption:
    """A plan, and the state that ranks receive when it replaces the current layout.

    most_bytes    received by the rank that receives most, whose link determines the time
    total_bytes   received by all ranks
    migration_ms  time of the migration over the links between nodes; of an option by a restart,
                  the cost of that
    """

    plan: Plan
    most_bytes: float
    total_bytes: float
    migration_ms: float

    @classmethod
    def of(cls, job: Job, current: Layout, plan: Plan) -> PlanOption:
        """Option for a job that runs in the layout `current`."""
        received = received_bytes(job, current, plan.layout).values()
        most = max(received, default=0.0)
        return cls(
            plan=plan,
            most_bytes=most,
            total_bytes=sum(received),
            migration_ms=transfer_ms(job, most),
        )


class StateBytes(NamedTuple):
    """Bytes of parameters and optimizer state of one layer, and of the embedding or the head."""

    layer: float
    embedding: float

    @classmethod
    def of(cls, job: Job) -> StateBytes | None:
        """Sizes of a job; None without a model."""
        if job.model is None:
            return None
        each = job.memory.bytes_per_param / 2.0 + job.memory.optimizer_bytes_per_param
        return cls(each * job.model.layer_params, each * job.model.embedding_params)


class RankState(NamedTuple):
    """Layer ranges of a rank, its part of each layer (within 0..1), and embedding and head."""

    chunks: tuple[tuple[int, int], ...]
    part: tuple[float, float]
    first: bool = False
    last: bool = False


NO_STATE = RankState((), (0.0, 0.0))


def rank_states(layout: Layout) -> Iterator[tuple[int, RankState]]:
    """State of every rank of a layout."""
    for replica in layout.replicas:
        for index, stage in enumerate(replica.stages):
            first, last = index == 0, index == len(replica.stages) - 1
            units, edge = sum(stage.shares), 0
            for rank, share in zip(stage.ranks, stage.shares, strict=True):
                part = (edge / units, (edge + share) / units)
                yield rank, RankState(stage.chunks, part, first, last)
                edge += share


def overlap(one: tuple[float, float], other: tuple[float, float]) -> float:
    """Length of the intersection of two ranges."""
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


def received_bytes(job: Job, old: Layout, new: Layout) -> dict[int, float]:
    """Bytes of parameters and optimizer state that each rank receives; empty without a model.

    A rank holds layer ranges times a range of each layer, and keeps the intersection of both
    layouts.
    """
    sizes = StateBytes.of(job)
    if sizes is None:
        return {}
    before = dict(rank_states(old))
    received = {}
    for rank, held in rank_states(new):
        had = before.get(rank, NO_STATE)
        width, common = held.part[1] - held.part[0], overlap(held.part, had.part)
        inner = sum(stop - start for start, stop in held.chunks) * width
        inner -= sum(overlap(a, b) for a in held.chunks for b in had.chunks) * common
        kept = (held.first and had.first) + (held.last and had.last)
        ends = (held.first + held.last) * width - kept * common
        size = sizes.layer * inner + sizes.embedding * ends
        if size > 0.0:
            received[rank] = size
    return received


def migration_ms(job: Job, old: Layout, new: Layout) -> float:
    """Time to move parameters and optimizer state over the links between nodes; 0 without a model.

    Ranks receive in parallel, so the rank that receives most determines the time.
    """
    return transfer_ms(job, max(received_bytes(job, old, new).values(), default=0.0))


def transfer_ms(job: Job, most_bytes: float) -> float:
    """Time in which a rank receives so many bytes over the links between nodes; 0 for none."""
    if not most_bytes:
        return 0.0
    return job.links.latency_ms + most_bytes / (job.links.inter_gbytes_per_s * 1e6)
