"""The e-detector: a sequential test whose result is valid after every step.

For each rank a Shiryaev-Roberts sum of likelihood ratios, `M <- (1 + M) * L`, is kept for a grid
of slowdowns and averaged over it. Under the null `M - t` is a supermartingale, so the mean time to
a false alarm at level c is at least c steps, for any horizon and any number of looks
(Shin, Ramdas and Rinaldo, "E-detectors", 2022). Likelihoods are Student's, so that the evidence
of a single step is bounded and an outlier alone names no rank.
"""

from __future__ import annotations

import numpy as np

from ..arrays import Bools, Floats, Ints
from ..persistence import Persistent

GRID = np.log(np.array([1.01, 1.02, 1.03, 1.045, 1.07, 1.1, 1.15, 1.22, 1.35, 1.6, 2.2, 4.0]))
"""Tested slowdowns (log) beyond the null."""

DEGREES = 4.0
"""Degrees of freedom of the Student distribution of a residual."""


def log_ratio(excess: Floats, scale: Floats, shift: Floats) -> Floats:
    """log p(excess | mean shift) - log p(excess | mean 0), Student with `DEGREES`.

    >>> round(float(log_ratio(np.array(1.0), np.array(1.0), np.array(2.0))), 6)
    0.0
    """
    null = np.log1p((excess / scale) ** 2 / DEGREES)
    other = np.log1p(((excess - shift) / scale) ** 2 / DEGREES)
    return 0.5 * (DEGREES + 1.0) * (null - other)


class EDetector(Persistent):
    """Evidence of slowness for `size` ranks. `log_sums` has shape (grid, size)."""

    _saved = ("log_sums",)

    def __init__(self, size: int) -> None:
        self.log_sums = np.full((GRID.size, size), -np.inf)

    def update(self, excess: Floats, scale: Floats, seen: Bools, ceiling: float) -> None:
        """Takes one step: residuals beyond the edge of the null, their scale, and a mask of
        ranks that have one."""
        ratio = log_ratio(excess[None, seen], scale[None, seen], GRID[:, None])
        grown = np.logaddexp(self.log_sums[:, seen], 0.0) + ratio
        self.log_sums[:, seen] = np.minimum(grown, ceiling)

    def evidence(self) -> Floats:
        """Log of the averaged sum of each rank."""
        result: Floats = np.logaddexp.reduce(self.log_sums, axis=0) - np.log(GRID.size)
        return result

    def add(self, rank: int, gain: float, ceiling: float) -> None:
        """Adds evidence from a probe (a log-likelihood ratio) on one rank."""
        self.log_sums[:, rank] = np.minimum(self.log_sums[:, rank] + gain, ceiling)

    def continue_from(self, older: EDetector, old: Ints, new: Ints) -> None:
        """Takes over the evidence on some ranks, at other positions."""
        self.log_sums[:, new] = older.log_sums[:, old]

    def reset(self, ranks: Bools) -> None:
        """Resets the evidence of some ranks."""
        self.log_sums[:, ranks] = -np.inf
