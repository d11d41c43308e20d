"""Small weighted regressions for many cells at once, from running moments.

Every cell explains times `t` by a few terms `x`: `t ~ x @ theta`, in relative error, so that long
and short microbatches count alike. Moments fade slowly. A weak ridge pulls towards the prior, which
remains where the data are not informative (all lengths equal, the first step).
"""

from __future__ import annotations

from itertools import combinations

import numpy as np

from ..arrays import Bools, Floats, Ints
from ..persistence import Persistent

_LEAST_SHARE = 1e-3
"""Least share of a term in the typical work that its prior is weighed by."""

_LEAST_RIDGE = 1e-12
"""Least ridge as a share of the moments: records far shorter than all others fill them, and what is
less is lost in rounding."""


class CellRegression(Persistent):
    """`cells` independent regressions on `terms` terms.

    Term 0 is the fixed one. In a cell's own units a fixed coefficient of 1 is the typical time and
    the others of 1 explain it in the proportions that `x` gives them.

    prior        shape (terms,): coefficients before any data, in those units
    ridge        shape (terms,): weight of the prior, in equivalent records
    non_negative shape (terms,): terms whose coefficient may not be negative
    guessed      the proportions of the terms in `x` are a guess: the prior of a term that typically
                 is a small part of `x` weighs as little, or it would hold against most records
    """

    _saved = ("_unit", "_gram", "_moment", "theta", "_spread", "_ridge")

    def __init__(
        self,
        cells: int,
        prior: Floats,
        ridge: Floats,
        non_negative: Bools,
        *,
        fade: float = 0.98,
        guessed: bool = False,
    ) -> None:
        self._guessed = guessed
        self._prior, self._non_negative, self._fade = prior, non_negative, fade
        terms = prior.size
        self._ridge = np.tile(ridge, (cells, 1))
        self._unit = np.full((cells, terms), np.nan)
        self._gram = np.zeros((cells, terms, terms))
        self._moment = np.zeros((cells, terms))
        self.theta = np.full((cells, terms), np.nan)
        self._spread = np.zeros((cells, terms, terms))

    @property
    def ready(self) -> Bools:
        """Mask of the cells that have a prediction."""
        result: Bools = np.isfinite(self.theta).all(axis=1)
        return result

    def open(self, cell: Ints, terms: Floats, times: Floats) -> None:
        """Gives new cells their units and a first proportional fit, from the medians of the
        records."""
        for index in np.unique(cell[~self.ready[cell]]).tolist():
            rows = cell == index
            typical, time = np.median(terms[rows], axis=0), float(np.median(times[rows]))
            work = max(float(typical[1:].sum()), 1e-30)
            unit = np.full(typical.size, time / work)
            unit[0] = time / max(float(typical[0]), 1e-30)
            self._unit[index] = unit
            self.theta[index] = self._prior * unit
            if self._guessed:
                self._ridge[index, 1:] *= np.maximum(typical[1:] / work, _LEAST_SHARE) ** 2
            self._spread[index] = np.diag(1.0 / self._ridge[index])

    def start_from(self, index: int, older: CellRegression, known: list[int]) -> None:
        """Opens a cell with the medians of the cells `known` of an older regression.

        Only the uncertainty of the shape is kept; a constant error of the level shows in the
        past of each rank.
        """
        self._unit[index] = np.median(older._unit[known], axis=0)
        self.theta[index] = np.median(older.theta[known], axis=0)
        self._spread[index] = np.median(older._spread[known], axis=0)
        self._ridge[index] = np.median(older._ridge[known], axis=0)

    def times(self, cell: Ints, terms: Floats) -> Floats:
        """Time of each record, in the unit of the learned times."""
        result: Floats = terms[:, 0] * self.theta[:, 0][cell]
        for term in range(1, terms.shape[1]):
            result += terms[:, term] * self.theta[:, term][cell]
        np.maximum(result, 1e-9, out=result)
        return result

    def predict(self, cell: Ints, terms: Floats) -> tuple[Floats, Floats]:
        """Time of each record, and its relative standard error per unit of relative noise."""
        time_ms = self.times(cell, terms)
        relative = terms * self._unit[cell] / time_ms[:, None]
        variance = np.einsum("ni,nij,nj->n", relative, self._spread[cell], relative)
        return time_ms, np.sqrt(np.maximum(variance, 0.0))

    def fixed_error(self, noise: float, unknown: float) -> Floats:
        """Standard error of the share of a typical record's time that is fixed, shape (cells,), for
        records with a relative `noise`; `unknown` where the records are not informative.

        Only for two terms: the error of the first, given the second.
        """
        second = np.maximum(self._gram[:, 1, 1], 1e-12)
        known = np.maximum(self._gram[:, 0, 0] - self._gram[:, 0, 1] ** 2 / second, 0.0)
        return 1.0 / np.sqrt(known / noise**2 + 1.0 / unknown**2)

    def forget(self) -> None:
        """Resets the moments; coefficients and their uncertainty stay until the next `learn`."""
        self._gram[:] = 0.0
        self._moment[:] = 0.0

    def learn(self, cell: Ints, terms: Floats, times: Floats, weights: Floats) -> None:
        """Adds records to the moments and solves again."""
        rows = weights > 0
        cell, terms, times, weights = cell[rows], terms[rows], times[rows], weights[rows]
        relative = terms * self._unit[cell] / times[:, None]
        cells, width = self._moment.shape
        touched = np.bincount(cell, minlength=cells) > 0
        self._gram[touched] *= self._fade
        self._moment[touched] *= self._fade
        weighted = weights[:, None] * relative
        self._moment += _sums(cell, weighted, cells)
        i, j = np.triu_indices(width)
        self._gram[:, i, j] += _sums(cell, weighted[:, i] * relative[:, j], cells)
        self._gram[:, j, i] = self._gram[:, i, j]
        if touched.any():
            size = np.einsum("cii->c", self._gram[touched])
            ridge = np.maximum(self._ridge[touched], _LEAST_RIDGE * size[:, None])
            gram = self._gram[touched] + ridge[:, :, None] * np.eye(width)
            moment = self._moment[touched] + ridge * self._prior
            best = _least_squares(gram, moment, self._non_negative)
            self.theta[touched] = best * self._unit[touched]
            self._spread[touched] = np.linalg.inv(gram)


