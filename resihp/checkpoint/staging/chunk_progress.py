"""How far each chunk of a checkpoint is on its way out of the optimizer's reach."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum


class ChunkState(IntEnum):
    """Of one chunk. From ORDERED on, but for STRAIGHT, its tensors may change."""

    OPEN = 0
    """Nobody has begun."""
    COPYING = 1
    """Somebody copies it, or the edges of it, into the buffer."""
    ZERO_COPY = 2
    """A level writes it from the tensors' own memory."""
    ORDERED = 3
    """Its copy is under way on the device."""
    COPIED = 4
    """The buffer holds it."""
    STORED = 5
    """The level that wrote it from the tensors' own memory is done; the buffer lacks it."""


class ChunkProgress:
    """The stages of all chunks. Not guarded by a lock of its own.

    copied   chunks from the first one on that the buffer holds without a gap
    copying  chunks that somebody is putting into the buffer now
    safe     chunks whose tensors may change
    """

    def __init__(self, count: int) -> None:
        self._stages = [ChunkState.OPEN] * count
        self._low, self._high = 0, count
        self.copied = self.copying = self.safe = 0

    def __getitem__(self, number: int) -> ChunkState:
        return self._stages[number]

    def set(self, number: int, stage: ChunkState) -> None:
        """Move one chunk."""
        stages = self._stages
        self.safe += (stage >= ChunkState.ORDERED) - (stages[number] >= ChunkState.ORDERED)
        self.copying += (stage is ChunkState.COPYING) - (stages[number] is ChunkState.COPYING)
        stages[number] = stage
        if stage is ChunkState.OPEN:
            self._low, self._high = min(self._low, number), max(self._high, number + 1)
        while self.copied < len(stages) and stages[self.copied] is ChunkState.COPIED:
            self.copied += 1

    def first_open(self) -> int | None:
        """The lowest chunk that nobody has begun."""
        while self._low < self._high and self._stages[self._low] is not ChunkState.OPEN:
            self._low += 1
        return self._low if self._low < self._high else None

    def last_open(self) -> int | None:
        """The highest chunk that nobody has begun."""
        while self._low < self._high and self._stages[self._high - 1] is not ChunkState.OPEN:
            self._high -= 1
        return self._high - 1 if self._low < self._high else None

    def first_unsafe(self, among: Iterable[int]) -> int | None:
        """The first of these that somebody has yet to copy, in the place of a level if need be."""
        waiting = (ChunkState.OPEN, ChunkState.ZERO_COPY)
        return next((number for number in among if self._stages[number] in waiting), None)

    def are_safe(self, among: Iterable[int]) -> bool:
        """Whether the tensors of these may change."""
        return all(self._stages[number] >= ChunkState.ORDERED for number in among)

    @property
    def beyond_buffer(self) -> bool:
        """Whether any chunk was written, or is about to be, that the buffer lacks."""
        return any(stage in (ChunkState.ZERO_COPY, ChunkState.STORED) for stage in self._stages)

    def reopen(self) -> None:
        """Begin anew with what was written, or was about to be, past the buffer."""
        for number, stage in enumerate(self._stages):
            if stage in (ChunkState.ZERO_COPY, ChunkState.STORED):
                self.set(number, ChunkState.OPEN)
