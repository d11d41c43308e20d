"""Bounded buffer between training threads and the sender."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._spans import Span

Row = tuple[Any, ...]
"""plan_version, step, microbatch, chunk, op, compute_ms, wait_ms, tokens, sequences, sum_sq_len,
max_len, peer."""


class Buffer:
    """Takes rows from any thread and never blocks: a row beyond `capacity` is dropped and counted.

    The newest row is the one dropped, so that what is sent has no holes but one. `on_first` is
    called with the first row: that is when the sender starts, also in a forked child.
    """

    def __init__(self, capacity: int, on_first: Callable[[], None]) -> None:
        self.rows: deque[Row | Span] = deque()
        self._capacity = capacity
        self._on_first = on_first
        self.reset()

    def reset(self) -> None:
        """Be empty, as new."""
        self.rows.clear()
        self._limit = 0  # sends the first row down the slow path, which costs the others nothing
        self._state = "new"
        self._dropped = 0
        self._lock = threading.Lock()

    def put(self, row: Row | Span) -> None:
        """Keep a row, or count it as dropped."""
        if len(self.rows) < self._limit:
            self.rows.append(row)
        else:
            self._put_slowly(row)

    def drop(self, count: int) -> None:
        """Count rows that were lost."""
        with self._lock:
            self._dropped += count

    def close(self) -> None:
        """Drop all rows that come from now on."""
        with self._lock:
            self._state, self._limit = "closed", 0

    @property
    def dropped(self) -> int:
        """Rows lost so far."""
        return self._dropped

    def _put_slowly(self, row: Row | Span) -> None:
        with self._lock:
            if self._state == "new":
                self._on_first()
                self._state, self._limit = "open", self._capacity
            if len(self.rows) < self._limit:
                self.rows.append(row)
            else:
                self._dropped += 1