def _sums(cell: Ints, values: Floats, cells: int) -> Floats:
    """Sum of the rows of each cell; at once, since most calls have few rows and many columns."""
    width = values.shape[1]
    at = cell[:, None] * width + np.arange(width)
    sums = np.bincount(at.reshape(-1), values.reshape(-1), cells * width)
    return np.asarray(sums.reshape(cells, width), np.float64)


def _least_squares(gram: Floats, moment: Floats, non_negative: Bools) -> Floats:
    """The minimum of `s G s / 2 - m s` with some `s >= 0`, for every cell."""
    best = np.asarray(np.linalg.solve(gram, moment[..., None])[..., 0], np.float64)
    bound = np.flatnonzero(non_negative).tolist()
    within = np.isfinite(best).all(axis=1) & (best[:, bound] >= -1e-12).all(axis=1)
    outside = np.flatnonzero(~within)
    if outside.size:
        best[outside] = _least_at_bounds(gram[outside], moment[outside], bound)
    return best


def _least_at_bounds(gram: Floats, moment: Floats, bound: list[int]) -> Floats:
    """The minimum for cells in which at least one of the terms `bound` is zero.

    With so few terms, trying every set of terms held at zero is exact and needs no iteration.
    """
    cells, terms = moment.shape
    best = np.zeros((cells, terms))
    lowest = np.full(cells, np.inf)
    for count in range(1, len(bound) + 1):
        for dropped in combinations(bound, count):
            kept = [term for term in range(terms) if term not in dropped]
            if not kept:
                continue
            part = np.zeros((cells, terms))
            inner = gram[:, kept][:, :, kept]
            part[:, kept] = np.linalg.solve(inner, moment[:, kept, None])[..., 0]
            value = 0.5 * np.einsum("ci,cij,cj->c", part, gram, part) - (moment * part).sum(axis=1)
            better = (part[:, bound] >= -1e-12).all(axis=1) & (value < lowest)
            best[better], lowest[better] = part[better], value[better]
    return best
