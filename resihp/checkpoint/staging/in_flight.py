"""One checkpoint in one host buffer: how far it is copied, and who still reads it.

Copying, reading and the next checkpoint's copying chase each other through the buffer chunk by
chunk: a level may take a chunk once it is copied, the next checkpoint may overwrite it once every
level has taken it. So a single buffer is enough while the disk keeps up.

A level that reads tensors where they are (`views`) spares the copy: what it has written before the
fence is never copied; what it is writing then is copied, and written again from the buffer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Condition, Event

from torch import Tensor

from ..format.checksum import checksum
from ..format.index import FileIndex, IndexEntry, spans
from ..format.shard_file import ShardFile
from ..history import Lineage
from .chunk_progress import ChunkProgress, ChunkState
from .host_buffer import HostBuffer


class CheckpointAbandoned(Exception):  # noqa: N818
    """The checkpoint was given up; nobody is to blame. Never leaves this package."""


@dataclass(eq=False)
class BufferSlot:
    """A buffer that is an image of `file`, and the checkpoint that is, or was, last in it."""

    buffer: HostBuffer
    file: ShardFile
    last: InFlightCheckpoint | None = None
    framed: set[int] = field(default_factory=set)

    def frame(self, chunk: int) -> None:
        """Put in place what stands between tensors, for whoever fills the chunk first."""
        if chunk not in self.framed:
            start, stop = self.file.chunks[chunk]
            self.file.put_frames(chunk, self.buffer.tensor[start:stop])
            self.framed.add(chunk)


@dataclass(frozen=True)
class ShardIdentity:
    """Which checkpoint of which job, and which rank's part of it."""

    step: int
    rank: int
    lineage: Lineage
    ranks: tuple[int, ...]


