"""Intermittently slow devices: slow in some steps and healthy in others.

A test for lasting slowness loses in a healthy step the evidence of a slow one. Here, under the
alternative, each step is slow with some probability, so that a healthy step costs little
evidence. Under the null, any step may be a hiccup of any size (garbage collection, a page-in) with
a smaller probability, so that one slow step adds little, however slow it was. The Shiryaev-Roberts
sum of that bounded likelihood ratio is taken over the window of residuals, from each rank's own
healthy level.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..arrays import MAD_TO_SIGMA, Bools, Floats, Ints, median
from .rank_tests import TURNS, RankTests, StepEvidence
from .sequential import GRID, log_ratio

_SLOW_SHARE = 0.4
"""Probability of a slow step of an intermittently slow device."""
_HICCUPS = 0.005
"""Probability of a hiccup in any step of a healthy device."""
_RARE = float(np.log(10.0))
"""Prior odds (log) of a continuously slow device against an intermittently slow one."""
_APART = 6.0
"""Least distance of the two levels, in standard deviations of a step."""
_FEW = 3
"""Least number of steps of either kind; as many slowest steps may be outliers, less one."""
_POOL = 8.0
"""Weight of the noise of all ranks, in steps."""
EDGE = 0.4
"""Share of a device's slowness (log) beyond which a step counts as slow."""
_MOST_GAIN = float(np.log(_SLOW_SHARE / _HICCUPS))
_LOSS = float(np.log((1.0 - _SLOW_SHARE) / (1.0 - _HICCUPS)))
"""Log-likelihood ratios of a clearly slow and a clearly healthy step."""
_HEALTHY_SHARE = 0.15
"""Share of healthy steps since the onset from which a device counts as intermittently slow."""


@dataclass(frozen=True)
class _Levels:
    """The two levels of some ranks (log), arrays over ranks.

    healthy, high  the two levels; doubt: standard error of `healthy`
    scale          standard deviation of one step
    apart          whether the two levels are clearly apart
    """

    healthy: Floats
    high: Floats
    doubt: Floats
    scale: Floats
    apart: Bools

    def of(self, ranks: Bools) -> _Levels:
        """The levels of some of the ranks."""
        return _Levels(*(column[ranks] for column in vars(self).values()))

    def slow(self, series: Floats) -> Bools:
        """Mask of the slow steps, shape (steps, ranks)."""
        slow: Bools = series - self.healthy > EDGE * (self.high - self.healthy)
        return slow


def with_intermittent(
    tests: RankTests, now: StepEvidence, able: Bools, least: float, fresh: Ints
) -> StepEvidence:
    """`now`, with the evidence of intermittent slowness where it is the stronger.

    able    ranks with enough others to compare with to be named
    least   least slowness (log) that is named
    fresh   step of each rank from which its residuals count
    """
    high = (tests.window[-TURNS:] - tests.mean > least) & ~tests.unlike[-TURNS:]
    ranks = np.flatnonzero(now.seen & (np.count_nonzero(high, axis=0) >= _FEW))
    if not ranks.size or tests.count < 2 * _FEW:
        return now
    series = tests.window[:, ranks].astype(np.float64)
    series[(tests.steps[:, None] < fresh[ranks]) | tests.unlike[:, ranks]] = np.nan
    usual = float(np.median(now.scale))
    levels = _levels(series, tests.slowest_healthy()[ranks], now.error[ranks], usual)
    use = levels.apart & (levels.high - levels.healthy > least) & _in_turns(series, levels)
    if not use.any():
        return now
    ranks, series, levels = ranks[use], series[:, use], levels.of(use)
    evidence = _evidence(series, levels)
    use = evidence > now.evidence[ranks]
    ranks, series, levels = ranks[use], series[:, use], levels.of(use)
    columns = {
        "evidence": np.minimum(evidence[use], tests.ceiling),
        "excess": series[-1] - levels.healthy,
        "reference": levels.healthy,
        "doubt": levels.doubt,
        "scale": levels.scale,
        "by_past": np.ones(ranks.size, bool),
        "able": able[ranks],
    }
    changed = {name: getattr(now, name).copy() for name in columns}
    for name, column in columns.items():
        changed[name][ranks] = column
    turns, latest = now.turns.copy(), levels.slow(series)[-TURNS:]
    turns[TURNS - len(latest) :, ranks] = latest
    return replace(now, turns=turns, **changed)


