"""One checkpoint in one host buffer: how far it is copied, and who still reads it.

Copying, reading and the next checkpoint's copying chase each other through the buffer chunk by
chunk: a level may take a chunk once it is copied, the next checkpoint may overwrite it once every
level has taken it. So a single buffer is enough while the disk keeps up.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Condition

from torch import Tensor

from ..format.checksum import checksum
from ..format.index import Entry, Index, spans
from ..format.shard_file import ShardFile
from .host_buffer import HostBuffer


class Abandoned(Exception):  # noqa: N818
    """The checkpoint was given up; nobody is to blame. Never leaves this package."""


@dataclass(eq=False)
class Slot:
    """A buffer and the checkpoint that is, or was, last in it."""

    buffer: HostBuffer
    last: Filling | None = None


@dataclass(frozen=True)
class Identity:
    """Which checkpoint of which job, and which rank's part of it."""

    step: int
    rank: int
    run: str
    ranks: tuple[int, ...]


@dataclass(eq=False)
class Filling:
    """A checkpoint on its way through a slot. All counters are guarded by `changed`.

    copied     chunks whose copy has ended; `enqueued` chunks whose copy has been ordered
    taken      for each level, chunks that it needs no more (a prefix of them all)
    uploads    levels that take the checkpoint from the disk level's file
    stored     descriptor of that file, open while one of them needs it
    previous   the checkpoint that was in the slot before and may still be read there
    """

    identity: Identity
    file: ShardFile
    slot: Slot
    sources: Sequence[Tensor]
    things: Callable[[int], tuple[tuple[Entry, ...], bytes]]
    changed: Condition
    previous: Filling | None = None
    begun_s: float = field(default_factory=time.monotonic)
    enqueued: int = 0
    copied: int = 0
    is_blocked: bool = False
    problem: BaseException | None = None
    taken: dict[str, int] = field(default_factory=dict)
    uploads: int = 0
    stored: int | None = None

    def __post_init__(self) -> None:
        self._sums: dict[int, int] = {}
        self._kept: set[str] = set()
        self._landed: set[int] = set()
        self._claimed = 0
        self._section: tuple[tuple[Entry, ...], bytes] | None = None
        self.slot.last = self

    @property
    def count(self) -> int:
        """Chunks of tensors."""
        return len(self.file.chunks)

    @property
    def is_copied(self) -> bool:
        """Whether the state may change again."""
        return self.copied == self.count

    @property
    def is_idle(self) -> bool:
        """Whether the slot may be given to another checkpoint as a whole."""
        ended = self.is_copied or self.problem is not None
        return ended and not self.taken

    @property
    def released(self) -> int:
        """Chunks that the next checkpoint may overwrite."""
        return min(self.taken.values(), default=self.count)

    def released_within(self, window_s: float) -> bool:
        """Whether, at the pace so far, every level will have taken everything by then."""
        ahead, taken = self.count - self.released, self.released
        if not self.is_copied or not taken:
            return False
        return (time.monotonic() - self.begun_s) / taken * ahead <= window_s

    def claim(self, *, patient: bool = True) -> int | None:
        """The next chunk to copy, once its place is free; None where there is none (in time)."""
        with self.changed:
            while self.problem is None and self._claimed < self.count:
                self.is_blocked = self.previous is not None
                if self.previous is None or self.previous.released > self._claimed:
                    self.is_blocked = False
                    self._claimed += 1
                    return self._claimed - 1
                if not patient:
                    break
                self.changed.notify_all()
                self.changed.wait()
        return None

    def ordered(self, chunk: int) -> None:
        """The copy of a chunk, and of those before it, is under way on the device."""
        with self.changed:
            self.enqueued = chunk + 1
            self.changed.notify_all()

    def landed(self, chunk: int) -> None:
        """A chunk is copied."""
        with self.changed:
            self._landed.add(chunk)
            while self.copied in self._landed:
                self.copied += 1
            self.enqueued = max(self.enqueued, self.copied)
            if self.is_copied:
                self.previous = None
            self.changed.notify_all()

    def veto(self, problem: BaseException) -> None:
        """Stop it whatever its state: another rank does not take part."""
        with self.changed:
            self.problem = self.problem or problem
            self.changed.notify_all()

    def take(self, chunk: int) -> None:
        """Wait until a chunk is there. Raises what ended the checkpoint instead."""
        with self.changed:
            while self.copied <= chunk and self.problem is None:
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

    def chunk(self, number: int) -> memoryview:
        """The bytes of a chunk, as they go into the file."""
        start, stop = self.file.chunks[number]
        return self.slot.buffer.view[start:stop]

    def checksum(self, number: int) -> int:
        """Of a chunk that is there; computed by the level that asks first."""
        if number not in self._sums:
            self._sums[number] = checksum(self.chunk(number))
        return self._sums[number]

    @property
    def section(self) -> bytes:
        """What comes after the tensors."""
        return self._encoded()[1]

    def index(self) -> Index:
        """The index of the file; every chunk must be there."""
        things, section = self._encoded()
        view = memoryview(section)
        sums = [self.checksum(number) for number in range(self.count)]
        sums += [checksum(view[start:stop]) for start, stop in spans(0, len(section))]
        me, nbytes = self.identity, self.file.nbytes
        return Index(
            me.step, me.rank, me.run, me.ranks, self.file.entries, nbytes,
            things, nbytes + len(section), tuple(sums),
        )  # fmt: skip

    def _encoded(self) -> tuple[tuple[Entry, ...], bytes]:
        if self._section is None:
            self._section = self.things(self.file.nbytes)
        return self._section
