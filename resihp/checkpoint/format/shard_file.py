"""Layout of one rank's file, archive frames included.

A chunk in host memory has the layout of that part of the file, so that large aligned writes store
it as it is, whatever the sizes of the tensors.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..providers import LazyTensor, TensorSource, flat_bytes
from ..state_dict import Path, TensorEntry
from .archive import ALIGN, ArchiveFrame, frame
from .checksum import ROW_BYTES
from .index import CHUNK_BYTES, IndexEntry, spans

_LARGE = 64 * ROW_BYTES


@dataclass(frozen=True)
class ShardSpec:
    """Name, shape and dtype of a tensor shard in the file.

    phase  address of its data modulo 4096 at planning time; large tensors get the same phase in
           the file, so that direct I/O can write them from their own memory
    """

    key: str
    path: Path
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    phase: int = 0

    @classmethod
    def of(cls, entry: TensorEntry) -> ShardSpec:
        """Describe a tensor of the state."""
        source = entry.source
        shape = (entry.shape, entry.offsets, tuple(source.shape))
        phase = source.data_ptr() % ROW_BYTES if isinstance(source, Tensor) else 0
        return cls(entry.key, entry.path, *shape, source.dtype, phase)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return torch.Size(self.sizes).numel() * self.dtype.itemsize

    @property
    def alignment(self) -> tuple[int, int]:
        """`(remainder, modulus)`: its data starts at a file offset ≡ remainder (mod modulus)."""
        if self.nbytes < _LARGE or self.phase % ALIGN:
            return 0, ALIGN
        return self.phase, ROW_BYTES


@dataclass(frozen=True)
class ChunkSegment:
    """Bytes [start, stop) of a tensor's data, at offset `at` of the file, within one chunk."""

    tensor: int
    start: int
    stop: int
    at: int


class ShardFile:
    """The tensor section of a rank's file: one archive for each spec, in the given order."""

    def __init__(self, specs: Sequence[ShardSpec]) -> None:
        self.specs = tuple(specs)
        frames: list[ArchiveFrame] = []
        entries, at = [], 0
        for spec in self.specs:
            around = frame(spec.dtype, spec.sizes, spec.nbytes, at, *spec.alignment)
            data = at + len(around.head)
            length = len(around.head) + spec.nbytes + len(around.tail)
            kind = str(spec.dtype).removeprefix("torch.")
            shape = (spec.shape, spec.offsets, spec.sizes)
            entries.append(IndexEntry(spec.key, spec.path, at, length, kind, *shape, data))
            frames.append(around)
            at = _up(at + length, ALIGN)
        self.entries = tuple(entries)
        self.nbytes = _up(at, ROW_BYTES)
        self.chunks = spans(0, self.nbytes)
        self.segments = self._segments()
        self._frames = self._framing(frames)

    def _segments(self) -> list[list[ChunkSegment]]:
        """For each chunk, its segments of tensor data."""
        found: dict[int, list[ChunkSegment]] = defaultdict(list)
        for index, (entry, spec) in enumerate(zip(self.entries, self.specs, strict=True)):
            at, end = entry.data, entry.data + spec.nbytes
            while at < end:
                chunk = at // CHUNK_BYTES
                stop = min(end, (chunk + 1) * CHUNK_BYTES)
                found[chunk].append(ChunkSegment(index, at - entry.data, stop - entry.data, at))
                at = stop
        return [found[number] for number in range(len(self.chunks))]

    def put_frames(self, chunk: int, goal: memoryview, first: int) -> None:
        """Write frames into `goal`: bytes of a chunk, from file offset `first` on."""
        last = first + len(goal)
        for at, content in self._frames[chunk]:
            low, high = max(at, first), min(at + len(content), last)
            if low < high:
                goal[low - first : high - first] = content[low - at : high - at]

    def _framing(self, frames: Sequence[ArchiveFrame]) -> list[list[tuple[int, bytes]]]:
        """For each chunk, offset and content of all bytes around tensors that overlap it."""
        found: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
        stops = [*(entry.start for entry in self.entries[1:]), self.nbytes]
        for entry, spec, around, stop in zip(self.entries, self.specs, frames, stops, strict=False):
            ends = entry.data + spec.nbytes
            tail = around.tail.ljust(stop - ends, b"\0")
            for at, content in ((entry.start, around.head), (ends, tail)):
                for chunk in range(at // CHUNK_BYTES, (at + len(content) - 1) // CHUNK_BYTES + 1):
                    found[chunk].append((at, content))
        return [found[number] for number in range(len(self.chunks))]


class SourceBytes:
    """Bytes of the sources of a checkpoint; views the last tensor used, and makes lazy ones."""

    def __init__(self, sources: Sequence[TensorSource]) -> None:
        self._sources = sources
        self._held, self._flat = -1, torch.empty(0)

    def of(self, segment: ChunkSegment) -> Tensor:
        """Return the bytes of a segment; a view of the tensor's memory if that has no gaps."""
        source = self._sources[segment.tensor]
        if isinstance(source, LazyTensor):
            return source.read_bytes(segment.start, segment.stop)
        if segment.tensor != self._held:
            self._held, self._flat = segment.tensor, flat_bytes(source)
        return self._flat[segment.start : segment.stop]


def encode_object(value: object) -> memoryview:
    """Encode a value with `torch.save`."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getbuffer()


def object_section(
    objects: Iterable[tuple[str, Path, memoryview]], start: int
) -> tuple[tuple[IndexEntry, ...], bytes]:
    """Join encoded objects (key, path, content) to a section at file offset `start`, in whole rows.

    Returns the entries and the bytes of the section.
    """
    section, entries = bytearray(), []
    for key, path, content in objects:
        entries.append(IndexEntry(key, path, start + len(section), len(content)))
        section += content
    section += bytes(-len(section) % ROW_BYTES)
    return tuple(entries), bytes(section)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
