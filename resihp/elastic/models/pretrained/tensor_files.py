"""Tensors in safetensors files, read and written by ranges, from any number of processes.

A file is the length of its header (8 bytes, little-endian), the header in JSON (type, shape and
place of each tensor) and the tensors, row by row.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from resihp.contracts import ContractError
from resihp.layout import Range

Region = tuple[Range, ...]
"""Range of each dimension, of which there are one or two."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
INDEX = "model.safetensors.index.json"
_BLOCK_BYTES = 16 << 20
_LONGEST_HEADER = 100 << 20


@dataclass(frozen=True)
class StoredTensor:
    """Place of a tensor: its first byte in a file, its type and shape."""

    path: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (of one element, if there is one dimension)."""
        return prod(self.shape[1:]) * self.dtype.itemsize

    def runs(self, region: Region) -> Iterator[tuple[int, int]]:
        """Yield first byte and length of the contiguous runs of a region, blocks at most."""
        (top, bottom), row = region[0], self.row_bytes
        left, right = (0, row) if len(region) == 1 else _bytes(region[1], self.dtype)
        if right <= left:
            return
        if (left, right) == (0, row):
            step = max(1, _BLOCK_BYTES // row)
            for start in range(top, bottom, step):
                stop = min(start + step, bottom)
                yield self.offset + start * row, (stop - start) * row
            return
        for index in range(top, bottom):
            yield self.offset + index * row + left, right - left


class TensorFiles:
    """The tensors of a folder, by name, but those that are ignored.

    tensors     places of the tensors
    bytes_read  bytes of tensors that this process has read

    Raises `ContractError` for files that are missing, damaged, or hold other types than floats.
    """

    def __init__(
        self, folder: Path, is_ignored: Callable[[str], bool] = lambda name: False
    ) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self.bytes_read = 0
        for path, names in _files(folder).items():
            found = _read_header(path, is_ignored)
            lacking = {name for name in names or () if not is_ignored(name)} - set(found)
            if lacking:
                raise ContractError(min(lacking), f"is not in {path}, where {INDEX} has it")
            self.tensors |= found

    def read(self, name: str, region: Region) -> torch.Tensor:
        """Return a region of a tensor as float32, reading its bytes and no others."""
        stored = self.tensors[name]
        sizes = [stop - start for start, stop in region]
        values = torch.empty(prod(sizes), dtype=torch.float32, device="cpu")
        with stored.path.open("rb", buffering=0) as file:
            done = 0
            for offset, length in stored.runs(region):
                raw = torch.empty(length, dtype=torch.uint8, device="cpu")
                _read_into(file.fileno(), raw.numpy().data, offset, stored.path)
                count = length // stored.dtype.itemsize
                values[done : done + count].copy_(raw.view(stored.dtype))
                done += count
                self.bytes_read += length
        return values.view(sizes)


@dataclass(frozen=True)
class NewFile:
    """A file to be written: its name, the bytes before its tensors, and its length."""

    name: str
    header: bytes
    length: int


def plan_files(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, folder: Path, max_file_bytes: int
) -> tuple[list[NewFile], dict[str, StoredTensor]]:
    """Spread tensors over files of at most `max_file_bytes`; a larger tensor has its own file.

    The same on every rank, so that each can write its ranges without the others.
    """
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    held = 0
    for name, shape in shapes.items():
        size = prod(shape) * dtype.itemsize
        if groups[-1] and held + size > max_file_bytes:
            groups.append({})
            held = 0
        groups[-1][name] = shape
        held += size
    files, places = [], {}
    for number, group in enumerate(groups, 1):
        part = f"-{number:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
        path = folder / f"model{part}.safetensors"
        header, length, offsets = _header(group, dtype)
        files.append(NewFile(path.name, header, len(header) + length))
        for name, shape in group.items():
            places[name] = StoredTensor(path, len(header) + offsets[name], dtype, shape)
    return files, places


def create(file: NewFile, folder: Path) -> None:
    """Write header and length of a file; what others have written into it stays."""
    descriptor = os.open(folder / file.name, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        os.truncate(descriptor, file.length)
        _write_all(descriptor, memoryview(file.header), 0)
    finally:
        os.close(descriptor)


def write(stored: StoredTensor, region: Region, values: torch.Tensor) -> None:
    """Write a region of a tensor into a file that `create` has made."""
    values = values.detach().to("cpu", stored.dtype).contiguous()
    raw, done = values.view(-1).view(torch.uint8).numpy().data, 0
    descriptor = os.open(stored.path, os.O_WRONLY)
    try:
        for offset, length in stored.runs(region):
            _write_all(descriptor, raw[done : done + length], offset)
            done += length
    finally:
        os.close(descriptor)


def _bytes(columns: Range, dtype: torch.dtype) -> Range:
    return columns[0] * dtype.itemsize, columns[1] * dtype.itemsize


def _files(folder: Path) -> dict[Path, list[str] | None]:
    """Return the files of a folder, with the tensors that its index says are in each."""
    index, single = folder / INDEX, folder / "model.safetensors"
    if single.is_file() and not index.is_file():
        return {single: None}
    if not index.is_file():
        raise ContractError(
            str(folder), f"has neither model.safetensors nor {INDEX}; other formats are not read"
        )
    files: dict[Path, list[str] | None] = {}
    located = read_object(index).get("weight_map")
    if not isinstance(located, dict) or not located:
        raise ContractError(str(index), "has no weight_map, which names the file of each tensor")
    for name, file in located.items():
        if Path(str(file)).name != file:
            raise ContractError(INDEX, f"names {file!r}, which is outside the folder")
        names = files.setdefault(folder / file, [])
        assert names is not None
        names.append(name)
    return files


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises `ContractError` if it holds none."""
    return _parsed(path, path.read_bytes())


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ContractError(str(path), f"is damaged: {error}") from None
    if not isinstance(found, dict):
        raise ContractError(str(path), "must hold an object")
    return found


