"""Progress of a checkpoint's chunks, from the tensors to the buffer or to storage."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum


class ChunkState(IntEnum):
    """State of one chunk. From ORDERED on its tensors may change."""

    OPEN = 0
    """Not begun."""
    COPYING = 1
    """A thread is copying it, or its edges, into the buffer."""
    ZERO_COPY = 2
    """A level is writing it from the tensors' own memory."""
    ORDERED = 3
    """Its copy has been submitted to the device's stream."""
    COPIED = 4
    """The buffer holds it."""
    STORED = 5
    """A level has written it from the tensors' own memory; the buffer does not hold it."""


class ChunkProgress:
    """States of all chunks of a checkpoint; callers hold the checkpoint's lock.

    copied   length of the prefix of chunks that the buffer holds
    copying  number of chunks in state COPYING
    safe     number of chunks whose tensors may change
    """

    def __init__(self, count: int) -> None:
        self._states = [ChunkState.OPEN] * count
        self._low, self._high = 0, count
        self.copied = self.copying = self.safe = 0

    def __getitem__(self, number: int) -> ChunkState:
        return self._states[number]

    def set(self, number: int, state: ChunkState) -> None:
        """Set the state of one chunk."""
        states = self._states
        self.safe += (state >= ChunkState.ORDERED) - (states[number] >= ChunkState.ORDERED)
        self.copying += (state is ChunkState.COPYING) - (states[number] is ChunkState.COPYING)
        states[number] = state
        if state is ChunkState.OPEN:
            self._low, self._high = min(self._low, number), max(self._high, number + 1)
        while self.copied < len(states) and states[self.copied] is ChunkState.COPIED:
            self.copied += 1

    def first_open(self) -> int | None:
        """Return the lowest open chunk."""
        while self._low < self._high and self._states[self._low] is not ChunkState.OPEN:
            self._low += 1
        return self._low if self._low < self._high else None

    def last_open(self) -> int | None:
        """Return the highest open chunk."""
        while self._low < self._high and self._states[self._high - 1] is not ChunkState.OPEN:
            self._high -= 1
        return self._high - 1 if self._low < self._high else None

    def first_uncopied(self, among: Iterable[int]) -> int | None:
        """Return the first of these chunks that the fence may copy, also in place of a level."""
        waiting = (ChunkState.OPEN, ChunkState.ZERO_COPY)
        return next((number for number in among if self._states[number] in waiting), None)

    def are_safe(self, among: Iterable[int]) -> bool:
        """Return True if the tensors of these chunks may change."""
        return all(self._states[number] >= ChunkState.ORDERED for number in among)

    @property
    def bypasses_buffer(self) -> bool:
        """True if any chunk has been, or is being, written without the buffer."""
        return any(state in (ChunkState.ZERO_COPY, ChunkState.STORED) for state in self._states)

    def reopen(self) -> None:
        """Reopen the chunks that have been, or are being, written without the buffer."""
        for number, state in enumerate(self._states):
            if state in (ChunkState.ZERO_COPY, ChunkState.STORED):
                self.set(number, ChunkState.OPEN)
