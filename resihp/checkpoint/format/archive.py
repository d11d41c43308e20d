"""Zip archives around tensor data, as read by `torch.load`.

torch's distributed checkpoint stores each tensor as an uncompressed zip archive, whose member
`data/0` is the tensor's memory. The bytes before and after that memory depend on shape and dtype
alone, so that they are generated once.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zlib
from dataclasses import dataclass

import torch

ALIGN = 64
"""File offsets of tensor data are multiples of this, in bytes."""

_LOCAL, _CENTRAL, _END = 0x04034B50, 0x02014B50, 0x06054B50
_END64, _LOCATOR64 = 0x06064B50, 0x07064B50
_ZIP64, _PADDING = 0x0001, 0x4246
_DOS_DATE = 33
_MAX32 = 0xFFFFFFFF


@dataclass(frozen=True)
class ArchiveFrame:
    """Bytes of an archive before and after a tensor's data."""

    head: bytes
    tail: bytes


@dataclass(frozen=True)
class _Member:
    name: bytes
    size: int
    crc: int
    offset: int


def frame(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    nbytes: int,
    start: int,
    remainder: int = 0,
    modulus: int = ALIGN,
) -> ArchiveFrame:
    """Generate the frame of an archive that starts at byte `start` of its file.

    The tensor's data starts at the first possible file offset ≡ remainder (mod modulus). Its CRC
    is 0, as with `torch.serialization.set_crc32_options(False)`: torch does not check it, and the
    chunks of the file have checksums.
    """
    head, members = bytearray(), []
    order = sys.byteorder.encode()
    for name, content in ((b"data.pkl", _pickled(dtype, shape)), (b"byteorder", order)):
        members.append(_Member(b"archive/" + name, len(content), zlib.crc32(content), len(head)))
        head += _local(members[-1]) + content
    data = _Member(b"archive/data/0", nbytes, 0, len(head))
    unpadded = start + len(head) + len(_local(data)) + 4
    head += _local(data, padding=(remainder - unpadded) % modulus)
    version = _Member(b"archive/version", 2, zlib.crc32(b"3\n"), len(head) + nbytes)
    directory_at = version.offset + len(_local(version)) + 2
    directory = b"".join(map(_central, [*members, data, version]))
    tail = _local(version) + b"3\n" + directory + _end(4, len(directory), directory_at)
    return ArchiveFrame(bytes(head), tail)


class _TensorPickler(pickle.Pickler):
    """Pickles tensors as `torch.save` does, with a reference to `data/0` in place of data."""

    def __init__(self, file: io.BytesIO, numel: int) -> None:
        super().__init__(file, protocol=2)
        self._numel = numel

    def persistent_id(self, obj: object) -> tuple[str, object, str, str, int] | None:
        if isinstance(obj, torch.storage.TypedStorage):
            kind = getattr(torch, obj._pickle_storage_type())
            return ("storage", kind, "0", "cpu", self._numel)
        if torch.is_storage(obj):
            return ("storage", torch.UntypedStorage, "0", "cpu", self._numel)
        return None


class _Shaped:
    """Placeholder that pickles like a contiguous tensor of a dtype and shape."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self._like, self._shape = torch.empty(0, dtype=dtype, device="cpu"), shape

    def __reduce_ex__(self, protocol: object) -> tuple[object, tuple[object, ...]]:
        rebuild, (storage, _, _, _, *rest) = self._like.__reduce_ex__(2)[:2]
        strides = torch.empty(self._shape, device="meta").stride()
        return rebuild, (storage, 0, self._shape, strides, *rest)


def _pickled(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    numel = torch.Size(shape).numel()
    like = torch.empty(0, dtype=dtype, device="cpu")
    typed = isinstance(like.__reduce_ex__(2)[1][0], torch.TypedStorage)
    _TensorPickler(file, numel if typed else numel * dtype.itemsize).dump(_Shaped(dtype, shape))
    return file.getvalue()


def _local(member: _Member, padding: int | None = None) -> bytes:
    extra, size = _sizes64(member)
    if padding is not None:
        extra += struct.pack("<HH", _PADDING, padding) + b"Z" * padding
    fields = (_LOCAL, 45, 0, 0, 0, _DOS_DATE, member.crc, size, size, len(member.name), len(extra))
    return struct.pack("<IHHHHHIIIHH", *fields) + member.name + extra


def _central(member: _Member) -> bytes:
    extra, size = _sizes64(member)
    offset = member.offset
    if offset >= _MAX32:
        sizes = extra[4:]
        extra = struct.pack("<HH", _ZIP64, len(sizes) + 8) + sizes + struct.pack("<Q", offset)
        offset = _MAX32
    fields = (_CENTRAL, 45, 45, 0, 0, 0, _DOS_DATE, member.crc, size, size, len(member.name))
    rest = (len(extra), 0, 0, 0, 0, offset)
    return struct.pack("<IHHHHHHIIIHHHHHII", *fields, *rest) + member.name + extra


def _sizes64(member: _Member) -> tuple[bytes, int]:
    if member.size < _MAX32:
        return b"", member.size
    return struct.pack("<HHQQ", _ZIP64, 16, member.size, member.size), _MAX32


def _end(count: int, size: int, offset: int) -> bytes:
    wide = b""
    if offset >= _MAX32:
        wide = struct.pack("<IQHHIIQQQQ", _END64, 44, 45, 45, 0, 0, count, count, size, offset)
        wide += struct.pack("<IIQI", _LOCATOR64, 0, offset + size, 1)
    near = min(offset, _MAX32)
    return wide + struct.pack("<IHHHHIIH", _END, 0, 0, count, count, size, near, 0)
