"""Liveness of ranks: an adaptive time-out on heartbeats.

A sender beats at a regular interval I, and a share p of its beats is lost. The gaps between those
that come are then multiples of I with mean I / (1 - p) and squared coefficient of variation p, so
that p and I follow from these two; beats that are late or irregular make p larger, up to the 1 of
beats that come at random. A silence of k intervals has the probability p ** k: a rank is dead when
that is below 10 ** -phi, which for beats at random is a silence of 2.3 phi mean gaps, and less for
all others. Where silences have another cause (a trainer that pauses now and then), one of up to
twice the longest silence so far is tolerated as well, within a limit.

A silence that most ranks share, or in which no rank at all was heard, is a fault of the network or
the service, or the end of the job: it counts against no rank. Ranks whose processes have ended with
an error, and have not come back, share it: after an error a launcher kills the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .persistence import Persistent

_FADE = 0.007  # weight of a new gap
_FADE_LONGEST = 0.002
_DOUBT = 9.0  # prior: so many lost beats in addition to the observed ones
_MOST_LOST = 0.97
_FEW = 2  # of so few ranks, a common silence says nothing unless one has failed
_QUIET = 0.5
"""Share of the shortest time-out from which a silence counts as one. Less than 1, so that of ranks
that fall silent together the first one is not dead before most are quiet."""


@dataclass(slots=True)
class _Sender:
    """Beats of one rank; seconds.

    last     time of the last beat
    gaps     number of gaps before it, `total` their sum, `squares` that of their squares; older
             ones fade
    longest  longest silence so far
    dead     whether the rank counts as dead
    """

    last: float
    gaps: float = 0.0
    total: float = 0.0
    squares: float = 0.0
    longest: float = 0.0
    dead: bool = False

    @property
    def mean(self) -> float:
        """Mean gap in seconds."""
        return self.total / self.gaps


class HeartbeatTracker(Persistent):
    """Arrival times of heartbeats. Times are seconds of any one monotonic clock.

    phi      a live rank counts as dead once in 10 ** phi beats, if beats are lost independently of
             each other, 30% of them at most
    floor_s  shortest silence that may be death
    limit_s  longest silence that is tolerated only because there was a similar one
    """

    _saved = ("_senders", "_failed", "_heard", "_excused")
    _senders: dict[int, _Sender]
    _failed: set[int]

    def __init__(self, *, phi: float = 10.0, floor_s: float = 5.0, limit_s: float = 60.0) -> None:
        self.phi, self.floor_s, self.limit_s = phi, floor_s, limit_s
        self._senders, self._failed = {}, set()
        self._heard = -math.inf  # when any rank was
        self._excused = -math.inf  # silence before this counts against no rank

    def beat(self, ranks: Iterable[int], now: float) -> None:
        """Ranks were alive at `now`; an earlier time than the last one is ignored."""
        for rank in ranks:
            self._failed.discard(rank)
            sender = self._senders.get(rank)
            if sender is None:
                self._senders[rank] = _Sender(now)
            elif now > sender.last:
                self._hear(sender, now)
            self._heard = max(self._heard, now)

    def _hear(self, sender: _Sender, now: float) -> None:
        quiet = now - self._heard  # of all ranks
        if quiet > 0.5 * self.floor_s and quiet > 0.5 * self._time_out(sender):
            self._excused = now
        if sender.last >= self._excused or len(self._senders) <= _FEW:
            gap = now - sender.last
            if gap > self.limit_s:  # one long silence must not hide all later ones
                gap = min(gap, max(self.limit_s, self._time_out(sender)))
            sender.gaps += 1.0 - _FADE * sender.gaps
            sender.total += gap - _FADE * sender.total
            sender.squares += gap * gap - _FADE * sender.squares
            sender.longest = max(gap, sender.longest - _FADE_LONGEST * sender.longest)
        sender.last, sender.dead = now, False

    def revive(self, rank: int) -> None:
        """Take that a rank held for dead works, though no beat of it came; its silence begins
        when any rank was last heard."""
        sender = self._senders.get(rank)
        if sender is not None and sender.dead:
            sender.last, sender.dead = self._heard, False

    def knows(self, rank: int) -> bool:
        """Return whether a rank has sent heartbeats and has not left."""
        return rank in self._senders

    def time_out(self, rank: int) -> float:
        """Seconds of silence from which a rank counts as dead; infinite until it beat twice."""
        sender = self._senders.get(rank)
        return math.inf if sender is None else self._time_out(sender)

    def _time_out(self, sender: _Sender) -> float:
        if not sender.gaps:
            return math.inf
        # Share of the beats that are lost or as late; rather too large than too small.
        spread = max(sender.squares / sender.gaps / sender.mean**2 - 1.0, 0.0)
        lost = min((sender.gaps * spread + _DOUBT) / (sender.gaps + _DOUBT), _MOST_LOST)
        interval = (1.0 - lost) * sender.mean
        silence = interval * (0.5 + self.phi / -math.log10(lost))
        return max(self.floor_s, silence, min(2.0 * sender.longest, self.limit_s))

    def dead(self, now: float) -> list[int]:
        """Ranks that are dead, those found before included."""
        living = [sender for sender in self._senders.values() if not sender.dead]
        quiet = [sender for sender in living if self._is_quiet(sender, now)]
        failed = len(self._failed)
        known, missing = len(living) + failed, len(quiet) + failed
        if (known > _FEW or failed) and 2 * missing > known:
            self._excused = now
        for sender in quiet:
            silence = now - max(sender.last, self._excused)
            sender.dead = silence > self._time_out(sender)
        return sorted(rank for rank, sender in self._senders.items() if sender.dead)

    def any_quiet(self, now: float) -> bool:
        """Return whether a rank that is not held for dead has missed a few heartbeats."""
        senders = self._senders.values()
        return any(not sender.dead and self._is_quiet(sender, now) for sender in senders)

    def _is_quiet(self, sender: _Sender, now: float) -> bool:
        silence = now - sender.last
        return silence > _QUIET * self.floor_s and (not sender.gaps or silence > 3.0 * sender.mean)

    def fail(self, ranks: Iterable[int]) -> None:
        """Take ranks whose processes have ended with an error for missing until they beat again."""
        for rank in ranks:
            self._senders.pop(rank, None)
            self._failed.add(rank)

    def forget(self, ranks: Iterable[int]) -> None:
        """Removes ranks that are gone."""
        for rank in ranks:
            self._senders.pop(rank, None)
            self._failed.discard(rank)

    def keep(self, is_known: Callable[[int], bool]) -> None:
        """Remove all other ranks."""
        self.forget([rank for rank in (*self._senders, *self._failed) if not is_known(rank)])
