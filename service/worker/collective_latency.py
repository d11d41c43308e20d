"""Latency of tensor-parallel collectives, from passes that wait for no other pipeline stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean, median

import numpy as np

from resihp.contracts import Job, Op, TelemetryBatch

LeastWaits = dict[int, dict[int, dict[int, float]]]
"""Shortest wait of any rank per layer in ms, by step, group and microbatch."""


@dataclass
class CollectiveLatency:
    """Latency of the collectives of one layer in one direction, step by step.

    The forward passes of a replica's first layers and the backward passes of its last ones depend
    on no other stage, so that their ranks wait only for each other. The rank with the shortest
    wait in a pass arrived last: its wait is the latency of the collectives without the lateness
    of other ranks.
    """

    job: Job
    least_ms: LeastWaits = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._groups = {
            (rank, op, chunk): (number, layers)
            for number, (ranks, op, chunk, layers) in enumerate(_independent_passes(self.job))
            for rank in ranks
        }

    def add(self, batch: TelemetryBatch) -> None:
        """Add the waits of a batch."""
        rows = np.isin(batch.op, (Op.FORWARD, Op.BACKWARD)) & ~np.isnan(batch.wait_ms)
        columns = (
            batch.step, batch.rank, batch.op, batch.chunk, batch.microbatch, batch.wait_ms
        )  # fmt: skip
        for step, rank, op, chunk, microbatch, wait_ms in zip(
            *(column[rows].tolist() for column in columns), strict=True
        ):
            if (rank, op, chunk) in self._groups:
                number, layers = self._groups[rank, op, chunk]
                least = self.least_ms.setdefault(step, {}).setdefault(number, {})
                least[microbatch] = min(least.get(microbatch, np.inf), wait_ms / layers)

    def take(self, step: int) -> float | None:
        """Median over the groups for a complete step; None where nothing was measured."""
        groups = self.least_ms.pop(step, {})
        return median(fmean(waits.values()) for waits in groups.values()) if groups else None


def _independent_passes(job: Job) -> Iterator[tuple[tuple[int, ...], Op, int, int]]:
    """(ranks, op, chunk, layers) of each group of several ranks with such a pass."""
    for replica in job.layout.replicas:
        ends = (
            (replica.stages[0], Op.FORWARD, 0),
            (replica.stages[-1], Op.BACKWARD, replica.chunks - 1),
        )
        for stage, op, chunk in ends:
            if stage.tp > 1:
                start, stop = stage.chunks[chunk]
                yield stage.ranks, op, chunk, stop - start
