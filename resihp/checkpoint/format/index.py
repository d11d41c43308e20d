"""What stands where in the file of one rank, with the checksums of its chunks.

The index lies beside the file as JSON. Readers that know torch's format alone do without it; ours
verifies by it, and the rank that comes last builds torch's `.metadata` from the indexes of all.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from resihp.contracts import CheckpointDamagedError, CheckpointError

from ..lineage import Lineage
from ..parts import Box, Path
from .checksum import CRC32, KINDS, ROWS_AND_COLUMNS

CHUNK_BYTES = 4 << 20
"""Chunks are copied, summed, written, read and verified one by one."""


@dataclass(frozen=True)
class Entry:
    """One archive in the file: a tensor's part, or (where `dtype` is None) any other value.

    start, length  of the archive, in bytes
    data           first byte of the tensor's own memory
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
        """Where the part lies in its whole tensor."""
        return self.offsets, self.sizes


@dataclass(frozen=True)
class Index:
    """The file of one rank in the checkpoint of one step.

    lineage       of the state, as this rank knows it
    ranks         all ranks that write to the same checkpoint
    tensors       parts of tensors, the same at each step; `tensor_bytes` in all
    things        other values; they come after the tensors
    file_bytes    a multiple of 4096
    checksums     one for each of `chunks`
    sums          what kind of checksums they are
    """

    step: int
    rank: int
    lineage: Lineage
    ranks: tuple[int, ...]
    tensors: tuple[Entry, ...]
    tensor_bytes: int
    things: tuple[Entry, ...] = ()
    file_bytes: int = 0
    checksums: tuple[int, ...] = ()
    sums: str = CRC32

    @property
    def run(self) -> str:
        """The same text for all ranks, another one for each lineage."""
        return self.lineage.run

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Everything in the file, in order."""
        return self.tensors + self.things

    @cached_property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """First and last byte (exclusive) of every chunk; none holds tensors and things."""
        return spans(0, self.tensor_bytes) + spans(self.tensor_bytes, self.file_bytes)

    def is_intact(self, number: int, chunk: memoryview) -> bool:
        """Whether these are the bytes that were saved as a chunk."""
        return KINDS[self.sums]([chunk]) == self.checksums[number]

    def to_json(self) -> str:
        """With a checksum of its own at its end."""
        rest = asdict(replace(self, tensors=(), checksums=()))
        del rest["tensors"]
        rest["checksums"] = [f"{value:016x}" for value in self.checksums]
        text = f'{{"tensors": {_tensors_json(self.tensors)}, "rest": {json.dumps(rest)}, "crc": '
        return f"{text}{zlib.crc32(text.encode())}}}"


def spans(start: int, stop: int) -> tuple[tuple[int, int], ...]:
    """The chunks of a section of the file."""
    edges = range(start, stop, CHUNK_BYTES)
    return tuple((edge, min(edge + CHUNK_BYTES, stop)) for edge in edges)


def read_index(text: str, where: str) -> Index:
    """Raises `CheckpointDamagedError` where the text is not what `to_json` gave.

    Raises `CheckpointError` where a later version of the format gave it.
    """
    try:
        body, crc = text.rsplit('"crc": ', 1)
        intact = int(crc[:-1]) == zlib.crc32(f'{body}"crc": '.encode())
        obj = json.loads(text)
    except ValueError:
        intact = False
    if not intact:
        raise CheckpointDamagedError(where, (), "its index is damaged")
    rest: dict[str, Any] = obj["rest"]
    if rest.setdefault("sums", ROWS_AND_COLUMNS) not in KINDS:
        raise CheckpointError(f"{where}: its checksums are {rest['sums']}, not known here")
    rest["ranks"], rest["lineage"] = tuple(rest["ranks"]), Lineage(**rest["lineage"])
    rest["checksums"] = tuple(int(value, 16) for value in rest["checksums"])
    rest["things"] = tuple(map(_entry, rest["things"]))
    return Index(tensors=tuple(map(_entry, obj["tensors"])), **rest)


@lru_cache(maxsize=4)
def _tensors_json(tensors: tuple[Entry, ...]) -> str:
    return json.dumps([asdict(entry) for entry in tensors])


def _entry(obj: dict[str, Any]) -> Entry:
    path = tuple(tuple(step) if isinstance(step, list) else step for step in obj["path"])
    shapes = {name: tuple(obj[name]) for name in ("shape", "offsets", "sizes")}
    return Entry(**{**obj, **shapes, "path": path})
