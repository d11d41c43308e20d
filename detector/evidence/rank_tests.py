"""Sequential tests of all ranks: evidence from their peers and from their own past."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from ..arrays import (
    Bools,
    Floats,
    Ints,
    appended,
    deviation,
    group_median,
    mad_sigma,
    mean,
    median,
)
from ..persistence import Persistent
from ..residuals import FEW_RANKS, Misfit, StepResidual, common_change, is_noise_uncertain, noise_of
from ..settings import DetectorSettings
from .sequential import EDetector

WINDOW_STEPS = 48
"""Steps of residuals kept for each rank."""
_LAG = 3
"""Steps before a residual may enter the baseline, so that an onset does not mask itself."""
_FALL_STEPS = 4
"""Steps over which the common fall of a pair is averaged."""
_FIRST = 5
"""Steps whose mean is the first baseline, so that one interrupted step changes it little."""
_ALIKE = 8.0
"""Largest difference of the first two residuals, in standard deviations, to be a baseline."""
_MEMORY = 100
"""Steps over which the baseline is averaged, at most."""
_EARLY = 8
"""First steps, in each of which all of them are compared with the peers again."""
_SETTLED = 2
"""Steps before a baseline counts without peers."""
_OFFSET_SPREAD = 0.007
"""Prior spread (log) of healthy devices around their peers."""
_OFFSET_WEIGHT = 16.0
"""Weight of the prior spread of healthy devices, in ranks."""
_UNKNOWN_OFFSET = 0.3
"""Prior spread of the offset of a rank that has no peers (log)."""
_DRIFT = 0.002
"""Drift of a healthy device against its baseline that is tolerated (log)."""
_LEAST_HORIZON = 100_000
"""Steps of a device to a false name, at least."""
_SLOW_FROM_START = 0.001
"""Chance that some healthy device of a job lies further from its peers than tolerated."""
TURNS = 16
"""Latest steps that are marked slow or healthy, for intermittently slow ranks."""
_FLOOR = 5e-4
"""Least scale of a residual (log): timers are no better."""
_WAITED = 0.02
"""Share of their compute time that all others must wait for one to blame it for what all have."""
_UNEVEN = 0.25
"""Standard deviation of a prediction's error between steps, as a share of the largest one."""
_NO_MISFIT = Misfit(np.zeros(1), np.zeros(1), np.zeros(1, bool))


@dataclass(frozen=True)
class StepEvidence:
    """Evidence on every rank after a step; arrays over ranks.

    evidence  log e-value that the rank is slow
    excess    log residual beyond its reference (its past, or its peers)
    reference level that the excess is measured from
    doubt     standard error of that reference
    scale     standard deviation of one step's residual
    error     standard error of a residual by the expectation and the number of records
    by_past   whether the evidence comes from the past, not from the peers
    seen      whether the rank had a residual in this step
    able      whether the data can separate the rank's slowness from other causes
    turns     shape (TURNS, ranks), oldest first: the slow ones of the last steps, for
              intermittently slow ranks; False for all others
    """

    evidence: Floats
    excess: Floats
    reference: Floats
    doubt: Floats
    scale: Floats
    error: Floats
    by_past: Bools
    seen: Bools
    able: Bools
    turns: Bools

    @property
    def intermittent(self) -> Bools:
        """Mask of the ranks that are slow in some steps and healthy in others."""
        result: Bools = np.any(self.turns, axis=0)
        return result

    def slow(self, window: NDArray[np.floating], rank: int) -> NDArray[np.floating]:
        """Rows of a window, whose last is this step, in which a rank was intermittently slow."""
        latest = window[-TURNS:]
        return latest[self.turns[-len(latest) :, rank]]


