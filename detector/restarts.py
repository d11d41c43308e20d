"""The messages of a job that may have gone back to an earlier step, until it is known."""

from __future__ import annotations

from collections import deque

import numpy as np

from resihp.contracts import TelemetryBatch

from .arrays import Ints, positions
from .persistence import Persistent

_MESSAGES = 32
"""Messages of one rank that are kept; up to twice as many at times."""
_MOST_RECORDS, _RECORDS_OF_RANK = 1 << 20, 256
"""Records that are kept: the larger of a number and of one for each rank of the layout."""


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
