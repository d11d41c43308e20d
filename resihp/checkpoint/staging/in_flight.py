"""A checkpoint in flight: its progress through the host cache, and its readers.

Copying, reading and the next checkpoint's copying follow each other through the cache chunk by
chunk: a level may read a chunk once it is copied, and another chunk may take its block once every
level has read it. A cache of one image of the state is therefore enough while the disk keeps up,
and a smaller one passes the state through at the pace of storage.

A level that writes from the tensors' own memory makes the copy unnecessary: chunks written before
the fence are never copied; a chunk being written at the fence is copied and written again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from threading import Condition, Event, Lock

from torch import Tensor

from ..format.checksum import checksum
from ..format.index import FileIndex, IndexEntry, spans
from ..format.shard_file import ShardFile
from ..history import Lineage
from ..providers import TensorSource
from .host_cache import HostCache

EncodeObjects = Callable[[int], tuple[tuple[IndexEntry, ...], bytes]]
"""Encodes the object section from a file offset; returns its entries and its bytes."""


class CheckpointAbandoned(Exception):  # noqa: N818
    """Ends a checkpoint without an error of its own. Never leaves this package."""


class ChunkState(IntEnum):
    """State of one chunk. From ORDERED on its tensors may change."""

    OPEN = 0
    """Not begun."""
    COPYING = 1
    """A thread is copying it into its block, or its edges elsewhere."""
    ZERO_COPY = 2
    """A level is writing it from the tensors' own memory."""
    ORDERED = 3
    """Its copy has been submitted to the device's stream."""
    COPIED = 4
    """Its block holds it, until all levels have read it."""
    STORED = 5
    """A level has written it from the tensors' own memory; no block holds it."""


_IN_COPY = (ChunkState.COPYING, ChunkState.ORDERED)
"""States in which a copy may still write into the chunk's block."""


class ChunkProgress:
    """States of all chunks of a checkpoint; callers hold the checkpoint's lock.

    copied  length of the prefix of chunks that have been copied
    safe    number of chunks whose tensors may change
    """

    def __init__(self, count: int) -> None:
        self._states = [ChunkState.OPEN] * count
        self._low, self._high = 0, count
        self.copied = self.safe = 0

    def __getitem__(self, number: int) -> ChunkState:
        return self._states[number]

    def set(self, number: int, state: ChunkState) -> None:
        """Set the state of one chunk."""
        states = self._states
        self.safe += (state >= ChunkState.ORDERED) - (states[number] >= ChunkState.ORDERED)
        states[number] = state
        if state is ChunkState.OPEN:
            self._low, self._high = min(self._low, number), max(self._high, number + 1)
            self.copied = min(self.copied, number)
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

    @property
    def bypasses_cache(self) -> bool:
        """True if any chunk has been, or is being, written from the tensors."""
        return any(state in (ChunkState.ZERO_COPY, ChunkState.STORED) for state in self._states)


@dataclass(frozen=True)
class ShardIdentity:
    """One rank's part of one checkpoint."""

    step: int
    rank: int
    lineage: Lineage
    ranks: tuple[int, ...]


