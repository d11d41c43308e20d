"""From messages to whole steps: late, repeated, partial and out of order records sorted out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import COLUMNS, Op, TelemetryBatch

from .arrays import Bools, Ints
from .persistence import Persistent, State
from .rank_table import RankTable
from .settings import DetectorSettings

_BEHIND = 64
"""Messages from before the present steps that are kept, at least: two of every rank."""
_COMPUTE = (int(Op.FORWARD), int(Op.BACKWARD))
_LONGEST_MS = 1e12
"""No record lasts longer (32 years); what is beyond says as much, and does not overflow."""


@dataclass
class _OpenStep:
    parts: list[TelemetryBatch] = field(default_factory=list)
    keys: list[Ints] = field(default_factory=list)
    by_rank: dict[int, list[int]] = field(default_factory=dict)
    counts: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    opened_at: int = 0

    def known(self, members: list[int]) -> Ints:
        """Keys of the parts that hold records of these ranks: none but they can repeat theirs."""
        numbers = sorted({number for rank in members for number in self.by_rank.get(rank, ())})
        if not numbers:
            return np.empty(0, np.int64)
        return np.concatenate([self.keys[number] for number in numbers])

    def join(self) -> None:
        """Makes one part of all."""
        if len(self.parts) > 1:
            self.parts, self.keys = [TelemetryBatch.concat(self.parts)], [np.concatenate(self.keys)]
            self.by_rank = {rank: [0] for rank in self.by_rank}

    def add(self, part: TelemetryBatch, keys: Ints, members: list[int]) -> None:
        """Stores records that were not there yet."""
        for rank in members:
            self.by_rank.setdefault(rank, []).append(len(self.parts))
        self.parts.append(part)
        self.keys.append(keys)


class StepAssembler(Persistent):
    """Collects records until a step is whole, or will not become so.

    A step is whole when every rank that still reports has delivered as many compute records as
    the quotas (or, once seen, the job's own habit) say; a record of a later step proves nothing,
    for messages overtake each other. It is decided incomplete when some rank
    has moved on by `lag_steps` steps in as many messages. The outcome does not depend on how the
    records were cut into messages: they are put into one canonical order.
    """

    _saved = (
        "_open",
        "_habit",
        "_habit_known",
        "_messages",
        "_silent",
        "_decided",
        "_newest",
        "_back",
        "_back_at",
        "_behind",
        "counters",
    )
    _open: dict[int, _OpenStep]
    _behind: deque[TelemetryBatch]

    def __init__(
        self, places: RankTable, quotas: tuple[int, ...], chunks: int, settings: DetectorSettings
    ) -> None:
        self._places = places
        self._settings = settings
        self._most = max(quotas)
        self._contract = np.array(quotas, np.int64)[places.dp] * chunks * len(_COMPUTE)
        self._habit = self._contract.copy()
        self._habit_known = False
        self._open = {}
        self._messages = np.zeros(places.size, np.int64)
        self._silent = np.zeros(places.size, np.int64)
        self._decided = -1
        self._newest = np.full(places.size, -1, np.int64)
        self._back = np.zeros(places.size, bool)
        self._back_at = np.full(places.size, -1, np.int64)
        self._behind = deque(maxlen=max(_BEHIND, 2 * places.size))
        self.counters = {"foreign": 0, "late": 0, "repeated": 0}

    @property
    def silent(self) -> Ints:
        """Decided steps since the last one in which each rank had a record."""
        return self._silent

    def add(self, batch: TelemetryBatch) -> list[TelemetryBatch]:
        """Takes a message; returns the steps that it completes, in order."""
        index = self._places.index(batch.rank.astype(np.int64))
        usable = index >= 0
        self.counters["foreign"] += int(np.count_nonzero(~usable))
        self._look_back(batch, index, usable)
        late = usable & (batch.step <= self._decided)
        self.counters["late"] += int(np.count_nonzero(late))
        usable &= ~late
        if not usable.all():
            batch, index = batch.select(usable), index[usable]
        self._messages[np.unique(index)] += 1
        self._silent[np.unique(index)] = 0
        for step in np.unique(batch.step).tolist():
            rows = batch.step == step
            self._put(step, batch if rows.all() else batch.select(rows), index[rows])
        return self._decide()

    def _look_back(self, batch: TelemetryBatch, index: Ints, usable: Bools) -> None:
        """Notes ranks that go on from further back than messages overtake each other: two of
        theirs running, the second of a later step, since one may be a repetition."""
        newest = np.full(self._places.size, -1, np.int64)
        np.maximum.at(newest, index[usable], batch.step[usable])
        there = newest >= 0
        back = there & (newest + self._settings.lag_steps < self._newest)
        goes_on = back & (self._back_at >= 0) & (newest > self._back_at)
        self._back = np.where(there, back & (goes_on | self._back), self._back)
        self._back_at = np.where(there, np.where(back, newest, -1), self._back_at)
        self._newest = np.where(back, self._newest, np.maximum(self._newest, newest))
        if not (self._back_at >= 0).any():
            self._behind.clear()
        rows = usable & back[np.maximum(index, 0)]
        if rows.any():
            self._behind.append(batch.select(rows))

    def restart(self) -> list[TelemetryBatch]:
        """What most of the ranks that report have sent since they went back to an earlier step,
        as jobs do that start again from a checkpoint; empty if they have not."""
        reporting = (self._newest >= 0) & (self._silent < self._settings.silent_steps)
        most = 2 * np.count_nonzero(self._back & reporting) > np.count_nonzero(reporting)
        return list(self._behind) if most and self._behind else []

    def _put(self, step: int, part: TelemetryBatch, index: Ints) -> None:
        opened = self._open.get(step)
        if opened is None:
            opened = _OpenStep(opened_at=int(self._messages.max()))
            opened.counts = np.zeros(self._places.size, np.int64)
            self._open[step] = opened
        keys = _keys(part, index)
        _, first = np.unique(keys, return_index=True)
        members = np.unique(index).tolist()
        known = opened.known(members)
        fresh = first[~np.isin(keys[first], known)] if known.size else first
        self.counters["repeated"] += int(keys.size - fresh.size)
        if not fresh.size:
            return
        part, index, keys = part.select(fresh), index[fresh], keys[fresh]
        opened.add(part, keys, members)
        compute = np.isin(part.op, _COMPUTE)
        opened.counts += np.bincount(index[compute], minlength=self._places.size)

    def _decide(self) -> list[TelemetryBatch]:
        steps = []
        while self._open:
            step = min(self._open)
            opened = self._open[step]
            if not (self._whole(opened) or self._overdue(opened)):
                break
            del self._open[step]
            steps.append(self._close(step, opened))
        return steps

    def _whole(self, opened: _OpenStep) -> bool:
        wanted = np.where(self._silent < self._settings.silent_steps, self._habit, 0)
        return bool((opened.counts >= wanted).all() and opened.counts.any())

    def _overdue(self, opened: _OpenStep) -> bool:
        if len(self._open) > self._settings.max_open_steps:
            return True
        lag = self._settings.lag_steps
        messages = int(self._messages.max()) - opened.opened_at
        return len(self._open) > lag and messages >= lag

    def _close(self, step: int, opened: _OpenStep) -> TelemetryBatch:
        self._decided = step
        present = opened.counts > 0
        self._silent = np.where(present | (self._habit == 0), 0, self._silent + 1)
        if present.any():
            seen = np.minimum(opened.counts, self._contract)
            grown = np.maximum(self._habit, seen) if self._habit_known else seen
            self._habit = np.where(present, grown, self._habit)
            self._habit_known = True
        if not opened.parts:
            return TelemetryBatch.empty()
        whole = TelemetryBatch.concat(opened.parts)
        whole = whole.select(np.argsort(np.concatenate(opened.keys), kind="stable"))
        replica = self._places.dp[self._places.index(whole.rank.astype(np.int64))]
        number = numbered(replica, whole.microbatch, self._most).astype(np.int32)
        times = np.minimum(whole.compute_ms, _LONGEST_MS)
        return replace(whole, microbatch=number, compute_ms=times)

    def state(self) -> State:
        """The saved attributes, the parts of each open step joined."""
        for opened in self._open.values():
            opened.join()
        return super().state()


def _keys(part: TelemetryBatch, index: Ints) -> Ints:
    """One number for each record: equal for the same record sent twice, and its sort key.

    Several transfers of one microbatch may differ in nothing but their time, so for those the
    time is part of the identity.
    """
    assert set(COLUMNS) >= {"rank", "op", "microbatch", "chunk"}
    key = (index << 3) | part.op
    key = (key << 20) | ((part.microbatch.astype(np.int64) + 1) & 0xFFFFF)
    key = (key << 12) | (part.chunk.astype(np.int64) & 0xFFF)
    other = ~np.isin(part.op, _COMPUTE)
    if other.any():
        bits = part.compute_ms[other].view(np.int64) * np.int64(0x9E3779B97F4A7C1 | 1)
        wait = np.nan_to_num(part.wait_ms[other], nan=-1.0).view(np.int64)
        mixed = (bits ^ (wait * 31) ^ part.peer[other]) & 0xFFFF_FFFF
        key[other] = ((index[other] << 35) | mixed) | (np.int64(1) << 62)
    return key


def numbered(parts: Ints, microbatch: NDArray[np.integer], usual: int) -> Ints:
    """The microbatches of each part (a step of a replica) numbered from 0 in their order.

    Some trainers count them through the whole job, and a broken record may hold any number.
    Where all are below `usual`, how many a replica computes in a step, they stay as they are;
    -1 (of no microbatch) always does.

    >>> numbered(np.array([0, 0, 1, 1, 1]), np.array([70, 71, 72, -1, 70]), 2).tolist()
    [0, 1, 1, -1, 0]
    """
    number: Ints = microbatch.astype(np.int64)
    some = number >= 0
    if int(number.max(initial=-1)) < usual:
        return number
    key = (parts[some] << 32) | number[some]
    distinct, at = np.unique(key, return_inverse=True)
    part = distinct >> 32
    position = np.arange(distinct.size) - np.searchsorted(part, part)
    number[some] = position[at.reshape(-1)]
    return number
