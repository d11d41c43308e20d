"""A checkpoint in flight: its progress through one host buffer, and its readers.

Copying, reading and the next checkpoint's copying follow each other through the buffer chunk by
chunk: a level may read a chunk once it is copied, and the next checkpoint may overwrite it once
every level has read it. A single buffer is therefore enough while the disk keeps up.

A level that writes from the tensors' own memory makes the copy unnecessary: chunks written before
the fence are never copied; a chunk being written at the fence is copied and written again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from threading import Condition, Event

from torch import Tensor

from ..format.checksum import checksum
from ..format.index import FileIndex, IndexEntry, spans
from ..format.shard_file import ShardFile
from ..history import Lineage
from .host_buffer import HostBuffer

EncodeObjects = Callable[[int], tuple[tuple[IndexEntry, ...], bytes]]
"""Encodes the object section from a file offset; returns its entries and its bytes."""


class CheckpointAbandoned(Exception):  # noqa: N818
    """Ends a checkpoint without an error of its own. Never leaves this package."""


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


@dataclass(eq=False)
class BufferSlot:
    """A buffer that is an image of `file`, with the current or last checkpoint in it."""

    buffer: HostBuffer
    file: ShardFile
    last: InFlightCheckpoint | None = None
    framed: set[int] = field(default_factory=set)

    def write_frames(self, chunk: int) -> None:
        """Write the archive frames of a chunk into the buffer, at its first use."""
        if chunk not in self.framed:
            start, stop = self.file.chunks[chunk]
            self.file.put_frames(chunk, self.buffer.tensor[start:stop])
            self.framed.add(chunk)


@dataclass(frozen=True)
class ShardIdentity:
    """One rank's part of one checkpoint."""

    step: int
    rank: int
    lineage: Lineage
    ranks: tuple[int, ...]