@dataclass(eq=False)
class InFlightCheckpoint:
    """A checkpoint on its way through a slot. All state is guarded by `changed`.

    pace       how the only level, which writes straight from the tensors, is expected to get on
               until the fence; None: everything is copied
    hurry      set when training waits at the fence
    taken      for each level, chunks that it needs no more (a prefix of them all)
    uploads    levels that take the checkpoint from the disk level's file
    stored     descriptor of that file, open while one of them needs it
    previous   the checkpoint that was in the slot before and may still be read there
    """

    identity: ShardIdentity
    file: ShardFile
    slot: BufferSlot
    sources: Sequence[Tensor]
    objects: Callable[[int], tuple[tuple[IndexEntry, ...], bytes]]
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
        self._sums: dict[int, int] = {}
        self._kept: set[str] = set()
        self._section: tuple[tuple[IndexEntry, ...], bytes] | None = None
        self.slot.last = self

    @property
    def count(self) -> int:
        """Chunks of tensors."""
        return len(self.file.chunks)

    @property
    def is_safe(self) -> bool:
        """Whether the state may change again."""
        return self.progress.safe == self.count

    @property
    def is_idle(self) -> bool:
        """Whether the slot may be given to another checkpoint as a whole."""
        is_given_up = self.problem is not None and not self.progress.copying
        return (self.is_safe or is_given_up) and not self.taken

    @property
    def released(self) -> int:
        """Chunks that the next checkpoint may overwrite."""
        return min(self.taken.values(), default=self.count)

    def released_within(self, window_s: float) -> bool:
        """Whether, at the pace so far, every level will have taken everything by then."""
        ahead, taken = self.count - self.released, self.released
        if not self.is_safe or not taken:
            return False
        return (time.monotonic() - self.begun_s) / taken * ahead <= window_s

    def has_room(self, chunk: int) -> bool:
        """Whether nobody reads what was in the chunk's place before."""
        return self.previous is None or self.previous.released > chunk

    def move(self, chunk: int, stage: ChunkState) -> None:
        """A chunk has got further."""
        with self.changed:
            self.progress.set(chunk, stage)
            if self.is_safe:
                self.previous = None
            self.changed.notify_all()

    def veto(self, problem: BaseException) -> None:
        """Stop it whatever its state: another rank does not take part."""
        with self.changed:
            self.problem = self.problem or problem
            self.changed.notify_all()

    def take(self, chunk: int) -> None:
        """Wait until the buffer holds a chunk. Raises what ended the checkpoint instead."""
        with self.changed:
            while self.progress.copied <= chunk and self.problem is None:
                self.changed.wait()
            if self.problem is not None:
                raise self.problem

    def done_with(self, level: str, chunks: int | None = None) -> None:
        """The level needs the first `chunks` no more; None: it needs nothing any more."""
        with self.changed:
            if chunks is None:
                self.taken.pop(level, None)
            else:
                self.taken[level] = chunks
            self.changed.notify_all()

    def keep_for(self, level: str) -> None:
        """The level goes on to need every chunk after its `put` has returned."""
        self._kept.add(level)

    def leave(self, level: str) -> None:
        """The level's `put` has returned."""
        if level not in self._kept:
            self.done_with(level)

    def uploaded(self) -> None:
        """One of the levels that read the disk level's file has ended, or will not begin."""
        with self.changed:
            self.uploads -= 1
            if not self.uploads and self.stored is not None:
                os.close(self.stored)
                self.stored = None

    def fall_back_to_buffer(self) -> bool:
        """Write no more from the tensors; whether the buffer has, or will have, every chunk."""
        with self.changed:
            was_straight, self.pace = self.pace is not None, None
            if was_straight and self.progress.beyond_buffer:
                if self.hurry.is_set() or not self.sources:
                    return False
                self.progress.reopen()
            self.changed.notify_all()
            return not self.released

    def chunk(self, number: int) -> memoryview:
        """The bytes of a chunk in the buffer, as they go into the file."""
        start, stop = self.file.chunks[number]
        return self.slot.buffer.view[start:stop]

    def checksum(self, number: int) -> int:
        """Of a chunk that is in the buffer; computed by the level that asks first."""
        if number not in self._sums:
            self._sums[number] = checksum([self.chunk(number)])
        return self._sums[number]

    def note_checksum(self, number: int, value: int) -> None:
        """Of a chunk that was written straight from the tensors."""
        self._sums[number] = value

    @property
    def section(self) -> bytes:
        """What comes after the tensors."""
        return self._encoded()[1]

    def index(self) -> FileIndex:
        """The index of the file; every chunk must be there."""
        objects, section = self._encoded()
        view = memoryview(section)
        sums = [self.checksum(number) for number in range(self.count)]
        sums += [checksum([view[start:stop]]) for start, stop in spans(0, len(section))]
        me, nbytes = self.identity, self.file.nbytes
        return FileIndex(
            me.step, me.rank, me.lineage, me.ranks, self.file.entries, nbytes,
            objects, nbytes + len(section), tuple(sums),
        )  # fmt: skip

    def _encoded(self) -> tuple[tuple[IndexEntry, ...], bytes]:
        if self._section is None:
            self._section = self.objects(self.file.nbytes)
        return self._section


@dataclass(frozen=True)
class Pace:
    """When the fence is expected, and how fast the level was the last time.

    window_s   from the start of the checkpoint to the fence
    durable_s  that the level needed for the checkpoint before
    """

    window_s: float
    durable_s: float

    def nap_s(self, checkpoint: InFlightCheckpoint) -> float:
        """How long the copy can wait; 0: it is time to copy what the level will not have taken.

        A copy costs training more than the wait for it gains, so it waits as long as it can.
        """
        elapsed = time.monotonic() - checkpoint.begun_s
        left, safe = self.window_s - elapsed, checkpoint.progress.safe
        chunk_s = elapsed / safe if safe >= _ENOUGH else self.durable_s / max(checkpoint.count, 1)
        lacking = checkpoint.count - safe - _MARGIN * left / chunk_s
        spare_s = left - max(lacking, 0) * _COPY_S
        return 0.0 if spare_s <= 0 else min(max(spare_s / 4, _SHORTEST_NAP_S), _LONGEST_NAP_S)


UNHURRIED = Pace(window_s=1e6, durable_s=1.0)
"""The level is expected to be done before any fence."""

_ENOUGH, _MARGIN = 16, 0.9
"""Chunks that show the pace; part of the time left that is counted on."""

_COPY_S = 2e-3
"""Reckoned for a chunk's copy: into memory never touched before; otherwise it takes a quarter."""

_SHORTEST_NAP_S, _LONGEST_NAP_S = 1e-3, 0.05
"""Between two looks at the pace."""
