"""Index of one rank's file: byte ranges of its entries, and checksums of its chunks.

Stored as JSON next to the file. torch's reader does not need it; ours verifies with it, and the
last rank to finish builds torch's `.metadata` from the indexes of all ranks.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import Any

from resihp.contracts import CheckpointDamagedError, CheckpointError

from ..history import Lineage
from ..state_dict import Box, Path
from .checksum import CRC32, checksum

CHUNK_BYTES = 4 << 20
"""Unit of copying, checksums, writing, reading and verification."""


@dataclass(frozen=True)
class IndexEntry:
    """One archive in the file: a tensor shard, or (if `dtype` is None) another object.

    start, length  byte range of the archive in the file
    data           offset in the file of the tensor's own memory, in bytes
    """

    key: str
    path: Path
    start: int
    length: int
    dtype: str | None = None
    shape: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    data: int = 0

    @property
    def box(self) -> Box:
        """Offsets and sizes of the shard in its global tensor."""
        return self.offsets, self.sizes


@dataclass(frozen=True)
class FileIndex:
    """Index of one rank's file in the checkpoint of one step.

    lineage       of the state, as known to this rank
    ranks         all ranks that write to this checkpoint
    beside        those with files in the same folder, where each node has its own; empty: all
    tensors       tensor shards, the same at each step; `tensor_bytes` is their section's length
    objects       other values; their section follows the tensors
    file_bytes    a multiple of 4096
    checksums     one for each of `chunks`
    """

    step: int
    rank: int
    lineage: Lineage
    ranks: tuple[int, ...]
    tensors: tuple[IndexEntry, ...]
    tensor_bytes: int
    objects: tuple[IndexEntry, ...] = ()
    file_bytes: int = 0
    checksums: tuple[int, ...] = ()
    beside: tuple[int, ...] = ()

    @property
    def in_folder(self) -> tuple[int, ...]:
        """Ranks whose files are in the folder of this one."""
        return self.beside or self.ranks

    @property
    def run(self) -> str:
        """Identifier of the lineage, the same on all ranks."""
        return self.lineage.run

    @property
    def entries(self) -> tuple[IndexEntry, ...]:
        """All entries, in the order of the file."""
        return self.tensors + self.objects

    @cached_property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """First and last byte (exclusive) of each chunk; no chunk spans both sections."""
        return spans(0, self.tensor_bytes) + spans(self.tensor_bytes, self.file_bytes)

    def is_intact(self, number: int, chunk: memoryview) -> bool:
        """Return True if `chunk` has the checksum of chunk `number`."""
        return checksum([chunk]) == self.checksums[number]

    def to_json(self) -> str:
        """Serialize, with a CRC-32 of the text at its end."""
        rest = {
            "step": self.step,
            "rank": self.rank,
            "lineage": asdict(self.lineage),
            "ranks": self.ranks,
            "tensor_bytes": self.tensor_bytes,
            "things": [asdict(entry) for entry in self.objects],
            "file_bytes": self.file_bytes,
            "checksums": [f"{value:016x}" for value in self.checksums],
            "beside": self.beside,
            "sums": CRC32,
        }
        text = f'{{"tensors": {_tensors_json(self.tensors)}, "rest": {json.dumps(rest)}, "crc": '
        return f"{text}{zlib.crc32(text.encode())}}}"


def spans(start: int, stop: int) -> tuple[tuple[int, int], ...]:
    """Split a byte range of the file into chunks."""
    edges = range(start, stop, CHUNK_BYTES)
    return tuple((edge, min(edge + CHUNK_BYTES, stop)) for edge in edges)


def read_index(text: str, where: str) -> FileIndex:
    """Parse the output of `FileIndex.to_json`; `where` names the source in error messages.

    Raises `CheckpointDamagedError` if the text is damaged, `CheckpointError` if its kind of
    checksum is unknown.
    """
    try:
        body, crc = text.rsplit('"crc": ', 1)
        is_intact = int(crc[:-1]) == zlib.crc32(f'{body}"crc": '.encode())
        obj = json.loads(text)
        kind = obj["rest"].pop("sums", None)
        index = _index_of(obj) if is_intact and kind == CRC32 else None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        is_intact = False
    if not is_intact:
        raise CheckpointDamagedError(where, (), "its index is damaged")
    if index is None:
        raise CheckpointError(f"{where}: unknown kind of checksums: {kind}")
    return index


def _index_of(obj: dict[str, Any]) -> FileIndex:
    """Convert the JSON of an index. Raises an error of any kind for one that is malformed."""
    rest: dict[str, Any] = obj["rest"]
    rest["ranks"], rest["lineage"] = tuple(rest["ranks"]), Lineage(**rest["lineage"])
    rest["beside"] = tuple(rest.get("beside", ()))
    rest["checksums"] = tuple(int(value, 16) for value in rest["checksums"])
    objects = tuple(map(_entry, rest.pop("things")))
    index = FileIndex(tensors=tuple(map(_entry, obj["tensors"])), objects=objects, **rest)
    lineage, nbytes = index.lineage, index.file_bytes - index.tensor_bytes
    numbers = (index.step, index.rank, *index.ranks, *index.beside, lineage.born, lineage.first)
    for number in (*numbers, index.tensor_bytes, nbytes):
        if type(number) is not int or number < 0:
            raise ValueError(f"{number!r} is no number of an index")
    count = -(-index.tensor_bytes // CHUNK_BYTES) - (-nbytes // CHUNK_BYTES)
    if not isinstance(lineage.run, str) or len(index.checksums) != count:
        raise ValueError("malformed")
    return index


@lru_cache(maxsize=4)
def _tensors_json(tensors: tuple[IndexEntry, ...]) -> str:
    return json.dumps([asdict(entry) for entry in tensors])


def _entry(obj: dict[str, Any]) -> IndexEntry:
    path = tuple(tuple(step) if isinstance(step, list) else step for step in obj["path"])
    shapes = {name: tuple(obj[name]) for name in ("shape", "offsets", "sizes")}
    return IndexEntry(**{**obj, **shapes, "path": path})
