"""Work unlike that of a rank's peers, and unlike its own before: how far predictions are to trust.

A cost model is fitted to the work that it has seen, and the level of each rank is no part of the
fit. Documents far longer or shorter than those of the peers are an extrapolation, whose error looks
like a slow device, in every step anew. So it bounds what counts as slow, instead of adding to the
noise.
"""

from __future__ import annotations

import numpy as np

from resihp.contracts import TelemetryBatch

from ..arrays import Bools, Floats, Ints, appended, group_median, mad_sigma, median
from ..persistence import Persistent
from ..residuals import Misfit

_MISFIT = 0.25
"""Largest error of a prediction (log) for each unit (log) of distance from known work."""
_WITHIN = 3.0
"""Standard deviations within which work counts as known."""
_RECENT, _PAST = 8.0, 100.0
"""Steps over which the recent and the past work of a rank are averaged, at most."""
_FAR = 0.05
"""Error (log) from which a rank's work has changed its kind."""
_MOVED_STEPS = 3
"""Steps running of another kind of work from which the past is no reference."""
_SCATTER_STEPS = 9
"""Steps whose middle one tells the scatter of work: one where many ranks change does not."""


class UnlikeWork(Persistent):
    """Mean work of every rank, recent and past, as logs of tokens and of mean length."""

    _saved = ("_recent", "_past", "_scatters", "_before", "_count", "_outside")

    def __init__(self, classes: Ints) -> None:
        size = classes.size
        self._classes = classes
        peers = np.bincount(classes)[classes]
        self._alone = peers == 1
        # A mean of few ranks follows each of them.
        self._apart = np.sqrt(1.0 - 1.0 / peers)
        self._recent, self._past = np.zeros((2, 2, size))
        self._before = np.full((2, size), np.nan)
        self._scatters = np.empty((0, 2))
        self._count, self._outside = np.zeros((2, size))

    def observe(self, batch: TelemetryBatch, index: Ints, trusted: Bools) -> Misfit:
        """Take the records of a step; the past is learned from the ranks in `trusted`."""
        work, seen = self._work_of(batch, index)
        scatter = self._scatter(work)
        new = seen & (self._count == 0)
        self._recent[:, new] = self._past[:, new] = work[:, new]
        self._count[seen] += 1.0
        self._follow(self._recent, work, seen, _RECENT)
        wide = _WITHIN * scatter[:, None]
        narrow = wide / np.sqrt(np.clip(self._count, 1.0, _RECENT))
        centre = self._middle(seen)
        from_peers = _error(work - centre, wide, self._recent - centre, self._apart * narrow)
        from_peers[self._alone] = 0.0
        from_past = _error(work - self._past, wide, self._recent - self._past, narrow)
        other = seen & (from_past > _FAR)
        self._outside = np.where(other, self._outside + 1.0, np.where(seen, 0.0, self._outside))
        self._follow(self._past, work, seen & trusted & ~other, _PAST)
        moved = seen & trusted & (self._outside >= _MOVED_STEPS)
        self._past[:, moved] = self._recent[:, moved] = work[:, moved]
        self._count[moved], self._outside[moved] = 1.0, 0.0
        return Misfit(from_peers, from_past, moved)

    def _follow(self, level: Floats, work: Floats, ranks: Bools, most: float) -> None:
        """Average the work of some ranks into their level, over `most` steps."""
        rate = 1.0 / np.minimum(self._count[ranks], most)
        level[:, ranks] += rate * (work - level)[:, ranks]

    def _work_of(self, batch: TelemetryBatch, index: Ints) -> tuple[Floats, Bools]:
        """Mean work of every rank in a step, shape (2, ranks), NaN where it has no records."""
        tokens = np.log(np.maximum(batch.tokens, 1))
        length = np.log(np.maximum(batch.sum_sq_len, 1)) - tokens
        size = self._classes.size
        counts = np.bincount(index, minlength=size)
        sums = np.stack([np.bincount(index, one, size) for one in (tokens, length)])
        return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan), counts > 0

    def _scatter(self, work: Floats) -> Floats:
        """Standard deviation of a rank's work between steps, of all ranks together; shape (2,)."""
        change = (work - self._before) / np.sqrt(2.0)
        self._before = work
        rows = [mad_sigma(row, 0.0) if np.isfinite(row).any() else np.nan for row in change]
        self._scatters = appended(self._scatters, np.array(rows), _SCATTER_STEPS)
        scatter: Floats = np.nan_to_num(median(self._scatters, 0)[0])
        return scatter

    def _middle(self, seen: Bools) -> Floats:
        """Median recent work of each rank's class."""
        size = int(self._classes.max()) + 1
        rows = [group_median(row[seen], self._classes[seen], size) for row in self._recent]
        middle: Floats = np.nan_to_num(np.stack(rows))[:, self._classes]
        return middle


def _error(now: Floats, wide: Floats, usual: Floats, narrow: Floats) -> Floats:
    """Error for the distance of one step's work, or of that of several, beyond the known one."""
    beyond = np.maximum(np.abs(np.nan_to_num(now)) - wide, np.abs(usual) - narrow)
    result: Floats = _MISFIT * np.maximum(beyond, 0.0).sum(axis=0)
    return result
