"""Jobs that go back to an earlier step, as from a checkpoint, with nobody telling the detector."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from resihp.contracts import TelemetryBatch

from ..arrays import Bools, Ints, positions
from ..persistence import Persistent
from .digests import Digests, digests, record_marks
from .records import by_step, is_pass

REACH_STEPS = 100_000
"""Steps from the newest one beyond which a record is an error, or the job has moved there."""
_MESSAGES = 32
"""Messages of one rank that are kept; up to twice as many at times."""
_MOST_RECORDS, _RECORDS_OF_RANK = 1 << 20, 256
"""Records that are kept: the larger of a number and of one for each rank of the layout."""

DigestsOf = Callable[[int], tuple[Digests, Digests] | None]


class MessagesBehind(Persistent):
    """The last messages of the ranks that have gone back, to begin anew with after a restart.

    Ranks whose numbers of steps are off send such messages all the time: of each rank the last
    ones are kept, and the newest of all up to a number of records.
    """

    _saved = ("_messages", "_counts", "_records")
    _messages: deque[TelemetryBatch]

    def __init__(self, ranks: Ints) -> None:
        self._ranks = ranks
        self._most_records = max(_MOST_RECORDS, _RECORDS_OF_RANK * ranks.size)
        self.clear()

    def clear(self) -> None:
        """Forgets all messages."""
        self._messages, self._records = deque(), 0
        self._counts = np.zeros(self._ranks.size, np.int32)  # messages kept of each rank, at most

    def kept(self) -> list[TelemetryBatch]:
        """The messages in the order in which they came."""
        return list(self._messages)

    def add(self, message: TelemetryBatch) -> None:
        """Keeps a message of at least one record, all of ranks of the layout."""
        self._messages.append(message)
        self._records += len(message)
        self._counts[np.unique(positions(self._ranks, message.rank))] += 1
        if self._counts.max() >= 2 * _MESSAGES:
            self._drop_older()
        while self._records > self._most_records and len(self._messages) > 1:
            self._records -= len(self._messages.popleft())

    def _drop_older(self) -> None:
        """Drops what each rank sent before its last messages."""
        kept, counts = deque[TelemetryBatch](), np.zeros_like(self._counts)
        for message in reversed(self._messages):
            index = positions(self._ranks, message.rank)
            rows = counts[index] < _MESSAGES
            if rows.any():
                kept.appendleft(message if rows.all() else message.select(rows))
                counts[np.unique(index[rows])] += 1
        self._messages, self._counts = kept, counts
        self._records = sum(map(len, kept))


class Restarts(Persistent):
    """Finds the ranks that continue from an earlier step than messages overtake each other by, or
    from one out of reach of all ranks' newest; arrays over ranks.

    A rank does so in two messages running, the second of a later step, since one may be a
    repetition or an error. Messages of what is known count as none. Of another process than before
    the first message tells, by its earliest step: it may hold all steps up to where the job was.

    newest    newest step of each rank; -1 before its first record
    is_begun  ranks as which other processes work that have sent nothing yet
    """

    _saved = ("newest", "is_begun", "_begins_back", "_back", "_back_at", "_behind")

    def __init__(self, ranks: Ints) -> None:
        self._ranks, size = ranks, ranks.size
        self.newest = np.full(size, -1, np.int64)
        self.is_begun = np.zeros(size, bool)
        self._begins_back = np.zeros(size, bool)  # at an earlier step
        self._back = np.zeros(size, bool)
        self._back_at = np.full(size, -1, np.int64)
        self._behind = MessagesBehind(ranks)

    def observe(
        self, batch: TelemetryBatch, index: Ints, usable: Bools, lag: int, digests_of: DigestsOf
    ) -> None:
        """Takes a message, of which the `usable` records are of ranks at the positions `index`.

        lag         distance of steps by which messages overtake each other
        digests_of  of a step so far, and of another one before it; None where it is not known
        """
        newest, oldest = np.full(self.newest.size, -1, np.int64), self.newest.copy()
        np.maximum.at(newest, index[usable], batch.step[usable])
        np.minimum.at(oldest, index[usable], batch.step[usable])
        seen, latest = newest >= 0, int(self.newest.max())
        begins = seen & self.is_begun & (oldest + lag < self.newest)
        self._begins_back = (self._begins_back | begins) & (newest <= latest)
        self.is_begun &= ~seen
        begins = seen & self._begins_back
        back = seen & (newest + lag < self.newest)
        if latest >= 0:
            back |= seen & (np.abs(newest - latest) > REACH_STEPS)
        known = self._known_again(batch, index, usable, back & ~begins, digests_of)
        seen, back = seen & ~known, begins | (back & ~known)
        continues = begins | (back & (self._back_at >= 0) & (newest > self._back_at))
        self._back = np.where(seen, back & (continues | self._back), self._back)
        self._back_at = np.where(seen, np.where(back, newest, -1), self._back_at)
        self.newest = np.where(back, self.newest, np.maximum(self.newest, newest))
        if not (self._back_at >= 0).any():
            self._behind.clear()
        rows = usable & back[np.maximum(index, 0)]
        if rows.any():
            self._behind.add(batch.select(rows))

    def _known_again(
        self,
        batch: TelemetryBatch,
        index: Ints,
        usable: Bools,
        ranks: Bools,
        digests_of: DigestsOf,
    ) -> Bools:
        """Ranks, of those given, that have sent a message before: of each of its steps it holds the
        same passes, or, unless they go back already, none, but other records. Passes that take as
        long in every step tell nothing."""
        known = ranks.copy()
        rows = usable & ranks[np.maximum(index, 0)]
        for step, part in by_step(batch.select(rows)) if rows.any() else ():
            at = positions(self._ranks, part.rank)
            found = digests_of(step)
            if found is None:
                known[at] = False
                continue
            before, other = found
            now = digests(record_marks(part, is_pass(part.op)), at, ranks.size)
            same = (now == before) | ((now == 0) & (self._back_at < 0))
            same &= (before > 0) & (before != other)
            known[at] &= same[at]
        return known

    def messages(self, reporting: Bools) -> list[TelemetryBatch]:
        """The messages of the ranks that have gone back, if most of those that report have, of a
        mask; else none."""
        reporting = reporting & ((self.newest >= 0) | (self._back_at >= 0))
        most = 2 * np.count_nonzero(self._back & reporting) > np.count_nonzero(reporting)
        return self._behind.kept() if most else []
