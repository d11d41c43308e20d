"""Training threads that hang although their processes are alive.

A rank hangs when its training thread stays in one timed block for longer than a time-out that
adapts to what the job has come back from. When one rank hangs, all others soon wait for it, so the
ranks that only wait are told apart: those in a block that waits for other ranks (P2P, collective,
`waiting`), and those that another rank is behind. A rank is behind in an earlier step, or in the
same step with fewer finished passes than a rank that holds the same layers. Where all ranks of the
layout wait, those that are behind are the cause.

A rank that loads data waits for nobody, and all others may wait for it. Its time-out is longer,
because the first batch of a pass over the data takes its time, and has a history of its own.

A rank outside of all timed blocks (evaluation, checkpoint, set-up) pauses: that is reported after
ten minutes only, the default time-out of torch's collectives, and if a rank waits; until then the
ranks that may wait for it do not hang. No shorter time is safe: a job's first checkpoint by one
rank looks the same. The same time-out holds in the first step of a process, which compiles and
connects.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from resihp.contracts import Heartbeat, Op, TrainingPosition
from resihp.formatting import duration, listed, plural, rank_list

from .persistence import Persistent
from .rank_table import RankTable

_SHORTEST_S = 10.0
_SHORTEST_DATA_S = 30.0
_PAUSE_S = 600.0
_FACTOR = 2.0
"""Time-out over the longest stay in a block that a rank came back from."""
_MOST_STACKS = 8
_MOST_PLACES = 3
_EXCHANGES = {Op.COLLECTIVE: "in a collective", Op.P2P: "in a transfer"}


@dataclass(frozen=True)
class Hang:
    """A rank whose training thread hangs.

    since_s     by the clock of the heartbeats
    stack       of its training thread, if it was sent
    collective  what its flight recorder says; "" where that is not known
    """

    position: TrainingPosition
    since_s: float
    stack: tuple[str, ...] = ()
    collective: str = ""

    def sentence(self, now: float) -> str:
        """Sentence on where the rank hangs, and for how long as of `now`."""
        position = self.position
        lasted = duration(1e3 * max(position.for_s, now - self.since_s))
        where = "waiting for other ranks " if position.waiting else ""
        if position.op is None:
            where += f"outside of all timed blocks since step {position.step}"
        else:
            where += f"in {position.op.name.lower()} of step {position.step}"
            where += f", microbatch {position.microbatch}" if position.microbatch >= 0 else ""
        return f"its training thread has been {where} for {lasted}; its process is alive"


@dataclass(frozen=True)
class Hangs:
    """The ranks that hang at one time, each of which may be the cause.

    by_rank  the hang of each
    named    they are few enough to be named as the cause
    others   number and places of the ranks that wait for them, by the step in which one hangs; ""
             without any
    waiting  rank that waits for them, and what its flight recorder says; None where it says nothing
    """

    by_rank: dict[int, Hang] = field(default_factory=dict)
    named: bool = False
    others: dict[int, str] = field(default_factory=dict)
    waiting: tuple[int, str] | None = None

    def evidence(self, rank: int, now: float) -> tuple[str, ...]:
        """Sentences on the hang of a rank as of `now`."""
        hang = self.by_rank[rank]
        lines = [hang.sentence(now)]
        if not self.named:
            lines.append("the rank that the others wait for cannot be told from the positions")
        elif len(self.by_rank) > 1:
            lines.append(self._one_of)
        if self.named and (others := self.others[hang.position.step]):
            lines.append(others)
        if hang.stack:
            lines.append(f"its stack, the innermost frame first: {' <- '.join(hang.stack)}")
        recorded = [(rank, hang.collective), *([self.waiting] if self.waiting else [])]
        lines += [f"flight recorder of rank {each}: {told}" for each, told in recorded if told]
        return tuple(lines)

    @cached_property
    def _one_of(self) -> str:
        return f"one of {rank_list(self.by_rank)} is the cause"

    def naming(self, rank: int) -> tuple[object, ...] | None:
        """The part of a rank's hang whose change is worth a new verdict; None if it does not
        hang."""
        hang = self.by_rank.get(rank)
        if hang is None:
            return None
        return self.named, hang.position.place, hang.stack, hang.collective, self.waiting


@dataclass(slots=True)
class _Stay:
    """Position of a rank that does not move, `since_s`; `is_suspect` if nothing excuses it.
    `stack` and `collective` as in its heartbeats."""

    position: TrainingPosition
    since_s: float
    is_suspect: bool = False
    stack: tuple[str, ...] = ()
    collective: str = ""

    @property
    def is_idle(self) -> bool:
        """True outside of passes, where the rank waits for no other."""
        return self.position.op in (None, Op.DATA)


class HangTracker(Persistent):
    """Positions of the ranks of one job. Times are seconds of the heartbeats' clock."""

    _saved = ("_stays", "_first_steps", "_longest_s", "_longest_data_s", "_asked")
    _stays: dict[int, _Stay]
    _first_steps: dict[int, int]
    _asked: tuple[int, ...]

    def __init__(self) -> None:
        self._stays = {}
        self._first_steps = {}
        self._longest_s = self._longest_data_s = 0.0
        self._asked = ()

    def observe(self, rank: int, heartbeat: Heartbeat, now: float) -> None:
        """Note the position that a heartbeat carries, if any, and the stack."""
        position = heartbeat.position
        if position is None:
            return
        self._first_steps.setdefault(rank, position.step)
        since_s = now - position.for_s
        known = self._stays.get(rank)
        if known is not None and known.position.place == position.place:
            known.position, known.since_s = position, min(since_s, known.since_s)
        else:
            self.moved(rank, now - position.for_s)
            known = self._stays[rank] = _Stay(position, since_s)
        if heartbeat.stack:
            known.stack, known.collective = heartbeat.stack, heartbeat.collective

    def moved(self, rank: int, now: float) -> None:
        """Note that a rank makes progress, e.g. that records of it arrived."""
        stay = self._stays.pop(rank, None)
        if stay is None or not stay.is_suspect:
            return
        lasted_s = min(now - stay.since_s, _PAUSE_S)
        if stay.is_idle:
            self._longest_data_s = max(self._longest_data_s, lasted_s)
        else:
            self._longest_s = max(self._longest_s, lasted_s)

    @property
    def newest_step(self) -> int:
        """Newest step of a rank that has not moved since its last heartbeat; -1 without one."""
        return max((stay.position.step for stay in self._stays.values()), default=-1)

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

    def hangs(self, now: float, ranks: RankTable) -> Hangs:
        """The ranks of a layout that hang and do not merely wait for another rank."""
        self._asked = ()
        if not any(now - stay.since_s > _SHORTEST_S for stay in self._stays.values()):
            return Hangs()
        classes = dict(zip(ranks.ranks.tolist(), ranks.peers.tolist(), strict=True))
        stays = {rank: stay for rank, stay in self._stays.items() if rank in classes}
        busy = {rank: stay for rank, stay in stays.items() if not stay.position.waiting}
        nobody_waits = len(busy) == len(stays) and all(stay.is_idle for stay in busy.values())
        all_wait = not busy and len(stays) == ranks.size
        suspects = [
            rank
            for rank, stay in _without_excuse(stays if all_wait else busy, classes, now)
            if now - stay.since_s > self._time_out_s(rank, stay, nobody_waits=nobody_waits)
        ]
        return self._found(suspects, stays, ranks.size) if suspects else Hangs()

    def _time_out_s(self, rank: int, stay: _Stay, *, nobody_waits: bool) -> float:
        position = stay.position
        if position.op is None:
            return math.inf if nobody_waits else _PAUSE_S
        if nobody_waits or position.step == self._first_steps.get(rank):
            return _PAUSE_S
        shortest_s, longest_s = _SHORTEST_S, self._longest_s
        if position.op is Op.DATA:
            shortest_s, longest_s = _SHORTEST_DATA_S, self._longest_data_s
        return min(max(shortest_s, _FACTOR * longest_s), _PAUSE_S)

    def _found(self, suspects: Sequence[int], stays: Mapping[int, _Stay], size: int) -> Hangs:
        """The hangs of `suspects`. The ranks to be asked for their stacks are the first of these,
        and one that waits for them."""
        by_rank = {
            rank: Hang(stay.position, stay.since_s, stay.stack, stay.collective)
            for rank, stay in ((rank, stays[rank]) for rank in suspects)
        }
        others = {rank: stay for rank, stay in stays.items() if rank not in by_rank}
        waiting = min((r for r, stay in others.items() if stay.position.waiting), default=None)
        asked = [*sorted(suspects)[:_MOST_STACKS], *([] if waiting is None else [waiting])]
        self._asked = tuple(rank for rank in asked if not stays[rank].stack)
        places = [stay.position for stay in others.values()]
        steps = {hang.position.step for hang in by_rank.values()}
        told = "" if waiting is None else stays[waiting].collective
        return Hangs(
            by_rank=by_rank,
            named=len(suspects) == 1 or 2 * len(suspects) <= size,
            others={step: _others(places, step) for step in steps},
            waiting=(waiting, told) if waiting is not None and told else None,
        )

    def asked_stacks(self) -> tuple[int, ...]:
        """Ranks whose stacks are asked for: few of those that hang, and one that waits for them."""
        return self._asked


