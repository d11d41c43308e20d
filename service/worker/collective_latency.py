"""How long ranks of tensor-parallel groups take to meet, where nothing else lets them wait."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np

from resihp.contracts import Job, Op, TelemetryBatch


class CollectiveLatency:
    """Time of the collectives of one layer in one direction, step by step.

    The forwards of a replica's first layers and the backwards of its last ones wait for no other
    stage, so that what they wait is for the ranks of their group. The rank that waits least in a
    pass came last: what even that one waited is what the collectives took, and not the lateness of
    others.
    """

    def __init__(self, job: Job) -> None:
        self._groups = {
            (rank, op, chunk): (number, layers)
            for number, (ranks, op, chunk, layers) in enumerate(_without_neighbours(job))
            for rank in ranks
        }
        self._least: dict[int, dict[tuple[int, int], float]] = {}  # by step; group, microbatch

    def add(self, batch: TelemetryBatch) -> None:
        """What the ranks waited in their passes."""
        rows = np.isin(batch.op, (Op.FORWARD, Op.BACKWARD)) & ~np.isnan(batch.wait_ms)
        columns = (
            batch.step, batch.rank, batch.op, batch.chunk, batch.microbatch, batch.wait_ms
        )  # fmt: skip
        for step, rank, op, chunk, microbatch, wait_ms in zip(
            *(column[rows].tolist() for column in columns), strict=True
        ):
            if (rank, op, chunk) in self._groups:
                number, layers = self._groups[rank, op, chunk]
                least = self._least.setdefault(step, {})
                each = wait_ms / layers
                least[number, microbatch] = min(least.get((number, microbatch), each), each)

    def take(self, step: int) -> float | None:
        """Of a step that is complete: the middle of all groups; None where nothing was measured."""
        by_group: dict[int, list[float]] = defaultdict(list)
        for (number, _), each in self._least.pop(step, {}).items():
            by_group[number].append(each)
        return median(sum(each) / len(each) for each in by_group.values()) if by_group else None

    def save(self) -> list[Any]:
        """Plain values from which `restore` fills an equal one."""
        return [
            [step, number, microbatch, each]
            for step, least in self._least.items()
            for (number, microbatch), each in least.items()
        ]

    def restore(self, saved: list[Any]) -> None:
        """What was saved."""
        for step, number, microbatch, each in saved:
            self._least.setdefault(step, {})[number, microbatch] = each


def _without_neighbours(job: Job) -> Iterator[tuple[tuple[int, ...], Op, int, int]]:
    """Groups of several ranks, the kind of pass and the model chunk in which they wait for nobody
    else, and its layers."""
    for replica in job.layout.replicas:
        ends = (
            (replica.stages[0], Op.FORWARD, 0),
            (replica.stages[-1], Op.BACKWARD, replica.chunks - 1),
        )
        for stage, op, chunk in ends:
            if stage.tp > 1:
                start, stop = stage.chunks[chunk]
                yield stage.ranks, op, chunk, stop - start
