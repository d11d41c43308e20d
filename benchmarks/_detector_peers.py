"""What others do with the same records, in our own words and with their default thresholds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks._detector_greyhound import (
    PipelineSteps,
    alarms,
    call_log,
    iteration_times,
    validated,
)
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
    "relative scores (NVRx)": relative_scores,
    "individual scores (NVRx)": individual_scores,
    "MAD z-scores, same stage": mad_scores,
}
ALARMS = "change points of the iteration time (Greyhound), alarms"
VALIDATED = "the same, then all devices measured"


@dataclass
class PeerTally:
    """Slowed devices found within 8 steps, and wrong names, of all trials.

    Alarms of change points name no device: an alarm in those steps counts as found, one before the
    onset as a wrong name.
    """

    found: int = 0
    wrong: int = 0

    def add(self, names: Sequence[set[int]], right: int, onset: int) -> None:
        """Count the names given in each step of a trial."""
        after = set().union(*names[onset : onset + 8])
        before = set().union(*names[:onset]) if onset else set()
        self.found += right in after
        self.wrong += len(before) + len(after - {right} - before)


def peer_trials(
    job: Job, batches: Sequence[TelemetryBatch], factor: float, trials: int
) -> dict[str, PeerTally]:
    """What each peer finds, with single devices slowed from a random step on."""
    base, stage = compute_matrix(job, batches), stages(job)
    ranks = np.sort(job.layout.ranks)
    pipelines = PipelineSteps(job, batches)
    rng, measuring = np.random.default_rng(0), np.random.default_rng(1)
    tallies = {name: PeerTally() for name in (ALARMS, VALIDATED, *PEERS)}
    for _ in range(trials):
        at = int(np.searchsorted(ranks, rng.choice(job.layout.ranks)))
        onset = int(rng.integers(3, len(batches) - 8))
        matrix = base.copy()
        matrix[onset:, at] *= factor
        for name, rule in PEERS.items():
            tallies[name].add(rule(matrix, stage), at, onset)
        log = call_log(job, pipelines.slowed_ms(int(ranks[at]), factor, onset))
        raised = [step + 1 for step in alarms(iteration_times(*log))]
        tallies[ALARMS].found += any(0 <= step - onset < 8 for step in raised)
        tallies[ALARMS].wrong += sum(step < onset for step in raised)
        measured = [
            validated(len(ranks), at, factor if step >= onset else 1.0, measuring)
            if step in raised
            else set()
            for step in range(len(batches))
        ]
        tallies[VALIDATED].add(measured, at, onset)
    return tallies
