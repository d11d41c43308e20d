"""Training threads that hang although their processes are alive.

A rank hangs when its training thread stays in one timed block for longer than a time-out that
adapts to what the job has come back from. When one rank hangs, all others soon wait for it, so the
ranks that only wait are told apart: those in a block that waits for other ranks (P2P, collective,
`waiting`), and those that another rank is behind. A rank is behind in an earlier step, or in the
same step with fewer finished passes than a rank that holds the same layers. Where all ranks of the
layout wait, those that are behind are the cause.

A rank outside of all timed blocks (evaluation, checkpoint, set-up) pauses: that is reported after
ten minutes only, the default time-out of torch's collectives, and if a rank waits; until then the
ranks that may wait for it do not hang. The same time-out holds in the first step of a process,
which compiles and connects.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from resihp.contracts import TrainingPosition
from resihp.formatting import duration, rank_list

from .persistence import Persistent
from .rank_table import RankTable

_SHORTEST_S = 10.0
_PAUSE_S = 600.0
_FACTOR = 2.0
"""Time-out over the longest stay in a block that a rank came back from."""


@dataclass(frozen=True)
class Hang:
    """A rank whose training thread hangs.

    since_s    by the clock of the heartbeats
    suspects   ranks that may be the cause, this one included
    named      they are few enough to be named as the cause
    waiting    number of ranks that wait for them
    """

    position: TrainingPosition
    since_s: float
    suspects: tuple[int, ...]
    named: bool
    waiting: int

    def evidence(self, now: float) -> tuple[str, ...]:
        """Sentences on the hang as of `now`."""
        position = self.position
        lasted = duration(1e3 * max(0.0, now - self.since_s))
        where = "waiting for other ranks " if position.waiting else ""
        if position.op is None:
            where += f"outside of all timed blocks since step {position.step}"
        else:
            where += f"in {position.op.name.lower()} of step {position.step}"
            where += f", microbatch {position.microbatch}" if position.microbatch >= 0 else ""
        lines = [f"its training thread has been {where} for {lasted}; its process is alive"]
        if not self.named:
            lines.append("the rank that the others wait for cannot be told from the positions")
        elif len(self.suspects) > 1:
            lines.append(f"one of {rank_list(self.suspects)} is the cause")
        if self.named and self.waiting:
            lines.append(f"{self.waiting} other ranks wait")
        return tuple(lines)


@dataclass(slots=True)
class _Stay:
    """Position of a rank that does not move, `since_s`; `is_suspect` if nothing excuses it."""

    position: TrainingPosition
    since_s: float
    is_suspect: bool = False


class HangTracker(Persistent):
    """Positions of the ranks of one job. Times are seconds of the heartbeats' clock."""

    _saved = ("_stays", "_first_steps", "_longest_s")
    _stays: dict[int, _Stay]
    _first_steps: dict[int, int]

    def __init__(self) -> None:
        self._stays = {}
        self._first_steps = {}
        self._longest_s = 0.0

    def observe(self, rank: int, position: TrainingPosition, now: float) -> None:
        """Note a position that a heartbeat carried."""
        self._first_steps.setdefault(rank, position.step)
        since_s = now - position.for_s
        known = self._stays.get(rank)
        if known is not None and replace(known.position, for_s=position.for_s) == position:
            since_s = min(since_s, known.since_s)
            self._stays[rank] = _Stay(position, since_s, known.is_suspect)
        else:
            self.moved(rank, now - position.for_s)
            self._stays[rank] = _Stay(position, since_s)

    def moved(self, rank: int, now: float) -> None:
        """Note that a rank makes progress, e.g. that records of it arrived."""
        stay = self._stays.pop(rank, None)
        if stay is not None and stay.is_suspect:
            self._longest_s = max(self._longest_s, min(now - stay.since_s, _PAUSE_S))

    def forget(self, ranks: Collection[int]) -> None:
        """Drop what is known of ranks."""
        for rank in ranks:
            self._stays.pop(rank, None)
            self._first_steps.pop(rank, None)

    def last_seen(self, rank: int) -> tuple[str, ...]:
        """The last known position of a rank that fell silent, as evidence."""
        if rank not in self._stays:
            return ()
        position = self._stays[rank].position
        place = "outside of all timed blocks"
        if position.op is not None:
            place = f"in {position.op.name.lower()}"
            place += f" of microbatch {position.microbatch}" if position.microbatch >= 0 else ""
        return (f"last seen {place} in step {position.step}",)

    def hangs(self, now: float, ranks: RankTable) -> dict[int, Hang]:
        """The ranks of a layout that hang and do not merely wait for another rank."""
        if not any(now - stay.since_s > _SHORTEST_S for stay in self._stays.values()):
            return {}
        classes = dict(zip(ranks.ranks.tolist(), ranks.peers.tolist(), strict=True))
        stays = {rank: stay for rank, stay in self._stays.items() if rank in classes}
        present = len(stays)
        busy = {rank: stay for rank, stay in stays.items() if not stay.position.waiting}
        if busy or present < ranks.size:
            stays = busy  # else all wait for each other
        if present == len(busy) and all(stay.position.op is None for stay in busy.values()):
            return {}  # the whole job pauses
        step = min((stay.position.step for stay in stays.values()), default=0)
        rear = [(classes[r], s.position) for r, s in stays.items() if s.position.step == step]
        fewest: dict[int, int] = {}
        for kind, position in rear:
            fewest[kind] = min(fewest.get(kind, position.passes), position.passes)
        pausing = [(kind, position.passes) for kind, position in rear if position.op is None]
        suspects = []
        for rank, stay in stays.items():
            position, kind, lasted_s = stay.position, classes[rank], now - stay.since_s
            blocked = position.op is not None
            excused = (
                lasted_s <= _SHORTEST_S
                or position.step > step
                or position.passes > fewest[kind]
                or (blocked and any(k != kind or p <= position.passes for k, p in pausing))
            )
            stay.is_suspect = blocked and not excused
            if not excused and lasted_s > self._time_out_s(rank, position):
                suspects.append(rank)
        waiting = present - len(suspects)
        named = len(suspects) == 1 or 2 * len(suspects) <= ranks.size
        return {
            rank: Hang(stays[rank].position, stays[rank].since_s, tuple(suspects), named, waiting)
            for rank in suspects
        }

    def _time_out_s(self, rank: int, position: TrainingPosition) -> float:
        if position.op is None or position.step <= self._first_steps.get(rank, -1):
            return _PAUSE_S
        return min(max(_SHORTEST_S, _FACTOR * self._longest_s), _PAUSE_S)