def _without_excuse(
    stays: Mapping[int, _Stay], classes: Mapping[int, int], now: float
) -> list[tuple[int, _Stay]]:
    """Stays of ranks that neither are ahead of another one nor may wait for one."""
    step = min((stay.position.step for stay in stays.values()), default=0)
    rear = [(classes[rank], stay) for rank, stay in stays.items() if stay.position.step == step]
    fewest: dict[int, int] = {}
    for kind, stay in rear:
        fewest[kind] = min(fewest.get(kind, stay.position.passes), stay.position.passes)
    idle: dict[int, int] = {}
    for kind, stay in rear:
        if stay.is_idle:
            idle[kind] = min(idle.get(kind, stay.position.passes), stay.position.passes)
    found = []
    for rank, stay in stays.items():
        position, kind = stay.position, classes[rank]
        is_excused = (
            now - stay.since_s <= _SHORTEST_S
            or position.step > step
            or position.passes > fewest[kind]
            or (
                not stay.is_idle
                and any(
                    other != kind or passes <= position.passes for other, passes in idle.items()
                )
            )
        )
        stay.is_suspect = position.op is not None and not is_excused
        if not is_excused:
            found.append((rank, stay))
    return found


def _others(places: Iterable[TrainingPosition], step: int) -> str:
    """Number and places of ranks that wait for one in `step`.

    >>> waiting = TrainingPosition(step=9, op=Op.COLLECTIVE, waiting=True)
    >>> _others([waiting] * 3, 9)
    '3 other ranks wait in a collective of the same step'
    >>> _others([waiting, waiting, TrainingPosition(step=8, op=Op.BACKWARD, waiting=True)], 8)
    '3 other ranks wait: 2 in a collective of step 9 and 1 for others in backward of the same step'
    """
    counts = Counter(_place(position, step) for position in places)
    total = counts.total()
    if not total:
        return ""
    lead = f"{plural(total, 'other rank')} {'waits' if total == 1 else 'wait'}"
    if len(counts) == 1:
        return f"{lead} {next(iter(counts))}"
    parts = [f"{count} {place}" for place, count in counts.most_common(_MOST_PLACES)]
    left = total - sum(count for _, count in counts.most_common(_MOST_PLACES))
    return f"{lead}: {listed([*parts, f'{left} elsewhere'] if left else parts)}"


def _place(position: TrainingPosition, step: int) -> str:
    if position.op is None:
        where = "outside of all timed blocks"
    elif position.op in _EXCHANGES:
        where = _EXCHANGES[position.op]
    else:
        where = f"{'for others ' if position.waiting else ''}in {position.op.name.lower()}"
    return f"{where} of {'the same step' if position.step == step else f'step {position.step}'}"
