"""Step time of given layouts: exact makespans, best quotas in place, unequal microbatches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from resihp.contracts import ContractError, Job, Layout, Replica, Schedule
from resihp.pipeline.orders import chunks_run, most_ahead

from .cost_model import layer_cost, transfer_ms
from .greedy import allocation_by_rate, exchange_units
from .link_costs import ALL_LINKS_HEALTHY, LinkSlowdowns, boundaries_ms
from .makespan import pipeline_makespans
from .simulator import play_replica, replica_makespan, stage_times

Floats = NDArray[np.float64]

_DRAWS = 32  # of the microbatches of every replica
_SEED = 0


class ReplicaTimes:
    """Exact makespans of replicas at given speeds; all of their ranks must be alive.

    Replicas with several model chunks per stage run the interleaved schedule, all others
    `schedule`, with their own numbers of microbatches in flight where they have any. Like
    `simulate`, an interleaved `schedule` divides stages into the job's chunks if all hold one.
    """

    def __init__(
        self,
        job: Job,
        replicas: Sequence[Replica],
        schedule: Schedule,
        speeds: Mapping[int, float],
        links: LinkSlowdowns = ALL_LINKS_HEALTHY,
    ) -> None:
        self._job, self._replicas, self._schedule, self._speeds = job, replicas, schedule, speeds
        self._links, self._chunks = links, chunks_run(job, replicas, schedule)
        self._times = [stage_times(job, replica, speeds, links) for replica in replicas]
        self._transfers_ms = [boundaries_ms(job, r, links) for r in replicas] if links else None
        self._replayed: dict[tuple[int, int], float] = {}

    def makespans(self, quotas: Sequence[int]) -> list[float]:
        """Makespan of each replica in milliseconds."""
        return self._makespans(list(enumerate(quotas)))

    def _makespans(self, pairs: Sequence[tuple[int, int]]) -> list[float]:
        """Makespans of replicas, given by index, with these numbers of microbatches."""
        ends = np.zeros(len(pairs))
        alike: dict[tuple[int, Schedule], list[int]] = defaultdict(list)
        for row, (index, quota) in enumerate(pairs):
            replica = self._replicas[index]
            chunks = self._chunks[index]
            order = _vectorised(self._job, replica, self._schedule, chunks)
            if order is not None:
                alike[len(replica.stages), order].append(row)
                continue
            if (index, quota) not in self._replayed:
                given = self._speeds, self._schedule, self._links, chunks
                self._replayed[index, quota] = replica_makespan(self._job, replica, quota, *given)
            ends[row] = self._replayed[index, quota]
        for (_, order), rows in alike.items():
            ends[rows] = pipeline_makespans(
                [self._times[pairs[row][0]][0] for row in rows],
                [self._times[pairs[row][0]][1] for row in rows],
                [pairs[row][1] for row in rows],
                p2p=self._p2p([pairs[row][0] for row in rows]),
                max_in_flight=self._job.max_in_flight,
                schedule=order,
            )
        return list(ends.tolist())

    def _p2p(self, indices: Sequence[int]) -> ArrayLike:
        """Time of transfers between stages: one for all, or [replica, boundary]."""
        if self._transfers_ms is None:
            return transfer_ms(self._job)
        return np.array([self._transfers_ms[index] for index in indices])

    def step_ms(self, quotas: Sequence[int]) -> float:
        """Step time with these quotas."""
        return max(self.makespans(quotas)) + layer_cost(self._job).step_ms

    def best_quotas(
        self, quotas: Sequence[int], expired: Callable[[], bool] = lambda: False
    ) -> tuple[int, ...]:
        """Quotas of the same sum with the shortest step found before `expired`: at least 1 each,
        unless the sum is too small for that.

        Greedy allocation by the time of the slowest stage, then exchange of single microbatches.
        """
        best = list(quotas)
        slowest = [max(f + b for f, b in zip(*pair, strict=True)) for pair in self._times]
        for _ in range(3):
            if expired():
                return tuple(best)
            fresh = allocation_by_rate(self.makespans(best), slowest, best)
            if self.step_ms(fresh) >= self.step_ms(best):
                break
            best = fresh
        exchange_units(best, self._makespans, expired)
        return tuple(best)


def expected_step_ms(
    job: Job,
    layout: Layout,
    quotas: Sequence[int],
    speeds: Mapping[int, float],
    schedule: Schedule,
    work: Sequence[float],
    links: LinkSlowdowns = ALL_LINKS_HEALTHY,
) -> float:
    """Mean step time of a layout whose microbatches are drawn from a sample.

    work  costs of a sample of microbatches, in any unit (e.g. FLOPs of their sequence lengths)

    Every replica is timed over 32 draws of its microbatches. Replicas draw independently, so the
    distribution of the step's end is the product of theirs, and its mean is exact over all
    combinations of draws. Deterministic: the random seed is fixed.
    """
    relative = relative_work(work)
    random = np.random.default_rng(_SEED)
    times = [stage_times(job, replica, speeds, links) for replica in layout.replicas]
    alike: dict[tuple[int, Schedule], list[int]] = defaultdict(list)
    ends = np.zeros((layout.dp, _DRAWS))
    chunks = chunks_run(job, layout.replicas, schedule)
    for row, replica in enumerate(layout.replicas):
        order = _vectorised(job, replica, schedule, chunks[row])
        if order is not None:
            alike[len(replica.stages), order].append(row)
            continue
        for draw in range(_DRAWS):
            loads = random.choice(relative, quotas[row])
            _, played = play_replica(job, replica, loads, speeds, schedule, chunks[row], links)
            ends[row, draw] = played.span
    for (_, order), rows in alike.items():
        counts = np.array([quotas[row] for row in rows])
        drawn = random.choice(relative, (len(rows) * _DRAWS, int(counts.max())))
        makespans = pipeline_makespans(
            np.repeat([times[row][0] for row in rows], _DRAWS, axis=0),
            np.repeat([times[row][1] for row in rows], _DRAWS, axis=0),
            np.repeat(counts, _DRAWS),
            p2p=np.repeat(
                [boundaries_ms(job, layout.replicas[r], links) for r in rows], _DRAWS, axis=0
            )
            if links
            else transfer_ms(job),
            max_in_flight=job.max_in_flight,
            schedule=order,
            work=drawn,
        )
        ends[rows] = makespans.reshape(len(rows), _DRAWS)
    return mean_of_latest(ends) + layer_cost(job).step_ms


def _vectorised(job: Job, replica: Replica, schedule: Schedule, chunks: int) -> Schedule | None:
    """Schedule whose makespans are vectorised and whose order a replica runs; None: none is."""
    if chunks > 1:
        return None
    if not replica.in_flight:
        return schedule
    stages, most = len(replica.stages), job.max_in_flight
    usual = (Schedule.ONE_F_ONE_B, Schedule.EAGER_1F1B)
    return next((s for s in usual if most_ahead(s, stages, most) == replica.in_flight), None)


def relative_work(work: Sequence[float]) -> Floats:
    """Work divided by its mean. Raises `ContractError` for invalid values."""
    try:
        values = np.asarray(work)
    except ValueError:  # lists of unequal length
        values = np.empty(0)
    is_list = values.ndim == 1 and values.size and values.dtype.kind in "iuf"
    if not is_list or not (np.isfinite(values) & (values > 0.0)).all():
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