def _read_header(path: Path, is_ignored: Callable[[str], bool]) -> dict[str, StoredTensor]:
    """Return the tensors of a file, checked against its length."""
    if not path.is_file():
        raise ContractError(str(path), "is missing")
    whole = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_LONGEST_HEADER, whole - 8):
            raise ContractError(str(path), "is no safetensors file, or is damaged")
        header = _parsed(path, file.read(length))
    return {
        name: _stored(path, name, entry, 8 + length, whole)
        for name, entry in header.items()
        if name != "__metadata__" and not is_ignored(name)
    }


def _stored(path: Path, name: str, entry: Mapping[str, Any], base: int, whole: int) -> StoredTensor:
    try:
        code, shape = str(entry["dtype"]), tuple(map(int, entry["shape"]))
        start, stop = map(int, entry["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise ContractError(str(path), f"is damaged: {name!r} is {entry}") from None
    if code not in DTYPES:
        raise ContractError(name, f"is {code} in {path.name}; only {', '.join(DTYPES)} are read")
    dtype = DTYPES[code]
    if stop - start != prod(shape) * dtype.itemsize or start < 0 or base + stop > whole:
        raise ContractError(name, f"lies outside of {path.name}, which is damaged")
    return StoredTensor(path, base + start, dtype, shape)


def _header(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> tuple[bytes, int, dict[str, int]]:
    """Return the header of a file, the bytes of its tensors, and where each begins in them."""
    (code,) = (code for code, held in DTYPES.items() if held is dtype)
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, place = {}, 0
    for name, shape in shapes.items():
        offsets[name], place = place, place + prod(shape) * dtype.itemsize
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": [offsets[name], place]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, place, offsets


def _read_into(descriptor: int, buffer: memoryview, offset: int, path: Path) -> None:
    while buffer:
        count = os.preadv(descriptor, [buffer], offset)
        if not count:
            raise ContractError(str(path), "has become shorter")
        buffer, offset = buffer[count:], offset + count


def _write_all(descriptor: int, buffer: memoryview, offset: int) -> None:
    while buffer:
        count = os.pwrite(descriptor, buffer, offset)
        buffer, offset = buffer[count:], offset + count
