"""Expected step time with microbatches of unequal work, for which stages wait."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import ContractError, Job, Layout, Schedule

from .cost_model import layer_cost, transfer_ms
from .makespan import pipeline_makespans
from .simulator import play_replica, stage_times

Floats = NDArray[np.float64]

_STEPS = 32
_SEED = 0


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
    ends = np.zeros((layout.dp, _STEPS))
    for row, replica in enumerate(layout.replicas):
        if replica.chunks > 1:
            for draw in range(_STEPS):
                loads = random.choice(relative, quotas[row])
                played = play_replica(job, replica, loads, speeds, schedule, replica.chunks)[1]
                ends[row, draw] = played.span
    for rows in by_length.values():
        counts = np.array([quotas[row] for row in rows])
        drawn = random.choice(relative, (len(rows) * _STEPS, int(counts.max())))
        makespans = pipeline_makespans(
            np.repeat([times[row][0] for row in rows], _STEPS, axis=0),
            np.repeat([times[row][1] for row in rows], _STEPS, axis=0),
            np.repeat(counts, _STEPS),
            p2p=transfer_ms(job),
            max_in_flight=job.max_in_flight,
            schedule=schedule,
            work=drawn,
        )
        ends[rows] = makespans.reshape(len(rows), _STEPS)
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