class RankTests(Persistent):
    """Sequential tests of all ranks of one layout, with the window of residuals they use,
    oldest step first, and of where these are of work unlike any before.

    cleared  number of steps that the evidence on each rank no longer counts
    gains    evidence (log) from probes of each rank, since then
    misfits  of the first steps: how far each residual may be wrong (log) beside its peers'
    """

    _saved = (
        "window", "unlike", "falls", "steps", "count", "mean", "past", "noise", "first",
        "cleared", "gains", "misfits", "peer_test", "past_test",
    )  # fmt: skip

    def __init__(self, classes: Ints, settings: DetectorSettings) -> None:
        size = classes.size
        self._classes = classes
        self.name_at = float(np.log(max(size * settings.false_alarm_steps, _LEAST_HORIZON)))
        self.ceiling = self.name_at + 6.0
        self._bound = NormalDist().inv_cdf(1.0 - _SLOW_FROM_START / max(size, 8))
        peers = np.bincount(classes)[classes]
        self._majority, self._pair = peers >= 3, peers == 2
        self._few = (peers > 1) & (peers < FEW_RANKS)
        self.window = np.empty((0, size), np.float32)
        self.unlike = np.empty((0, size), bool)
        self.steps = np.empty(0, np.int64)
        self.count = 0
        self._wider = 1.0
        order = np.argsort(classes, kind="stable")
        self._pairs = order[self._pair[order]].reshape(-1, 2).T
        self.falls = np.empty((0, size), np.float32)
        self.mean = np.zeros(size)
        self.past = np.zeros(size)
        self.noise = np.zeros(size)
        self.cleared, self.gains = np.zeros(size, np.int64), np.zeros(size)
        self.misfits = np.empty((0, size), np.float32)
        self.first = np.full((_FIRST, size), np.nan)
        self.peer_test, self.past_test = EDetector(size), EDetector(size)

    def observe(
        self,
        step: int,
        residual: StepResidual,
        trusted: Bools,
        able: Bools,
        lags: Floats | None = None,
        healthy: Bools | None = None,
    ) -> StepEvidence:
        """Takes one step. `trusted` ranks update the baseline; only `able` ranks may be
        named: those that can be separated from others. `lags` are those of `CorrelatedRanks`.
        `healthy` ranks (default: the trusted ones) tell the common mode where too few of them are
        trusted, and update the baseline where they have few peers."""
        misfit = residual.misfit or _NO_MISFIT
        self._wider = residual.wider
        middle = self._middle()
        offset = self._offset_spread(middle)
        self._forget_past(misfit.moved)
        sure = self._representative(trusted, healthy)
        familiar = (misfit.from_past <= offset) & (self.past > 0)
        value = self._centre(residual, sure & familiar, lags)
        seen = np.isfinite(value)
        self.window = appended(self.window, value, WINDOW_STEPS)
        unlike = np.maximum(misfit.from_peers, misfit.from_past) > offset
        self.unlike = appended(self.unlike, np.broadcast_to(unlike, seen.shape), WINDOW_STEPS)
        self.steps = appended(self.steps, step, WINDOW_STEPS)
        self.count += 1
        scale = np.hypot(self._scale(residual, value), _UNEVEN * misfit.from_peers)
        self.noise = spread = np.maximum(scale, _FLOOR)
        apart = np.hypot(offset, misfit.from_peers)
        prior = np.where(self._majority, apart, _UNKNOWN_OFFSET)
        doubt = 1.0 / np.sqrt(self.past / spread**2 + 1.0 / prior**2)
        mean = middle + (self.mean - middle) * (1.0 - (doubt / prior) ** 2) + self._fallen()
        self._track_pairs(value - self.mean, trusted)
        most = mean + 3.0 * doubt + misfit.from_peers
        by_peers = middle + self._most_by_peers(most - middle, offset)
        by_past = mean + 3.0 * doubt + _DRIFT + self._misfit_of_past(misfit)
        compared, settled = self._majority | self._pair, self._settled(spread, offset)
        most_kept = _EARLY if self.count <= _EARLY else 1
        self.misfits = appended(self.misfits, misfit.from_peers + np.zeros(seen.size), most_kept)
        few = np.full(seen.size, is_noise_uncertain(self.window[:-1]))
        self._judge(self.peer_test, by_peers + self.misfits, compared, few | self._majority)
        self._judge(self.past_test, np.tile(by_past, (len(self.misfits), 1)), settled, few)
        self._update_baseline(np.where(self._few, sure, trusted), spread)
        peers, past = self.peer_test.evidence(), self.past_test.evidence()
        # Without lengths, the slower one of a pair may also be the one with more work.
        pair = self._pair & (residual.misfit is not None)
        from_past = past >= peers
        reference = np.where(from_past, mean, middle + self._peers_level(middle))
        return StepEvidence(
            evidence=np.maximum(peers, past) - np.log(2.0),
            excess=value - reference,
            reference=reference,
            doubt=np.where(from_past, doubt, np.where(self._pair, np.sqrt(2.0), 1.0) * apart),
            scale=spread,
            error=residual.error,
            by_past=from_past,
            seen=seen,
            able=able & (self._majority | pair | (past >= self.name_at)),
            turns=np.zeros((TURNS, value.size), bool),
        )

    def _judge(self, test: EDetector, most: Floats, judged: Bools, anew: Bools) -> None:
        """Adds the evidence of this step, which is what lies above the highest healthy level: the
        last row of `most`, shape (steps, ranks). In the first steps the evidence on the ranks in
        `anew` is taken from all of them again, with the noise as it is known by now."""
        if self.count == len(self.window) <= _EARLY and anew.any():
            test.reset(anew)
            for at, row in enumerate(self.window[:-1].astype(np.float64)):
                known = anew & judged & np.isfinite(row) & (at >= self.cleared)
                test.update(row - most[at], self.noise, known, self.ceiling)
            for rank in np.flatnonzero(anew & (self.gains != 0)).tolist():
                test.add(rank, self.gains[rank], self.ceiling)
        row = self.window[-1].astype(np.float64)
        test.update(row - most[-1], self.noise, judged & np.isfinite(row), self.ceiling)

    def _most_by_peers(self, most_by_past: Floats, offset: float) -> Floats:
        """Highest level at which each rank is as fast as its peers. Those of a pair lie as far
        above and below their mean; noise hides less of the distance to the faster one's past."""
        most = np.full(self.past.size, self._bound * offset)
        by_other = most_by_past[self._pairs[::-1]] + 2.0 * self._bound * offset
        most[self._pairs] = np.minimum(most[self._pairs], by_other)
        return most

    def _peers_level(self, middle: Floats) -> Floats:
        """Level (0 or less) of each rank's healthy peers beyond their middle: of a pair, that of
        the other rank, for devices become slower than they were built, not faster."""
        result: Floats = np.zeros(self.past.size)
        if self._pairs.size:
            other = self._pairs[::-1]
            first = median(self.window[-_FIRST:][:, other], 0)[0]
            level = np.where(self.past[other] > 0, self.mean[other], first)
            result[self._pairs] = np.minimum(np.nan_to_num(level - middle[other]), 0.0)
        return result

    def _fallen(self) -> Floats:
        """Recent fall of both ranks of a pair below their baselines (0 or less): a change
        of the expectation, which a pair has no majority to remove."""
        recent = self.falls[: 1 - _LAG][-_FALL_STEPS:]
        known = np.isfinite(recent).sum(axis=0) >= _FALL_STEPS - 1
        return np.where(known, median(recent, 0)[0], 0.0) if known.any() else np.zeros(known.size)

    def _track_pairs(self, change: Floats, trusted: Bools) -> None:
        """Notes the smaller fall of the two ranks of each pair, as long as both are trusted."""
        falls = np.full(change.size, np.nan)
        if self._pairs.size:
            sound = trusted[self._pairs].all(axis=0) & (self.past[self._pairs] > 0).all(axis=0)
            fall = np.minimum(change[self._pairs].max(axis=0), 0.0)
            falls[self._pairs] = np.where(sound, fall, np.nan)
        self.falls = appended(self.falls, falls, _LAG + _FALL_STEPS - 1)

    def _representative(self, trusted: Bools, healthy: Bools | None) -> Bools:
        """Ranks whose middle is that of their class: the trusted ones or, where they are not half
        of the healthy ones, all of these. Where times scatter widely most ranks are in some doubt,
        and the others are those that happened to be quick of late."""
        if healthy is None:
            return trusted
        size = int(self._classes.max()) + 1
        sure = np.bincount(self._classes[trusted], minlength=size)
        few = 2 * sure < np.bincount(self._classes[healthy], minlength=size)
        result: Bools = trusted | (healthy & few[self._classes])
        return result

    def _centre(self, residual: StepResidual, trusted: Bools, lags: Floats | None) -> Floats:
        """Residuals without the common mode of the peers, or of the job where peers are too few.
        Only `trusted` ranks tell it: two suspects among few peers would mask each other, and what
        is expected of work unlike any before is wrong for all that have it. What all peers have
        because they waited for one of them is not common either."""
        value = residual.value
        if np.count_nonzero(np.isfinite(value)) < FEW_RANKS:
            return value.copy()
        noise = np.where(self.noise > 0, np.maximum(self.noise, residual.error), 0.0)
        change = value - self.mean
        common = common_change(change, self._classes, trusted, self.past, noise)
        if lags is not None:
            common[lags > np.maximum(0.5 * (1.0 - np.exp(-common)), _WAITED)] = 0.0
        return value - common

    def _offset_spread(self, middle: Floats) -> float:
        """Spread of healthy devices around the `middle` of their peers, with a prior for small
        jobs: that of their baselines, without what the noise of these makes where the common mode
        is removed."""
        square = (_OFFSET_SPREAD * self._wider) ** 2
        use = self._has_baseline()
        number = int(np.count_nonzero(use))
        if number:
            noise = float(np.median(self.noise[use] ** 2 / self.past[use]))
            seen = deviation((self.mean - middle)[use]) ** 2
            seen = max(seen - noise, 0.0) if use.size >= FEW_RANKS else seen
            square = (_OFFSET_WEIGHT * square + number * seen) / (_OFFSET_WEIGHT + number)
        return float(np.sqrt(square))

    def _has_baseline(self) -> Bools:
        """Ranks whose baseline tells the level of their peers."""
        result: Bools = self._majority & (self.past >= 2 * _SETTLED)
        return result

    def _middle(self) -> Floats:
        """Middle level of each rank's peers; 0 where fewer than four baselines are known of them,
        or of two and three peers fewer than two: what is expected of few was learned in the first
        steps, and is off by what these happened to differ."""
        use = (self._majority | self._pair) & (self.past >= 2 * _SETTLED)
        classes, size = self._classes[use], int(self._classes.max()) + 1
        level = group_median(self.mean[use], classes, size)
        known = np.bincount(classes, minlength=size)
        peers = np.bincount(self._classes, minlength=size)
        level[known < np.where(peers < FEW_RANKS, 2, FEW_RANKS)] = 0.0
        return level[self._classes]

    def _scale(self, residual: StepResidual, value: Floats) -> Floats:
        """Standard deviation of a step's residual: the scatter between steps, and at least the
        error of the expectation."""
        noise = noise_of(self.window)
        if not noise.any():
            seen = value[np.isfinite(value)]
            noise = np.full_like(noise, mad_sigma(seen, 0.0) if seen.size >= 4 else 0.0)
        return np.maximum(noise, residual.error)

    def _update_baseline(self, trusted: Bools, spread: Floats) -> None:
        """Adds the residual of `_LAG` steps ago to the baselines of the trusted ranks."""
        if self.count <= _LAG:
            return
        old = self.window[-1 - _LAG]
        use = trusted & np.isfinite(old)
        early = use & (self.past < _FIRST)
        self.first[self.past[early].astype(np.int64), early] = old[early]
        self.past = np.where(use, np.minimum(self.past + 1.0, _MEMORY), self.past)
        first, limit = self.first[:, early], 3.0 * spread[early]
        middle = median(first, 0)
        self.mean[early] = mean(np.clip(first, middle - limit, middle + limit), 0)[0]
        later = use & ~early
        step = np.clip(old - self.mean, -3.0 * spread, 3.0 * spread)
        self.mean[later] += (step / np.maximum(self.past, 1.0))[later]

    def _settled(self, spread: Floats, offset: float) -> Bools:
        """Ranks with a baseline (one of two steps counts only if they agree), or with peers among
        which their first residual is plausible."""
        apart = np.abs(self.first[0] - self.first[1]) <= _ALIKE * spread
        past = (self.past > _SETTLED) | ((self.past == _SETTLED) & apart)
        plausible = np.abs(np.nan_to_num(self.first[0])) <= self._bound * offset + 3.0 * spread
        settled: Bools = past | (self._majority & (self.past <= 1) & plausible)
        return settled

    def _misfit_of_past(self, misfit: Misfit) -> Floats:
        """Error of the comparison with the past; with the peers, where there is hardly a past."""
        new = self.past <= _SETTLED
        return np.where(new, np.maximum(misfit.from_peers, misfit.from_past), misfit.from_past)

    def _forget_past(self, ranks: Bools) -> None:
        """Learns the baselines of ranks anew whose work is of another kind than before."""
        if ranks.any():
            self.past[ranks] = self.mean[ranks] = 0.0
            self.first[:, ranks] = np.nan

    def anchor(self, rank: int, level: float, steps: float = 4.0 * _SETTLED) -> None:
        """Sets the baseline of a rank (log residual), as if observed for so many steps."""
        self.mean[rank], self.past[rank] = level, steps
        self.first[:, rank] = level

    def slowest_healthy(self) -> Floats:
        """The highest level (log residual) at which each rank is surely healthy: its baseline,
        limited by its peers; -inf where there is neither."""
        middle = self._middle()
        most = middle + self._bound * self._offset_spread(middle)
        known = np.where(self.past > 0, self.mean, -np.inf)
        return np.where(self._majority, np.minimum(self.mean, most), known)

    def continue_from(self, older: RankTests, old: Ints, new: Ints) -> None:
        """Takes over what is known of some ranks, which have other positions here; all others begin
        with the next step."""
        self.steps, self.count, size = older.steps, older.count, self.past.size
        windows = ("window", np.nan), ("falls", np.nan), ("unlike", False), ("misfits", 0.0)
        for name, empty in windows:
            column = getattr(older, name)
            grown = np.full((len(column), size), empty, column.dtype)
            grown[:, new] = column[:, old]
            setattr(self, name, grown)
        for name in ("mean", "past", "noise", "first", "cleared", "gains"):
            getattr(self, name)[..., new] = getattr(older, name)[..., old]
        self.peer_test.continue_from(older.peer_test, old, new)
        self.past_test.continue_from(older.past_test, old, new)

    def unsettled(self) -> Bools:
        """Ranks with neither enough peers nor a baseline."""
        return ~self._majority & (self.past < _SETTLED)

    def alike(self, level: float) -> bool:
        """Returns whether a residual (log) is within the spread of healthy devices."""
        return abs(level) < self._bound * self._offset_spread(self._middle())

    def add(self, rank: int, gain: float) -> None:
        """Adds evidence from a probe (a log-likelihood ratio) on one rank."""
        self.gains[rank] += gain
        self.peer_test.add(rank, gain, self.ceiling)
        self.past_test.add(rank, gain, self.ceiling)

    def clear(self, ranks: Bools) -> None:
        """Resets the evidence on some ranks."""
        self.cleared[ranks], self.gains[ranks] = self.count, 0.0
        self.peer_test.reset(ranks)
        self.past_test.reset(ranks)
