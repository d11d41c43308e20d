"""The change that moves nothing: other quotas for the layout as it is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from heapq import heapify, heapreplace

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import Job, Layout, Replica, Schedule

from .cost_model import layer_cost, transfer_ms
from .makespan import pipeline_makespans
from .simulator import replica_makespan, stage_times

Floats = NDArray[np.float64]


class ReplicaTimes:
    """Exact spans of the replicas of one layout at given speeds; all of its ranks are alive."""

    def __init__(
        self, job: Job, layout: Layout, schedule: Schedule, speeds: Mapping[int, float]
    ) -> None:
        times = [stage_times(job, replica, speeds) for replica in layout.replicas]
        alike: dict[int, list[int]] = defaultdict(list)
        self._chunked: dict[int, Replica] = {}
        for index, replica in enumerate(layout.replicas):
            if replica.chunks > 1:
                self._chunked[index] = replica
            else:
                alike[len(replica.stages)].append(index)
        self._parts = [
            (rows, np.array([times[i][0] for i in rows]), np.array([times[i][1] for i in rows]))
            for rows in alike.values()
        ]
        self._job, self._schedule, self._speeds = job, schedule, speeds
        self._played: dict[tuple[int, int], float] = {}
        self.slowest = [max(f + b for f, b in zip(*pair, strict=True)) for pair in times]

    def spans(self, quotas: Sequence[int]) -> Floats:
        """When each replica has run its quota."""
        ends = np.zeros(len(quotas))
        for rows, forward, backward in self._parts:
            ends[rows] = pipeline_makespans(
                forward,
                backward,
                [quotas[i] for i in rows],
                p2p=transfer_ms(self._job),
                max_in_flight=self._job.max_in_flight,
                schedule=self._schedule,
            )
        for index in self._chunked:
            ends[index] = self._replayed(index, quotas[index])
        return ends

    def _replayed(self, index: int, quota: int) -> float:
        """Span of a replica of interleaved stages."""
        if (index, quota) not in self._played:
            self._played[index, quota] = replica_makespan(
                self._job, self._chunked[index], quota, self._speeds, Schedule.INTERLEAVED
            )
        return self._played[index, quota]

    def step_ms(self, quotas: Sequence[int]) -> float:
        """Step time with these quotas."""
        return float(self.spans(quotas).max()) + layer_cost(self._job).step_ms

    def best_quotas(self, quotas: Sequence[int]) -> tuple[int, ...]:
        """Quotas with the same sum, at least 1 each, that end the step first."""
        best = list(quotas)
        for _ in range(3):
            fresh = self._by_rate(best)
            if self.step_ms(fresh) >= self.step_ms(best):
                break
            best = fresh
        for _ in range(2 * len(best) + 8):
            ends, later = self.spans(best), self.spans([quota + 1 for quota in best])
            worst, taker = int(ends.argmax()), int(later.argmin())
            if best[worst] <= 1 or later[taker] >= ends[worst]:
                break
            best[worst] -= 1
            best[taker] += 1
        return tuple(best)

    def _by_rate(self, quotas: Sequence[int]) -> list[int]:
        """Every microbatch where it ends first, if each takes as long as the slowest stage."""
        first = self.spans(quotas) - np.array(self.slowest) * (np.array(quotas) - 1)
        fresh = [1] * len(quotas)
        heap = [(float(end) + self.slowest[i], i) for i, end in enumerate(first)]
        heapify(heap)
        for _ in range(sum(quotas) - len(quotas)):
            end, index = heap[0]
            fresh[index] += 1
            heapreplace(heap, (end + self.slowest[index], index))
        return fresh