def _in_turns(series: Floats, levels: _Levels) -> Bools:
    """Mask of the ranks with enough healthy steps since their onset."""
    slow = levels.slow(series)
    gain = np.where(slow, _MOST_GAIN, np.where(np.isfinite(series), _LOSS, 0.0))
    first = np.argmax(np.cumsum(gain[::-1], axis=0)[::-1], axis=0)
    since = (np.arange(len(series))[:, None] >= first) & np.isfinite(series)
    healthy = np.count_nonzero(since & ~slow, axis=0)
    result: Bools = healthy > _HEALTHY_SHARE * np.count_nonzero(since, axis=0)
    return result


def _levels(series: Floats, healthy: Floats, error: Floats, usual: float) -> _Levels:
    """Healthy and slow level of each column: the split in two with the least variance, with the
    two slowest steps clipped, for they may be hiccups. The lower level is at least the one that
    was `healthy` before: a rank whose reference ranks are intermittently slow is intermittently
    fast, not slow."""
    count = np.isfinite(series).sum(axis=0)
    ordered = np.sort(series, axis=0)
    top = np.take_along_axis(ordered, np.maximum(count - _FEW, 0)[None], axis=0)
    drawn = np.minimum(series, top)
    split = _split(np.minimum(ordered, top), count)
    low = np.where(drawn <= split, drawn, np.nan)
    high = np.where(drawn > split, drawn, np.nan)
    lower, upper = median(low, 0)[0], median(high, 0)[0]
    off = np.where(drawn <= split, drawn - lower, drawn - upper)
    own = MAD_TO_SIGMA * median(np.abs(off), 0)[0]
    square = (_POOL * usual**2 + count * own**2) / (_POOL + count)
    scale = np.maximum(np.sqrt(square), error)
    lows = np.isfinite(low).sum(axis=0)
    doubt = 1.25 * scale / np.sqrt(np.maximum(lows, 1))
    level = np.fmax(lower, healthy)
    apart = (lows >= _FEW) & (upper - level > _APART * scale)
    return _Levels(level, upper, doubt, scale, apart)


def _split(ordered: Floats, count: Ints) -> Floats:
    """The value up to which a sorted column belongs to the lower of two clusters (Otsu 1979)."""
    filled = np.nan_to_num(ordered)
    below = np.arange(1, len(ordered) + 1)[:, None]
    above = np.maximum(count - below, 1)
    total = np.cumsum(filled, axis=0)
    between = (total[-1] - total) / above - total / below
    gain = np.where(below < count, below * above * between**2, -1.0)
    best = np.argmax(gain, axis=0)
    result: Floats = ordered[best, np.arange(ordered.shape[1])]
    return result


def _evidence(series: Floats, levels: _Levels) -> Floats:
    """log of the Shiryaev-Roberts sum, averaged over the grid."""
    excess = series - levels.healthy - 3.0 * levels.doubt
    ratio = np.exp(log_ratio(excess, levels.scale, GRID[:, None, None]))
    gains = np.log((1.0 - _SLOW_SHARE + _SLOW_SHARE * ratio) / (1.0 - _HICCUPS + _HICCUPS * ratio))
    total = np.full((GRID.size, series.shape[1]), -np.inf)
    for step, seen in enumerate(np.isfinite(series)):
        total = np.where(seen, np.logaddexp(total, 0.0) + gains[:, step], total)
    result: Floats = np.logaddexp.reduce(total, axis=0) - np.log(GRID.size) - _RARE
    return result


def first_slow_step(slow: Bools) -> int:
    """The most likely first slow step of an intermittently slow device: where the likelihood ratio
    of all later steps is the largest.

    >>> first_slow_step(np.array([0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 1], bool))
    10
    """
    gain = np.where(slow, _MOST_GAIN, _LOSS)
    return int(np.argmax(np.cumsum(gain[::-1])[::-1]))


def recent_level(tests: RankTests, now: StepEvidence, steps: int) -> Floats:
    """Level (log, beyond the reference) of every rank in its last `steps` steps; of intermittently
    slow ranks, in their slow steps."""
    recent = np.nan_to_num(tests.window[-steps:])
    level = np.median(recent, axis=0).astype(np.float64)
    for rank in np.flatnonzero(now.intermittent).tolist():
        level[rank] = np.median(now.slow(tests.window, rank)[:, rank])
    return level - now.reference
