"""What others do with the same records, in our own words and with their default thresholds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import Job, Op, TelemetryBatch

Matrix = NDArray[np.float64]
Rule = Callable[[Matrix, NDArray[np.int64]], list[set[int]]]
"""Mean compute time, shape (steps, ranks), and the stage of each rank -> names in each step."""


def compute_matrix(job: Job, batches: Sequence[TelemetryBatch]) -> Matrix:
    """Compute time of each rank in each step, in ms, ranks in sorted order."""
    ranks = np.sort(job.layout.ranks)
    rows = []
    for batch in batches:
        work = (batch.op == Op.FORWARD) | (batch.op == Op.BACKWARD)
        at = np.searchsorted(ranks, batch.rank[work])
        rows.append(np.bincount(at, batch.compute_ms[work], ranks.size))
    return np.array(rows)


def stages(job: Job) -> NDArray[np.int64]:
    """Stage of each rank, ranks in sorted order."""
    return np.array([place.pp for place in sorted(job.layout.places(), key=lambda p: p.rank)])


def change_points(matrix: Matrix, stage: NDArray[np.int64]) -> list[set[int]]:
    """Greyhound's kind: the mean iteration time of the last 5 steps against the 10 before, a shift
    of 5% and of 3 standard errors. It can only say that something is slow: the set holds -1.
    The busiest stage's computing stands for the iteration."""
    time = matrix.max(axis=1)
    said: list[set[int]] = []
    for step in range(len(time)):
        recent, before = time[max(0, step - 4) : step + 1], time[max(0, step - 14) : step - 4]
        alarm = False
        if len(before) >= 5:
            error = before.std() / np.sqrt(5.0) + 1e-12
            shift = recent.mean() - before.mean()
            alarm = bool(shift > 0.05 * before.mean() and shift > 3.0 * error)
        said.append({-1} if alarm else set())
    return said


def relative_scores(matrix: Matrix, stage: NDArray[np.int64]) -> list[set[int]]:
    """NVRx's relative score: the fastest rank's median over 5 steps by one's own, below 0.75."""
    said = []
    for step in range(len(matrix)):
        median = np.median(matrix[max(0, step - 4) : step + 1], axis=0)
        said.append(set(np.flatnonzero(median.min() / median < 0.75).tolist()))
    return said


def individual_scores(matrix: Matrix, stage: NDArray[np.int64]) -> list[set[int]]:
    """NVRx's individual score: one's own best median by the present one, below 0.75."""
    said: list[set[int]] = []
    best = np.full(matrix.shape[1], np.inf)
    for step in range(len(matrix)):
        median = np.median(matrix[max(0, step - 4) : step + 1], axis=0)
        if step >= 4:
            best = np.minimum(best, median)
        said.append(set(np.flatnonzero(best / median < 0.75).tolist()) if step >= 4 else set())
    return said


def mad_scores(matrix: Matrix, stage: NDArray[np.int64]) -> list[set[int]]:
    """Robust z-scores against the same stage, above 3.5 in three steps running."""
    high = np.zeros(matrix.shape, bool)
    for value in np.unique(stage):
        part = matrix[:, stage == value]
        middle = np.median(part, axis=1, keepdims=True)
        spread = 1.4826 * np.median(np.abs(part - middle), axis=1, keepdims=True) + 1e-12
        high[:, stage == value] = (part - middle) / spread > 3.5
    said = []
    for step in range(len(matrix)):
        run = high[max(0, step - 2) : step + 1]
        said.append(set(np.flatnonzero(run.all(axis=0) & (len(run) == 3)).tolist()))
    return said


PEERS: dict[str, Rule] = {
    "iteration-time change points (Greyhound)": change_points,
    "relative scores (NVRx)": relative_scores,
    "individual scores (NVRx)": individual_scores,
    "MAD z-scores, same stage": mad_scores,
}


def peer_trials(
    job: Job, batches: Sequence[TelemetryBatch], factor: float, trials: int
) -> dict[str, tuple[float, float]]:
    """For each peer: share of the slowed devices named within 8 steps (for change points: an
    alarm in them), and the mean number of wrong names (alarms before the onset) in a trial."""
    base, stage = compute_matrix(job, batches), stages(job)
    ranks = np.sort(job.layout.ranks)
    rng = np.random.default_rng(0)
    found, wrong = dict.fromkeys(PEERS, 0), dict.fromkeys(PEERS, 0)
    for _ in range(trials):
        at = int(np.searchsorted(ranks, rng.choice(job.layout.ranks)))
        onset = int(rng.integers(3, len(batches) - 8))
        matrix = base.copy()
        matrix[onset:, at] *= factor
        for name, rule in PEERS.items():
            said = rule(matrix, stage)
            after = set().union(*said[onset : onset + 8])
            before = set().union(*said[:onset]) if onset else set()
            found[name] += bool(after & {at, -1})
            wrong[name] += len(before) + len(after - {at, -1} - before)
    return {name: (found[name] / trials, wrong[name] / trials) for name in PEERS}
