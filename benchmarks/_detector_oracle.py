"""What recorded residuals allow: the best test there is, beside the detector, on the same cases.

The oracle is told the factor, the onset, each device's noise and how far healthy levels wander
(all measured on the whole recording, also on what is yet to come) and takes the likelihood ratio
of slow against healthy. It looks at the device's own residuals alone and takes their noise for
normal: where levels of several devices change together, a detector that sees that may find more.
It names at the ratio at which the detector does: one false name in 100,000 steps of a device. Not
to know the onset costs nothing by that measure: a sum over all onsets (Shiryaev-Roberts) holds the
term of the true one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks._detector_cases import Tally, injected, run_trial
from detector import Detector
from detector.arrays import median
from detector.residuals import noise_of
from resihp.contracts import Job, TelemetryBatch
from resihp.testing.scenarios import Fault

_NAME_AT = np.log(100_000)
_ALL = 200
"""Cases (a rank and an onset) of a job up to which all of them are run."""


@dataclass(frozen=True)
class Healthy:
    """Residuals (log) as recorded, shape (steps, ranks); each rank's noise; the wander of levels:
    the root mean square by which five steps differ from all before, beyond what noise explains."""

    residual: np.ndarray
    noise: np.ndarray
    wander: float

    @classmethod
    def of(cls, job: Job, batches: Sequence[TelemetryBatch]) -> Healthy:
        """What a detector makes of the recording with nothing injected."""
        detector, rows = Detector(job), list[np.ndarray]()
        for batch in batches:
            detector.update(batch)
            tests = detector._layout_state.tests
            rows += list(tests.window[len(tests.window) - (tests.count - len(rows)) :])
        residual = np.array(rows, np.float64)
        noise = noise_of(residual.astype(np.float32))
        excess = [
            (residual[at : at + 5].mean(axis=0) - residual[:at].mean(axis=0)) ** 2
            - noise**2 * (1.0 / 5.0 + 1.0 / at)
            for at in range(3, len(batches) - 5)
        ]
        return cls(residual, noise, float(np.sqrt(max(np.nanmean(excess), 0.0))))

    def delay(self, rank: int, onset: int, shift: float, *, level_known: bool) -> int | None:
        """Steps to the name of the rank at a position, slowed by `shift` (log) from an onset on.

        level_known   the rank's healthy level is told as well: its median over the recording
        """
        before = self.residual[:onset, rank]
        variance = self.noise[rank] ** 2
        usual = float(median(self.residual[:, [rank]], 0)[0][0])
        open_ = 0.0 if level_known else variance / onset + self.wander**2
        level = usual if level_known else float(np.nanmean(before))
        for steps in range(1, len(self.residual) - onset + 1):
            seen = float(np.nanmean(self.residual[onset : onset + steps, rank])) + shift - level
            ratio = (shift * seen - 0.5 * shift**2) / (variance / steps + open_)
            if ratio >= _NAME_AT:
                return steps
        return None


def cases_of(job: Job, batches: Sequence[TelemetryBatch], trials: int) -> list[tuple[int, int]]:
    """Ranks and onsets: all of them, or at least `trials` spread evenly."""
    every = [(rank, at) for rank in sorted(job.layout.ranks) for at in range(3, len(batches) - 8)]
    return every if len(every) <= _ALL else every[:: max(1, len(every) // trials)]


def oracle_rows(
    name: str, job: Job, batches: Sequence[TelemetryBatch], factors: Sequence[float], trials: int
) -> list[list[str]]:
    """For each factor: what the detector names and what is possible, within 5 and 8 steps."""
    healthy, rows = Healthy.of(job, batches), []
    cases, ranks = cases_of(job, batches, trials), np.sort(job.layout.ranks)
    for factor in factors:
        ours, past, told = Tally(), Tally(), Tally()
        for rank, onset in cases:
            fault = Fault(rank=rank, factor=factor, from_step=int(batches[onset].step[0]))
            run_trial(job, injected(batches, rank, factor, onset), [fault], ours)
            at, shift = int(np.searchsorted(ranks, rank)), float(np.log(factor))
            for tally, known in ((past, False), (told, True)):
                tally.delays.append(healthy.delay(at, onset, shift, level_known=known))
        shares = [f"{tally.within(steps):.1%}" for steps in (5, 8) for tally in (ours, past, told)]
        rows.append([f"{name} {factor:.2f}x", str(len(cases)), *shares, str(ours.wrong)])
    return rows


COLUMNS = (
    "detector and oracle",
    "cases",
    "≤5: detector",
    "oracle",
    "level told",
    "≤8: detector",
    "oracle ",
    "level told ",
    "wrong names",
)