@dataclass(eq=False)
class InFlightCheckpoint:
    """A checkpoint on its way through the host cache.

    All state is guarded by `changed`; the encoded objects have a lock of their own.

    objects    encodes the objects, as they were at `save`
    pace       forecast for the one level that writes from the tensors' own memory; None: copy all
    hurry      set while training waits at the fence
    receivers  names of the levels that receive it as it is copied
    agreed     those into which every rank puts it; None: not known yet
    taken      for each level, the length of the prefix of chunks that it no longer needs
    uploads    number of levels that read the disk level's file
    stored     descriptor of that file, open while one of them needs it
    blocks     for each chunk that is in the cache, or on its way there, its block
    sums       checksums of chunks, as far as they are known
    kept       levels that keep every chunk after their `put` has returned
    """

    identity: ShardIdentity
    file: ShardFile
    cache: HostCache
    sources: Sequence[TensorSource]
    objects: EncodeObjects
    changed: Condition
    begun_s: float = field(default_factory=time.monotonic)
    pace: Pace | None = None
    hurry: Event = field(default_factory=Event)
    problem: BaseException | None = None
    receivers: frozenset[str] = frozenset()
    agreed: frozenset[str] | None = None
    taken: dict[str, int] = field(default_factory=dict)
    uploads: int = 0
    stored: int | None = None

    def __post_init__(self) -> None:
        self.progress = ChunkProgress(self.count)
        self.blocks: dict[int, int] = {}
        self.sums: dict[int, int] = {}
        self.kept: set[str] = set()
        self._returned, self._encoding = 0, Lock()
        self._objects: tuple[tuple[IndexEntry, ...], bytes] | None = None

    @property
    def count(self) -> int:
        """Number of chunks in the tensor section."""
        return len(self.file.chunks)

    @property
    def streams(self) -> bool:
        """True if the cache is smaller than the state, so that chunks have to leave it in time.

        Copies then follow the order in which levels read, or chunks that none can use fill it.
        """
        return self.count > self.cache.capacity

    @property
    def is_safe(self) -> bool:
        """True if the state may change."""
        return self.progress.safe == self.count

    @property
    def is_idle(self) -> bool:
        """True once it has ended and no level and no block belongs to it."""
        has_ended = self.is_safe or self.problem is not None
        return has_ended and not self.taken and not self.blocks

    @property
    def released(self) -> int:
        """Length of the prefix of chunks that no level needs any more."""
        return min(self.taken.values(), default=self.count)

    def released_within(self, window_s: float) -> bool:
        """Return True if, at the pace so far, all chunks will be released in `window_s`."""
        ahead, taken = self.count - self.released, self.released
        if self.problem is not None or not self.is_safe or not taken:
            return False
        return (time.monotonic() - self.begun_s) / taken * ahead <= window_s

    def has_room(self, chunk: int) -> bool:
        """Return True if a chunk has a block or could take one."""
        return chunk in self.blocks or self.cache.free > 0

    def claim(self, chunk: int) -> bool:
        """Take a block for a chunk, and mark it as being copied; False if none is free."""
        if chunk not in self.blocks:
            block = self.cache.take()
            if block is None:
                return False
            self.blocks[chunk] = block
        self.progress.set(chunk, ChunkState.COPYING)
        return True

    def claim_image(self) -> Tensor:
        """Take adjacent blocks for all chunks of an idle cache; returns the image of the file."""
        with self.changed:
            assert self.cache.is_idle
            assert not self.streams
            for number in range(self.count):
                block = self.cache.take()
                assert block == number, "an idle cache lends its blocks in order"
                self.blocks[number] = block
            return self.cache.tensor(0, self.count)

    def move(self, chunk: int, state: ChunkState) -> None:
        """Set the state of a chunk and notify all waiting threads."""
        with self.changed:
            self.progress.set(chunk, state)
            if state is ChunkState.OPEN:
                self._put_back(chunk)
            self._put_back_released()
            self.changed.notify_all()

    def abandon(self, problem: BaseException) -> None:
        """End the checkpoint; its levels get `problem`, or an earlier one, from `take`."""
        with self.changed:
            self.problem = self.problem or problem
            self.changed.notify_all()

    def settle(self, levels: Iterable[str]) -> None:
        """Record the levels into which every rank puts this checkpoint."""
        with self.changed:
            self.agreed = frozenset(levels)
            self.changed.notify_all()

    def await_agreement(self, level: str) -> None:
        """Wait until all ranks are known to put this checkpoint into a level.

        For a level that stores each rank's file by itself: before it drops an older one for this
        one. Raises the problem that ended the checkpoint, or `CheckpointAbandoned`.
        """
        with self.changed:
            self.changed.wait_for(lambda: self.agreed is not None or self.problem is not None)
            if self.problem is not None:
                raise self.problem
            if self.agreed is None or level not in self.agreed:
                raise CheckpointAbandoned("not every rank puts it there")

    def take(self, chunk: int) -> None:
        """Wait until a chunk is copied. Raises the problem that ended the checkpoint."""
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
            if not self.taken and not self.is_safe:
                self.problem = self.problem or CheckpointAbandoned("no level needs it any more")
            self._put_back_released()
            self.changed.notify_all()

    def leave(self, level: str) -> None:
        """Release the blocks on behalf of a level whose `put` has ended, unless it keeps them."""
        if level not in self.kept:
            self.done_with(level)

    def _put_back_released(self) -> None:
        """Return the blocks of released chunks, as far as no thread is copying into them."""
        states, stop = self.progress, self.released
        while self._returned < stop and states[self._returned] not in _IN_COPY:
            self._put_back(self._returned)
            self._returned += 1

    def _put_back(self, chunk: int) -> None:
        block = self.blocks.pop(chunk, None)
        if block is not None:
            self.cache.put_back(block)

    def hold_stored(self, path: Path) -> None:
        """Open a disk level's file for the levels that read it; one does if there are several."""
        with self.changed:
            if self.uploads and self.stored is None:
                self.stored = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def uploaded(self) -> None:
        """Close the disk level's file once the last level that reads it has ended."""
        with self.changed:
            self.uploads -= 1
            if not self.uploads and self.stored is not None:
                os.close(self.stored)
                self.stored = None

    def fall_back_to_copies(self, level: str) -> bool:
        """Give a level all chunks from the cache after the disk failed; True if that is possible.

        Chunks that are not in the cache, or for which it has no room, are copied again as long as
        the state cannot have changed.
        """
        with self.changed:
            was_direct, self.pace = self.pace is not None, None
            is_there = not self.released and not (
                was_direct and (self.streams or self.progress.bypasses_cache)
            )
            if not is_there and (self.hurry.is_set() or not self.sources):
                return False
            self.taken[level] = 0
            if not is_there:
                self._reopen()
            self.changed.notify_all()
            return True

    def _reopen(self) -> None:
        """Reopen the chunks that no block holds, and all if the cache is smaller than the state."""
        self._returned = 0
        for number in range(self.count):
            is_lost = number not in self.blocks or self.streams
            if is_lost and self.progress[number] not in _IN_COPY:
                self._put_back(number)
                self.progress.set(number, ChunkState.OPEN)

    def chunk(self, number: int) -> memoryview:
        """View the bytes of a copied chunk; valid until all levels have released it."""
        start, stop = self.file.chunks[number]
        return self.cache.view(self.blocks[number])[: stop - start]

    def checksum(self, number: int) -> int:
        """Checksum of a chunk in the cache, computed at the first call."""
        if number not in self.sums:
            self.sums[number] = checksum([self.chunk(number)])
        return self.sums[number]

    @property
    def section(self) -> bytes:
        """Bytes of the object section."""
        return self._encoded[1]

    def index(self) -> FileIndex:
        """Build the index of the file; every chunk must be stored, or in the cache."""
        objects, section = self._encoded
        view = memoryview(section)
        sums = [self.checksum(number) for number in range(self.count)]
        sums += [checksum([view[start:stop]]) for start, stop in spans(0, len(section))]
        me, nbytes = self.identity, self.file.nbytes
        return FileIndex(
            me.step, me.rank, me.lineage, me.ranks, self.file.entries, nbytes,
            objects, nbytes + len(section), tuple(sums),
        )  # fmt: skip

    @property
    def _encoded(self) -> tuple[tuple[IndexEntry, ...], bytes]:
        """Objects and their section, encoded by the first level that needs them."""
        with self._encoding:
            if self._objects is None:
                self._objects = self.objects(self.file.nbytes)
            return self._objects


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
