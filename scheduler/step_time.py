"""Step time of given layouts: exact makespans, best quotas in place, unequal microbatches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import ContractError, Job, Layout, Replica, Schedule

from .cost_model import layer_cost, transfer_ms
from .greedy import greedy_allocation
from .makespan import pipeline_makespans
from .simulator import play_replica, replica_makespan, stage_times

Floats = NDArray[np.float64]

_DRAWS = 32  # of the microbatches of every replica
_SEED = 0


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


def expected_step_ms(
    job: Job,
    layout: Layout,
    quotas: Sequence[int],
    speeds: Mapping[int, float],
    schedule: Schedule,
    work: Sequence[float],
) -> float:
    """Mean step time of a layout whose microbatches are drawn from a sample.

    work  costs of a sample of microbatches, in any unit (e.g. FLOPs of their sequence lengths)

    Every replica is timed over 32 draws of its microbatches. Replicas draw independently, so the
    distribution of the step's end is the product of theirs, and its mean is exact over all
    combinations of draws. Deterministic: the random seed is fixed.
    """
    relative = relative_work(work)
    random = np.random.default_rng(_SEED)
    times = [stage_times(job, replica, speeds) for replica in layout.replicas]
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, replica in enumerate(layout.replicas):
        if replica.chunks == 1:
            by_length[len(replica.stages)].append(index)
    ends = np.zeros((layout.dp, _DRAWS))
    for row, replica in enumerate(layout.replicas):
        if replica.chunks > 1:
            for draw in range(_DRAWS):
                loads = random.choice(relative, quotas[row])
                played = play_replica(job, replica, loads, speeds, schedule, replica.chunks)[1]
                ends[row, draw] = played.span
    for rows in by_length.values():
        counts = np.array([quotas[row] for row in rows])
        drawn = random.choice(relative, (len(rows) * _DRAWS, int(counts.max())))
        makespans = pipeline_makespans(
            np.repeat([times[row][0] for row in rows], _DRAWS, axis=0),
            np.repeat([times[row][1] for row in rows], _DRAWS, axis=0),
            np.repeat(counts, _DRAWS),
            p2p=transfer_ms(job),
            max_in_flight=job.max_in_flight,
            schedule=schedule,
            work=drawn,
        )
        ends[rows] = makespans.reshape(len(rows), _DRAWS)
    return mean_of_latest(ends) + layer_cost(job).step_ms


def relative_work(work: Sequence[float]) -> Floats:
    """Work divided by its mean. Raises `ContractError` for invalid values."""
    values = np.asarray(work, np.float64)
    if values.ndim != 1 or not values.size or not (np.isfinite(values) & (values > 0.0)).all():
        raise ContractError("work", "must be a list of numbers above 0")
    return np.asarray(values / values.mean())


def mean_of_latest(ends: Floats) -> float:
    """Mean of the maximum of independent variables, each uniform over its row of `ends`.

    >>> mean_of_latest(np.array([[1.0, 3.0], [1.0, 3.0]]))
    2.5
    """
    moments = np.unique(ends)
    over = [np.searchsorted(row, moments, side="right") for row in np.sort(ends, axis=1)]
    chance = np.prod(np.array(over) / ends.shape[1], axis=0)
    return float((moments * np.diff(chance, prepend=0.0)).sum())
