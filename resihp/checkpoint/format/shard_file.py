"""How the file of one rank is laid out, and how a host buffer becomes that file.

The buffer is an image of the file, frames and all. What stands between tensors is put there once;
a checkpoint changes only the tensors' own memory, and large aligned writes take it to disk as it
is, whatever the sizes of the tensors.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..state_dict import ObjectEntry, Path, TensorEntry
from .archive import ALIGN, ArchiveFrame, frame
from .checksum import ROW_BYTES
from .index import CHUNK_BYTES, IndexEntry, spans

_LARGE = 64 * ROW_BYTES


@dataclass(frozen=True)
class ShardSpec:
    """Where a part of a tensor goes: shape and type, without its memory.

    phase  where its memory began within a row (4 KiB) when this was planned. What is large is put
           at the same phase of the file, so that it can be written from where it lies.
    """

    key: str
    path: Path
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    phase: int = 0

    @classmethod
    def of(cls, part: TensorEntry) -> ShardSpec:
        """The place that a part needs."""
        sizes = tuple(part.tensor.shape)
        phase = part.tensor.data_ptr() % ROW_BYTES
        return cls(part.key, part.path, part.shape, part.offsets, sizes, part.tensor.dtype, phase)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's memory."""
        return torch.Size(self.sizes).numel() * self.dtype.itemsize

    @property
    def alignment(self) -> tuple[int, int]:
        """Its memory starts at a byte of the file that leaves this rest when divided by that."""
        if self.nbytes < _LARGE or self.phase % ALIGN:
            return 0, ALIGN
        return self.phase, ROW_BYTES


@dataclass(frozen=True)
class ChunkSegment:
    """Bytes [start, stop) of a tensor's memory belong at byte `at` of the file."""

    tensor: int
    start: int
    stop: int
    at: int


class ShardFile:
    """The fixed section of a rank's file: one archive for each place, in the order given."""

    def __init__(self, places: Sequence[ShardSpec]) -> None:
        self.places = tuple(places)
        frames: list[ArchiveFrame] = []
        entries, at = [], 0
        for place in self.places:
            around = frame(place.dtype, place.sizes, place.nbytes, at, *place.alignment)
            data = at + len(around.head)
            length = len(around.head) + place.nbytes + len(around.tail)
            kind = str(place.dtype).removeprefix("torch.")
            shape = (place.shape, place.offsets, place.sizes)
            entries.append(IndexEntry(place.key, place.path, at, length, kind, *shape, data))
            frames.append(around)
            at = _up(at + length, ALIGN)
        self.entries = tuple(entries)
        self.nbytes = _up(at, ROW_BYTES)
        self.chunks = spans(0, self.nbytes)
        self.segments = self._segments()
        self._frames = self._framing(frames)

    def _segments(self) -> list[list[ChunkSegment]]:
        """For each chunk, what of the tensors lies in it."""
        found: dict[int, list[ChunkSegment]] = defaultdict(list)
        for index, (entry, place) in enumerate(zip(self.entries, self.places, strict=True)):
            at, end = entry.data, entry.data + place.nbytes
            while at < end:
                chunk = at // CHUNK_BYTES
                stop = min(end, (chunk + 1) * CHUNK_BYTES)
                found[chunk].append(ChunkSegment(index, at - entry.data, stop - entry.data, at))
                at = stop
        return [found[number] for number in range(len(self.chunks))]

    def put_frames(self, chunk: int, goal: Tensor) -> None:
        """Write what stands between tensors in a chunk into the chunk's bytes (uint8)."""
        first, last = self.chunks[chunk]
        for at, content in self._frames[chunk]:
            low, high = max(at, first), min(at + len(content), last)
            part = bytearray(content[low - at : high - at])
            goal[low - first : high - first] = torch.frombuffer(part, dtype=torch.uint8)

    def _framing(self, frames: Sequence[ArchiveFrame]) -> list[list[tuple[int, bytes]]]:
        """For each chunk, the frames that reach into it, and where they start."""
        found: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
        for entry, place, around in zip(self.entries, self.places, frames, strict=True):
            ends = entry.data + place.nbytes
            for at, content in ((entry.start, around.head), (ends, around.tail)):
                for chunk in range(at // CHUNK_BYTES, (at + len(content) - 1) // CHUNK_BYTES + 1):
                    found[chunk].append((at, content))
        return [found[number] for number in range(len(self.chunks))]


def flat_bytes(tensor: Tensor) -> Tensor:
    """The memory of a tensor as bytes; a copy only where it has gaps."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)


def encode_objects(
    objects: Iterable[ObjectEntry], start: int
) -> tuple[tuple[IndexEntry, ...], bytes]:
    """The section after the tensors: each value as `torch.save` gives it, padded to whole rows."""
    section, entries = bytearray(), []
    for thing in objects:
        file = io.BytesIO()
        torch.save(thing.value, file)
        content = file.getbuffer()
        entries.append(IndexEntry(thing.key, thing.path, start + len(section), len(content)))
        section += content
    section += bytes(-len(section) % ROW_BYTES)
    return tuple(entries), bytes(section)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
