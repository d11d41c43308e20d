"""Bounded buffer between training threads and the sender."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from ._record import RecordFields
from ._spans import Span


class Buffer:
    """Accepts records from any thread and never blocks: one beyond `capacity` is dropped and
    counted.

    The newest record is the dropped one, so that a gap in the records is contiguous. `on_first` is
    called before the first record is kept, once per process: it starts the sender.
    """

    def __init__(self, capacity: int, on_first: Callable[[], None]) -> None:
        self.entries: deque[RecordFields | Span] = deque()
        self._capacity = capacity
        self._on_first = on_first
        self.reset()

    def reset(self) -> None:
        """Return to the initial state, empty."""
        self.entries.clear()
        self._limit = 0  # sends the first entry to the slow path, at no cost for the others
        self._state = "new"
        self._dropped = 0
        self._lock = threading.RLock()  # a signal's handler may close what it has interrupted

    def put(self, entry: RecordFields | Span) -> None:
        """Keep an entry, or count it as dropped."""
        if len(self.entries) < self._limit:
            self.entries.append(entry)
        else:
            self._put_slowly(entry)

    def open(self) -> None:
        """Start the sender, as the first entry does."""
        with self._lock:
            self._open()

    def drop(self, count: int) -> None:
        """Count records that were lost."""
        with self._lock:
            self._dropped += count

    def close(self) -> None:
        """Drop all entries from now on."""
        with self._lock:
            self._state, self._limit = "closed", 0

    @property
    def dropped(self) -> int:
        """Records lost so far."""
        return self._dropped

    def _put_slowly(self, entry: RecordFields | Span) -> None:
        with self._lock:
            self._open()
            if len(self.entries) < self._limit:
                self.entries.append(entry)
            else:
                self._dropped += 1

    def _open(self) -> None:
        if self._state == "new":
            self._state = "opening"
            self._on_first()
            if self._state == "opening":  # a signal's handler may have closed it
                self._state, self._limit = "open", self._capacity