@dataclass(eq=False)
class InFlightCheckpoint:
    """A checkpoint on its way through a buffer slot. All state is guarded by `changed`.

    objects    encodes the objects, as they were at `save`
    pace       forecast for the one level that writes from the tensors' own memory; None: copy all
    hurry      set while training waits at the fence
    taken      for each level, the length of the prefix of chunks that it no longer needs
    uploads    number of levels that read the disk level's file
    stored     descriptor of that file, open while one of them needs it
    sums       checksums of chunks, as far as they are known
    kept       levels that keep every chunk after their `put` has returned
    previous   the checkpoint before in the same slot, while levels still read it there
    """

    identity: ShardIdentity
    file: ShardFile
    slot: BufferSlot
    sources: Sequence[Tensor]
    objects: EncodeObjects
    changed: Condition
    previous: InFlightCheckpoint | None = None
    begun_s: float = field(default_factory=time.monotonic)
    pace: Pace | None = None
    hurry: Event = field(default_factory=Event)
    problem: BaseException | None = None
    taken: dict[str, int] = field(default_factory=dict)
    uploads: int = 0
    stored: int | None = None

    def __post_init__(self) -> None:
        self.progress = ChunkProgress(self.count)
        self.sums: dict[int, int] = {}
        self.kept: set[str] = set()
        self.slot.last = self

    @property
    def count(self) -> int:
        """Number of chunks in the tensor section."""
        return len(self.file.chunks)

    @property
    def is_safe(self) -> bool:
        """True if the state may change."""
        return self.progress.safe == self.count

    @property
    def is_idle(self) -> bool:
        """True if the whole slot may be lent to another checkpoint."""
        is_ended = self.problem is not None and not self.progress.copying
        return (self.is_safe or is_ended) and not self.taken

    @property
    def released(self) -> int:
        """Length of the prefix of chunks that the next checkpoint may overwrite."""
        return min(self.taken.values(), default=self.count)

    def released_within(self, window_s: float) -> bool:
        """Return True if, at the pace so far, all chunks will be released in `window_s`."""
        ahead, taken = self.count - self.released, self.released
        if not self.is_safe or not taken:
            return False
        return (time.monotonic() - self.begun_s) / taken * ahead <= window_s

    def has_room(self, chunk: int) -> bool:
        """Return True if the checkpoint before has released this chunk of the buffer."""
        return self.previous is None or self.previous.released > chunk

    def move(self, chunk: int, state: ChunkState) -> None:
        """Set the state of a chunk and notify all waiting threads."""
        with self.changed:
            self.progress.set(chunk, state)
            if self.is_safe:
                self.previous = None
            self.changed.notify_all()

    def abandon(self, problem: BaseException) -> None:
        """End the checkpoint; its levels get `problem`, or an earlier one, from `take`."""
        with self.changed:
            self.problem = self.problem or problem
            self.changed.notify_all()

    def take(self, chunk: int) -> None:
        """Wait until the buffer holds a chunk. Raises the problem that ended the checkpoint."""
        with self.changed:
            while self.progress.copied <= chunk and self.problem is None:
                self.changed.wait()
            if self.problem is not None:
                raise self.problem

    def done_with(self, level: str, chunks: int | None = None) -> None:
        """Release the first `chunks` on behalf of a level; None: all, and for good."""
        with self.changed:
            if chunks is None:
                self.taken.pop(level, None)
            else:
                self.taken[level] = chunks
            self.changed.notify_all()

    def leave(self, level: str) -> None:
        """Release the buffer on behalf of a level whose `put` has ended, unless it keeps it."""
        if level not in self.kept:
            self.done_with(level)

    def uploaded(self) -> None:
        """Close the disk level's file once the last level that reads it has ended."""
        with self.changed:
            self.uploads -= 1
            if not self.uploads and self.stored is not None:
                os.close(self.stored)
                self.stored = None

    def fall_back_to_buffer(self) -> bool:
        """Stop writing from the tensors; return True if the buffer has or will have every chunk."""
        with self.changed:
            was_direct, self.pace = self.pace is not None, None
            if was_direct and self.progress.bypasses_buffer:
                if self.hurry.is_set() or not self.sources:
                    return False
                self.progress.reopen()
            self.changed.notify_all()
            return not self.released

    def chunk(self, number: int) -> memoryview:
        """View the bytes of a chunk in the buffer."""
        start, stop = self.file.chunks[number]
        return self.slot.buffer.view[start:stop]

    def checksum(self, number: int) -> int:
        """Checksum of a chunk in the buffer, computed at the first call."""
        if number not in self.sums:
            self.sums[number] = checksum([self.chunk(number)])
        return self.sums[number]

    @property
    def section(self) -> bytes:
        """Bytes of the object section."""
        return self._encoded[1]

    def index(self) -> FileIndex:
        """Build the index of the file; every chunk must be copied or stored."""
        objects, section = self._encoded
        view = memoryview(section)
        sums = [self.checksum(number) for number in range(self.count)]
        sums += [checksum([view[start:stop]]) for start, stop in spans(0, len(section))]
        me, nbytes = self.identity, self.file.nbytes
        return FileIndex(
            me.step, me.rank, me.lineage, me.ranks, self.file.entries, nbytes,
            objects, nbytes + len(section), tuple(sums),
        )  # fmt: skip

    @cached_property
    def _encoded(self) -> tuple[tuple[IndexEntry, ...], bytes]:
        return self.objects(self.file.nbytes)


@dataclass(frozen=True)
class Pace:
    """Forecast of a level that writes from the tensors until the fence.

    window_s   seconds from the start of the checkpoint to the fence
    durable_s  seconds that the level needed for the checkpoint before
    """

    window_s: float
    durable_s: float

    def nap_s(self, checkpoint: InFlightCheckpoint) -> float:
        """Seconds that the copy can wait; 0 if it must copy what the level will not write in time.

        The copy waits as long as possible, because it slows training more than a late copy does.
        """
        elapsed = time.monotonic() - checkpoint.begun_s
        left, safe = self.window_s - elapsed, checkpoint.progress.safe
        chunk_s = (
            elapsed / safe if safe >= _MIN_SAMPLES else self.durable_s / max(checkpoint.count, 1)
        )
        lacking = checkpoint.count - safe - _MARGIN * left / chunk_s
        spare_s = left - max(lacking, 0) * _COPY_S
        return 0.0 if spare_s <= 0 else min(max(spare_s / 4, _MIN_NAP_S), _MAX_NAP_S)


NO_FENCE_EXPECTED = Pace(window_s=1e6, durable_s=1.0)
"""Pace of a level that is expected to finish before any fence."""

_MIN_SAMPLES, _MARGIN = 16, 0.9
"""Chunks needed to measure the pace; fraction of the remaining time that is planned with."""

_COPY_S = 2e-3
"""Estimated seconds to copy a chunk into fresh memory; otherwise it takes a quarter."""

_MIN_NAP_S, _MAX_NAP_S = 1e-3, 0.05
