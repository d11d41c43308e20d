"""Makespans and step time of given replicas, and the quotas that shorten the step in place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import Job, Replica, Schedule

from .cost_model import layer_cost, transfer_ms
from .greedy import greedy_allocation
from .makespan import pipeline_makespans
from .simulator import replica_makespan, stage_times

Floats = NDArray[np.float64]


class ReplicaTimes:
    """Exact makespans of replicas at given speeds; all of their ranks must be alive.

    Replicas with several model chunks per stage run the interleaved schedule, all others
    `schedule`.
    """

    def __init__(
        self,
        job: Job,
        replicas: Sequence[Replica],
        schedule: Schedule,
        speeds: Mapping[int, float],
    ) -> None:
        times = [stage_times(job, replica, speeds) for replica in replicas]
        by_stages: dict[int, list[int]] = defaultdict(list)
        self._interleaved: dict[int, Replica] = {}
        for index, replica in enumerate(replicas):
            if replica.chunks > 1:
                self._interleaved[index] = replica
            else:
                by_stages[len(replica.stages)].append(index)
        self._batches = [
            (rows, np.array([times[i][0] for i in rows]), np.array([times[i][1] for i in rows]))
            for rows in by_stages.values()
        ]
        self._job, self._schedule, self._speeds = job, schedule, speeds
        self._replayed: dict[tuple[int, int], float] = {}
        self._slowest = [max(f + b for f, b in zip(*pair, strict=True)) for pair in times]

    def makespans(self, quotas: Sequence[int]) -> Floats:
        """Makespan of each replica in milliseconds, [replica]."""
        ends = np.zeros(len(quotas))
        for rows, forward, backward in self._batches:
            ends[rows] = pipeline_makespans(
                forward,
                backward,
                [quotas[i] for i in rows],
                p2p=transfer_ms(self._job),
                max_in_flight=self._job.max_in_flight,
                schedule=self._schedule,
            )
        for index in self._interleaved:
            ends[index] = self._replay(index, quotas[index])
        return ends

    def _replay(self, index: int, quota: int) -> float:
        """Makespan of an interleaved replica."""
        if (index, quota) not in self._replayed:
            self._replayed[index, quota] = replica_makespan(
                self._job, self._interleaved[index], quota, self._speeds, Schedule.INTERLEAVED
            )
        return self._replayed[index, quota]

    def step_ms(self, quotas: Sequence[int]) -> float:
        """Step time with these quotas."""
        return float(self.makespans(quotas).max()) + layer_cost(self._job).step_ms

    def best_quotas(self, quotas: Sequence[int]) -> tuple[int, ...]:
        """Quotas of the same sum, at least 1 each, with the shortest step found.

        Greedy allocation by the time of the slowest stage, then exchange of single microbatches
        between the last replica to finish and the one that would finish first with one more.
        """
        best = list(quotas)
        for _ in range(3):
            fresh = self._greedy_quotas(best)
            if self.step_ms(fresh) >= self.step_ms(best):
                break
            best = fresh
        for _ in range(2 * len(best) + 8):
            ends, later = self.makespans(best), self.makespans([quota + 1 for quota in best])
            worst, taker = int(ends.argmax()), int(later.argmin())
            if best[worst] <= 1 or later[taker] >= ends[worst]:
                break
            best[worst] -= 1
            best[taker] += 1
        return tuple(best)

    def _greedy_quotas(self, quotas: Sequence[int]) -> list[int]:
        """Quotas by greedy allocation; each microbatch takes as long as the slowest stage."""
        slowest = self._slowest
        first = self.makespans(quotas) - np.array(slowest) * (np.array(quotas) - 1)
        offsets = first.tolist()
        return greedy_allocation(
            [1] * len(quotas),
            sum(quotas) - len(quotas),
            lambda index, count: offsets[index] + slowest[index] * (count - 1),
        )
