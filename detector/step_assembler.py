"""From messages to whole steps: late, repeated, partial and out of order records sorted out.

`StepProgress` decides which steps are whole, for everything that works step by step;
`StepAssembler` keeps the records of the open steps as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import Op, TelemetryBatch
from resihp.contracts.telemetry import COLUMNS

from .arrays import ODD, Bools, Ints, appended, positions
from .persistence import Persistent, State
from .rank_table import RankTable
from .restarts import MessagesBehind
from .step_digests import Digests, digests, record_marks

COMPUTE = (int(Op.FORWARD), int(Op.BACKWARD))
SILENT_STEPS = 3
"""Closed steps without a record after which a rank is no longer waited for."""
_LAG_STEPS = 3
"""Later steps, and later messages of one rank, after which a step is closed without the missing
records."""
_REACH_STEPS = 100_000
"""Steps from the newest one beyond which a record is an error, or the job has moved there."""
_ANY_STEP = (1 << 63) - 1
_LEAST_OPEN, _MOST_OPEN, _MOST_COUNTS = 256, _LAG_STEPS * 8_192, 1 << 20
"""Open steps beyond which the oldest one is closed: at least, and at most, which is as many as
there are in the messages that one rank may be ahead by; and the numbers of records of ranks in
them, which bound it between the two."""
_RECORD_BYTES = sum(dtype.itemsize for dtype, _ in COLUMNS.values()) + 8  # of its key
_MUCH_KEPT, _MOST_KEPT = (256 << 20) // _RECORD_BYTES, (1 << 30) // _RECORD_BYTES
"""Records kept of open steps: messages of many steps, as after an outage or where senders are asked
for fewer, open as many. Beyond the first number a step waits for one later message of a rank only:
where one is lost, the steps of three would be open. Beyond the second the oldest of more steps than
`_LAG_STEPS` is closed."""
_MOST_AHEAD = 128
"""Steps that ranks far ahead of most others may open by many messages."""
_HABIT_STEPS = 8
"""Closed steps whose numbers of records tell how many are to be waited for."""
_KNOWN_STEPS = 64
"""Closed steps that are known again when they are sent a second time."""
_SMALL_QUOTA = 4_096
"""Microbatches over which arrays are small, however few have a record."""
_SPARE, _FEW_CELLS = 4, 1 << 14
"""Microbatches of a step as a multiple of what ranks usually have, and passes of a step if every
rank had as many, up to which none is left out."""


def is_pass(op: NDArray[np.integer]) -> Bools:
    """Mask of the records of forward and backward passes."""
    result: Bools = (op == Op.FORWARD) | (op == Op.BACKWARD)
    return result


@dataclass
class _OpenStep:
    """Records of each rank so far and their digests, the number of messages when the step was
    opened, and the number of records that are kept until it is closed."""

    counts: Ints
    digests: Digests
    opened_at: int
    kept: int = 0


class StepProgress(Persistent):
    """Tracks which steps of a job are whole, by the records of each rank; arrays over ranks.

    A rank is done with a step once it has sent `expected` records of it (or, from the second step
    on, as many as it sent of any of the last `_HABIT_STEPS` steps, if these are fewer; its most of
    all steps, while further ones come late); a record of a later step proves nothing,
    for messages overtake each other. Without `expected` every record counts, and a rank is done
    once it has sent one of a later step. A step is whole when all ranks that still report are
    done with it. It is closed incomplete when some rank is ahead by `_LAG_STEPS` steps and as many
    messages, or one where many records are kept, unless most of the ranks that still send are in
    earlier steps: one whose numbers of steps are off does not decide for them. Numbers of steps may
    have gaps; but once a whole step has come after a later one, a step waits as long for those
    between it and the last. The caller passes each message to `admit`, then the records of each
    step to `count`, and takes the steps that `close` returns at the end, and before while it
    `is_full`: a message of thousands of steps opens few of them at a time.

    ranks     ranks of the layout, sorted
    expected  records of each rank and step; None where it is not known
    is_begun  ranks as which other processes work that have sent nothing yet
    late      records of the last message whose steps were closed before
    astray    records of the last message that are too far ahead of all other steps
    """

    _saved = (
        "silent", "_habit", "_counts", "_most", "_open", "_kept", "_closed", "_gap", "_fills",
        "_messages", "_heard_at", "_newest", "is_begun", "_begins_back", "_back", "_back_at",
        "_behind", "_taken",
    )  # fmt: skip
    _open: dict[int, _OpenStep]
    _taken: dict[int, Digests]

    def __init__(self, ranks: Ints, expected: Ints | None = None) -> None:
        size = ranks.size
        self.ranks, self._expected = ranks, expected
        self._habit = np.ones(size, np.int64) if expected is None else expected.copy()
        self._counts = np.empty((0, size), np.int32)  # of the last closed steps
        self._most = np.zeros(size, np.int64)
        self.silent = np.zeros(size, np.int64)
        self._open = {}
        self._kept = 0  # records of open steps
        self._closed, self._gap, self._fills = -1, 0, False
        self._messages = np.zeros(size, np.int64)
        self._heard_at = np.full(size, -1, np.int64)  # most messages of any rank by then
        self.late = self.astray = 0
        self._most_open = max(_LEAST_OPEN, min(_MOST_OPEN, _MOST_COUNTS // size))
        self._newest = np.full(size, -1, np.int64)
        self.is_begun = np.zeros(size, bool)
        self._begins_back = np.zeros(size, bool)  # at an earlier step
        self._back = np.zeros(size, bool)
        self._back_at = np.full(size, -1, np.int64)
        self._behind = MessagesBehind(ranks)
        self._taken = {}  # of the last closed steps

    @property
    def newest(self) -> int:
        """Newest step of which any rank has sent a record; -1 before the first."""
        return int(self._newest.max())

    @property
    def is_full(self) -> bool:
        """True if so many steps are open, or records kept, that `close` returns one of them."""
        is_most = self._kept > _MOST_KEPT and len(self._open) > _LAG_STEPS
        return is_most or len(self._open) > self._most_open

    def index(self, ranks: NDArray[np.integer]) -> Ints:
        """Positions of ranks; -1 for those that are not in the layout."""
        return positions(self.ranks, ranks)

    def expect(self, ranks: Iterable[int]) -> None:
        """Note that other processes work as these ranks now, perhaps from an earlier step on."""
        at = self.index(np.array(list(ranks), np.int64))
        self.is_begun[at[at >= 0]] = True

    def admit(self, batch: TelemetryBatch) -> TelemetryBatch:
        """The records of a message that belong to open steps of this layout."""
        index, newest = self.index(batch.rank), self.newest
        usable = index >= 0
        self._track_restart(batch, index, usable)
        behind = self._closed - batch.step
        # Also where they are late, or a rank that was late once would stay so for ever; but not
        # where they are so far away that no step can wait for them.
        near = usable & (np.abs(behind) <= self._reach(batch.step[usable]))
        self.silent[index[near]] = 0
        self._fills |= bool((usable & (behind > 0) & (behind < self._gap)).any())
        in_time = usable & (behind < 0)
        self.late = int(np.count_nonzero(usable & ~in_time))
        self._learn_late(index[near & ~in_time & is_pass(batch.op)])
        usable = in_time & (batch.step <= self._last_admitted(newest))
        self.astray = int(np.count_nonzero(in_time & ~usable))
        senders = np.unique(index[usable])
        self._messages[senders] += 1
        self._heard_at[senders] = self._messages.max()
        return batch if usable.all() else batch.select(usable)

    def _reach(self, steps: Ints) -> int:
        """Largest distance from the last closed step at which records of a message may still be in
        time, or the next ones of these ranks may: messages may be late by a few, and hold several
        steps each."""
        return _LAG_STEPS * max(self._gap, int(np.ptp(steps)) + 1 if steps.size else 1)

    def _last_admitted(self, newest: int) -> int:
        """Last step whose records are admitted, where `newest` was the newest one before. Ranks far
        ahead of most others open few steps, unless by large messages, as after an outage."""
        half = len(self._open) // 2
        if half >= _MOST_AHEAD // 2:
            middle = sorted(self._open)[half]
            sent = int(self._messages.max()) - self._open[middle].opened_at
            if sent >= _LAG_STEPS and self._is_ahead(middle):
                return max(self._open)
        return newest + _REACH_STEPS if newest >= 0 else _ANY_STEP

    def _is_ahead(self, step: int) -> bool:
        """True if most ranks that have sent since an open step was opened are in earlier ones."""
        sending = self._heard_at >= self._open[step].opened_at
        behind = np.count_nonzero(sending & (self._newest < step))
        return bool(2 * behind > np.count_nonzero(sending))

    def _track_restart(self, batch: TelemetryBatch, index: Ints, usable: Bools) -> None:
        """Finds ranks that continue from an earlier step than messages overtake each other by, or
        from one out of reach of all ranks' newest: in two messages running, the second of a later
        step, since one may be a repetition or an error. Messages of what is known count as none. Of
        another process than before the first message tells, by its earliest step: it may hold all
        steps up to where the job was."""
        newest, oldest = np.full(self.ranks.size, -1, np.int64), self._newest.copy()
        np.maximum.at(newest, index[usable], batch.step[usable])
        np.minimum.at(oldest, index[usable], batch.step[usable])
        seen, lag = newest >= 0, self._lag()
        begins = seen & self.is_begun & (oldest + lag < self._newest)
        self._begins_back = (self._begins_back | begins) & (newest <= self.newest)
        self.is_begun &= ~seen
        begins = seen & self._begins_back
        back = seen & (newest + lag < self._newest)
        if self.newest >= 0:
            back |= seen & (np.abs(newest - self.newest) > _REACH_STEPS)
        known = self._known_again(batch, index, usable, back & ~begins)
        seen, back = seen & ~known, begins | (back & ~known)
        continues = begins | (back & (self._back_at >= 0) & (newest > self._back_at))
        self._back = np.where(seen, back & (continues | self._back), self._back)
        self._back_at = np.where(seen, np.where(back, newest, -1), self._back_at)
        self._newest = np.where(back, self._newest, np.maximum(self._newest, newest))
        if not (self._back_at >= 0).any():
            self._behind.clear()
        rows = usable & back[np.maximum(index, 0)]
        if rows.any():
            self._behind.add(batch.select(rows))

    def _lag(self) -> int:
        """Distance of steps by which messages overtake each other, in numbers that have gaps."""
        return _LAG_STEPS * min((after - step for step, after in pairwise(self._taken)), default=1)

    def _known_again(
        self, batch: TelemetryBatch, index: Ints, usable: Bools, ranks: Bools
    ) -> Bools:
        """Ranks, of those given, that have sent a message before: of each of its steps it holds the
        same passes, or, unless they go back already, none, but other records. Passes that take as
        long in every step tell nothing."""
        known = ranks.copy()
        rows = usable & ranks[np.maximum(index, 0)]
        for step, part in by_step(batch.select(rows)) if rows.any() else ():
            at = self.index(part.rank)
            opened = self._open.get(step)
            before = self._taken.get(step) if opened is None else opened.digests
            if before is None:
                known[at] = False
                continue
            now = digests(record_marks(part, is_pass(part.op)), at, self.ranks.size)
            same = (now == before) | ((now == 0) & (self._back_at < 0))
            others = (taken for number, taken in reversed(self._taken.items()) if number != step)
            same &= (before > 0) & (before != next(others, 0))
            known[at] &= same[at]
        return known

    def restart(self) -> list[TelemetryBatch]:
        """The messages that most of the reporting ranks have sent since the job went back to an
        earlier step, as after a checkpoint is loaded, or far from the newest one, as where that was
        an error; empty if it has not.

        The caller then begins anew with these messages.
        """
        heard = (self._newest >= 0) | (self._back_at >= 0)
        reporting = heard & (self.silent < SILENT_STEPS)
        most = 2 * np.count_nonzero(self._back & reporting) > np.count_nonzero(reporting)
        return self._behind.kept() if most else []

    def count(self, step: int, index: Ints, marks: Ints, *, kept: int = 0) -> None:
        """Counts records of a step by the positions of their ranks and their `record_marks`, and
        those that the caller keeps until it is closed."""
        opened = self._open.get(step)
        if opened is None:
            size = self.ranks.size
            none, nothing = np.zeros(size, np.int64), np.zeros(size, np.uint32)
            opened = _OpenStep(none, nothing, int(self._messages.max()))
            self._open[step] = opened
        opened.counts += np.bincount(index, minlength=self.ranks.size)
        opened.digests += digests(marks, index, self.ranks.size)
        opened.kept += kept
        self._kept += kept

    def close(self, lost: Iterable[int] = (), *, at_end: bool = False) -> Iterator[int]:
        """Closes the steps that are whole or overdue, in order; `lost` ranks are not waited for,
        and `at_end` of all records none is."""
        waited = ~np.isin(self.ranks, list(lost))
        steps = sorted(self._open)
        for at, step in enumerate(steps):
            opened, late = self._open[step], at_end or self.is_full
            done = self._newest > step if self._expected is None else opened.counts >= self._habit
            whole = done[waited & (self.silent < SILENT_STEPS)].all() and opened.counts.any()
            whole &= not self._fills or step == self._closed + 1
            sent = int(self._messages.max()) - opened.opened_at
            if sent >= (1 if self._kept > _MUCH_KEPT else _LAG_STEPS):
                later = steps[at + _LAG_STEPS : at + _LAG_STEPS + 1]
                late |= bool(later) and not self._is_ahead(later[0])
            if not (whole or late):
                return
            del self._open[step]
            self._kept -= opened.kept
            self._taken[step] = opened.digests
            if len(self._taken) > _KNOWN_STEPS:
                del self._taken[next(iter(self._taken))]
            self._gap = step - self._closed if self._closed >= 0 else step + 1
            self._fills &= self._gap == 1
            self._closed, present = step, opened.counts > 0
            self.silent = np.where(present | (self._habit == 0), 0, self.silent + 1)
            if self._expected is not None and present.any():
                self._learn_habit(np.minimum(opened.counts, self._expected))
            yield step

    def _learn_habit(self, counts: Ints) -> None:
        """Takes the number of records of each rank in a closed step."""
        self._counts = appended(self._counts, counts, _HABIT_STEPS)
        self._most = np.maximum(self._most, counts)
        usual = self._counts.max(axis=0)
        self._habit = np.where(usual > 0, usual, self._habit)

    def _learn_late(self, index: Ints) -> None:
        """Takes that ranks have sent more records of a step than there were when it was closed."""
        index = index[self._most[index] > 0]
        if index.size:
            self._counts[-1, index] = self._habit[index] = self._most[index]


def by_step(batch: TelemetryBatch) -> Iterator[tuple[int, TelemetryBatch]]:
    """The records of each step, in the order of steps."""
    if (batch.step[1:] < batch.step[:-1]).any():
        batch = batch.select(np.argsort(batch.step, kind="stable"))
    starts = [0, *(np.flatnonzero(np.diff(batch.step)) + 1).tolist(), len(batch)]
    for start, stop in pairwise(starts):
        if start < stop:
            part = batch if stop - start == len(batch) else batch.select(slice(start, stop))
            yield int(part.step[0]), part


@dataclass
class KnownRecords:
    """Records of an open step by their keys, in parts; `by_rank` lists the parts of each rank. One
    that is sent twice is known the second time."""

    keys: list[Ints] = field(default_factory=list)
    by_rank: dict[int, list[int]] = field(default_factory=dict)

    def add(self, part: TelemetryBatch, index: Ints) -> Ints:
        """Adds records of ranks at these positions; the rows of those that are new, in order."""
        keys, members = _keys(part, index), np.unique(index).tolist()
        _, first = np.unique(keys, return_index=True)
        numbers = {number for rank in members for number in self.by_rank.get(rank, ())}
        if numbers:
            known = np.concatenate([self.keys[number] for number in numbers])
            first = first[~np.isin(keys[first], known)]
        new: Ints = np.sort(first)
        if new.size:
            for rank in members:
                self.by_rank.setdefault(rank, []).append(len(self.keys))
            self.keys.append(keys[new])
        return new

    def forget(self, ranks: Bools) -> None:
        """Forgets the records of the ranks of a mask."""
        self.keys = [keys[~ranks[_indices(keys)]] for keys in self.keys]

    def join(self) -> Ints:
        """Makes one part of all, however they came; the order of their rows in it."""
        keys = np.concatenate([np.empty(0, np.int64), *self.keys])
        order = np.argsort(keys, kind="stable")
        self.keys, self.by_rank = [keys[order]], {rank: [0] for rank in sorted(self.by_rank)}
        return order


@dataclass
class _OpenRecords:
    """Records of an open step in parts, those of `known`."""

    parts: list[TelemetryBatch] = field(default_factory=list)
    known: KnownRecords = field(default_factory=KnownRecords)

    def join(self) -> None:
        """Makes one part of all."""
        order = self.known.join()
        self.parts = [TelemetryBatch.concat(self.parts).select(order)] if self.parts else []


class StepAssembler(Persistent):
    """Collects the records of a layout's ranks into whole steps.

    The outcome does not depend on how the records were cut into messages: those of a step are put
    into one canonical order, and a record that is sent twice counts once. A broken rank may send
    thousands of microbatches of a step, and what is expected of a step takes time and memory by
    the largest number: those beyond all quotas and four times as many as ranks have in the step
    are left out, unless a step of so many is small.

    excess  records left out of the last step that was closed
    """

    _saved = ("progress", "_records")
    _records: dict[int, _OpenRecords]

    def __init__(self, places: RankTable, quotas: tuple[int, ...], chunks: int) -> None:
        self._places, self._largest_quota = places, max(quotas)
        each = chunks * len(COMPUTE)
        self._few = max(self._largest_quota, _FEW_CELLS // (places.size * each))
        expected = np.array(quotas, np.int64)[places.dp] * each
        self.progress = StepProgress(places.ranks, expected)
        self.excess = 0
        self._records = {}

    @property
    def silent(self) -> Bools:
        """Ranks without a record in the last closed steps."""
        return self.progress.silent >= SILENT_STEPS

    def add(self, batch: TelemetryBatch) -> Iterator[TelemetryBatch]:
        """Takes a message; the steps that it completes, in order. Each is closed when it is asked
        for, so that `silent` is as of that step."""
        for step, part in by_step(self.progress.admit(batch)):
            self._put(step, part)
            if self.progress.is_full:
                yield from self._close()
        yield from self._close()

    def finish(self) -> Iterator[TelemetryBatch]:
        """Closes all open steps, as nothing more is to come; in order, like `add`."""
        return self._close(at_end=True)

    def _close(self, *, at_end: bool = False) -> Iterator[TelemetryBatch]:
        for step in self.progress.close(at_end=at_end):
            yield self._assembled(self._records.pop(step))

    def _put(self, step: int, part: TelemetryBatch) -> None:
        opened = self._records.setdefault(step, _OpenRecords())
        index = self._places.index(part.rank)
        new = opened.known.add(part, index)
        fresh = part.select(new)
        passes = is_pass(fresh.op)
        if new.size:
            opened.parts.append(fresh)
        marks = record_marks(fresh, passes)
        self.progress.count(step, index[new][passes], marks[passes], kept=new.size)

    def _assembled(self, opened: _OpenRecords) -> TelemetryBatch:
        self.excess = 0
        if not opened.parts:
            return TelemetryBatch.empty()
        whole = TelemetryBatch.concat(opened.parts)
        whole = whole.select(np.argsort(np.concatenate(opened.known.keys), kind="stable"))
        index = self._places.index(whole.rank)
        # A number beyond all records, of a job of very many microbatches, tells nothing of a step.
        usual = min(self._largest_quota, max(_SMALL_QUOTA, len(whole)))
        number = numbered(self._places.dp[index], whole.microbatch, usual)
        if not np.array_equal(number, whole.microbatch):
            whole = replace(whole, microbatch=number.astype(np.int32))
        if int(number.max(initial=-1)) < self._few:
            return whole
        passes = is_pass(whole.op) & (number >= 0)
        rows = number < max(self._few, _SPARE * self._usual_count(index[passes], number[passes]))
        self.excess = int(np.count_nonzero(~rows))
        return whole.select(rows)

    def _usual_count(self, index: Ints, microbatch: Ints) -> int:
        """Median number of different microbatches of a rank, 0 for one without any."""
        distinct = np.unique((index << 32) | microbatch)
        return int(np.median(np.bincount(distinct >> 32, minlength=self._places.size)))

    def state(self) -> State:
        """The saved attributes, the parts of each open step joined."""
        for opened in self._records.values():
            opened.join()
        return super().state()


def _keys(part: TelemetryBatch, index: Ints) -> Ints:
    """One number for each record: equal for the same record sent twice, and its sort key.

    Several transfers of one microbatch may differ in nothing but their time, so that for those
    the time is part of the identity.
    """
    key = (index << 3) | part.op
    key = (key << 20) | ((part.microbatch.astype(np.int64) + 1) & 0xFFFFF)
    key = (key << 12) | (part.chunk.astype(np.int64) & 0xFFF)
    other = ~is_pass(part.op)
    if other.any():
        mixed = ((part.microbatch[other].astype(np.int64) << 32) ^ part.peer[other]).view(np.uint64)
        for name in ("compute_ms", "wait_ms", "start_ms"):
            value = np.nan_to_num(getattr(part, name)[other], nan=-1.0)
            mixed = (mixed ^ (mixed >> np.uint64(32)) ^ value.view(np.uint64)) * ODD
        place = (index[other] << 3) | part.op[other]
        key[other] = (place << 35) | (mixed >> np.uint64(29)).astype(np.int64)
        key[other] |= np.int64(1) << 62
    return key


def _indices(keys: Ints) -> Ints:
    """The positions of ranks that `_keys` was made of."""
    other = np.int64(1) << 62
    result: Ints = np.where(keys & other, (keys ^ other) >> 38, keys >> 35)
    return result


def numbered(parts: Ints, microbatch: NDArray[np.integer], usual: int) -> Ints:
    """The microbatches of each part (a step of a replica) numbered from 0 in their order, so that
    arrays over them stay as small as a step is.

    Some trainers number them through the whole job, and a broken record may hold any number.
    Where all are below `usual`, the microbatches of a replica in a step, they stay as they are; -1
    (of no microbatch) always does.

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
