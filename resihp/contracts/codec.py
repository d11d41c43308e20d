"""Wire form of a `TelemetryBatch`: one versioned document, the same in JSON and in msgpack.

    {"version": 1, "plan_version": 0, "dropped": 0, "columns": {"rank": [0, 0], "step": [7, 7], …}}

In msgpack a column may also be the little-endian bytes of its dtype, which is what `encode`
writes: it is an order of magnitude cheaper on the trainer's side. NaN is `null` in JSON. `encode`
leaves out `start_ms` where no record has one, which an older sidecar does not know.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from .errors import ContractError
from .json_size import parse_json
from .telemetry import COLUMNS, TelemetryBatch, as_column

VERSION = 1
_FIELDS = ("version", "plan_version", "dropped", "columns")
_SELDOM = frozenset({"start_ms"})
"""Columns, NaN by default, that a message has only if one of its records has a value."""
_MOST_PARTS = 200  # a JSON message has 2 objects, 12 lists and 16 names
_PLAIN = {int, float, type(None)}


class WireFormat(StrEnum):
    """Media types of a telemetry message."""

    JSON = "application/json"
    MSGPACK = "application/msgpack"


def encode(batch: TelemetryBatch, form: WireFormat = WireFormat.MSGPACK) -> bytes:
    """The message that holds `batch`."""
    head = {"version": VERSION, "plan_version": batch.plan_version, "dropped": batch.dropped}
    held = {
        name: column
        for name, column in batch.columns().items()
        if name not in _SELDOM or not np.isnan(column).all()
    }
    if form is WireFormat.JSON:
        columns: dict[str, Any] = {name: _json_column(column) for name, column in held.items()}
        return json.dumps({**head, "columns": columns}, separators=(",", ":")).encode()
    columns = {
        name: column.astype(column.dtype.newbyteorder("<"), copy=False).tobytes()
        for name, column in held.items()
    }
    packed: bytes = msgpack.packb({**head, "columns": columns})
    return packed


def decode(
    message: bytes, form: WireFormat = WireFormat.MSGPACK, *, max_records: int | None = None
) -> TelemetryBatch:
    """The batch in `message`. Raises `ContractError` naming the field that is wrong.

    Sizes are checked before values are made: whatever its bytes, a message takes little more
    memory than itself and `max_records` records.
    """
    most = len(message) if max_records is None else max_records
    read = _read_json if form is WireFormat.JSON else _read_msgpack
    document = read(message, most)
    for name in ("version", "columns"):
        if name not in document:
            raise ContractError(name, "is missing")
    if document["version"] != VERSION:
        raise ContractError("version", f"must be {VERSION}, not {document['version']!r}")
    columns = document["columns"]
    for name, (_, default) in COLUMNS.items():
        if default is None and name not in columns:
            raise ContractError(f"columns.{name}", "is missing")
    return TelemetryBatch(
        **columns,
        plan_version=document.get("plan_version", 0),
        dropped=document.get("dropped", 0),
    )


def _read_json(message: bytes, most: int) -> dict[str, Any]:
    """The document in a message, its columns as arrays."""
    if not message.isascii():  # one character beyond makes a text of four bytes each
        raise ContractError("", "is not ASCII; names and numbers are")
    document = parse_json(message, parts=_MOST_PARTS, values=most * len(COLUMNS))
    if not isinstance(document, dict):
        raise ContractError("", "the message must be an object")
    for name in document:
        _require_known(name, _FIELDS, "")
    columns = document.get("columns", {})
    if not isinstance(columns, dict):
        raise ContractError("columns", "must be an object")
    for name, values in columns.items():
        _require_known(name, COLUMNS, "columns.")
        columns[name] = _column(name, values, most)
    return document


def _read_msgpack(message: bytes, most: int) -> dict[str, Any]:
    """The document in a message, its columns as arrays.

    It is read part by part, for the limits of an unpacker bound each list, not their number.
    """
    unpacker = msgpack.Unpacker(
        max_buffer_size=len(message), max_array_len=0, max_map_len=0, max_ext_len=0
    )
    unpacker.feed(message)
    document: dict[str, Any] = {}
    try:
        for name in _names(unpacker, _FIELDS, ""):
            if name == "columns":
                document[name] = {
                    column: _column(column, _values(column, message, unpacker, most), most)
                    for column in _names(unpacker, COLUMNS, "columns.")
                }
            else:
                document[name] = unpacker.unpack()
    except (ValueError, msgpack.UnpackException) as error:
        if isinstance(error, ContractError):
            raise
        raise ContractError("", f"the message is not valid msgpack: {error}") from None
    if unpacker.tell() != len(message):
        raise ContractError("", "the message is not valid msgpack: data follow its end")
    return document


def _names(unpacker: msgpack.Unpacker, known: Iterable[str], place: str) -> Iterator[str]:
    """The names in the map that comes next; the caller takes the value of each."""
    try:
        size = unpacker.read_map_header()
    except ValueError:
        field = place.removesuffix(".")
        raise ContractError(field, "must be an object") from None
    for _ in range(size):
        name = unpacker.unpack()
        _require_known(name, known, place)
        yield name


def _values(name: str, message: bytes, unpacker: msgpack.Unpacker, most: int) -> Any:
    """The value that comes next: bytes as they are, a list of at most `most` plain values."""
    lead = message[unpacker.tell() : unpacker.tell() + 1]
    if not (b"\x90" <= lead <= b"\x9f" or lead in (b"\xdc", b"\xdd")):  # msgpack's lists
        return unpacker.unpack()
    size = unpacker.read_array_header()
    if size > most:
        raise ContractError("columns", f"holds more than {most} records")
    try:
        return [unpacker.unpack() for _ in range(size)]
    except ValueError as error:
        raise ContractError(f"columns.{name}", f"must hold numbers: {error}") from None


def _column(name: str, values: Any, most: int) -> NDArray[Any]:
    dtype = COLUMNS[name][0].newbyteorder("<")
    if isinstance(values, bytes):
        if len(values) % dtype.itemsize:
            raise ContractError(f"columns.{name}", f"is not a whole number of {dtype.name} values")
        values = np.frombuffer(values, dtype)
    elif not isinstance(values, list):
        raise ContractError(f"columns.{name}", "must be a list")
    elif not set(map(type, values)) <= _PLAIN:  # numpy pads texts to the longest
        raise ContractError(f"columns.{name}", "must hold numbers")
    if len(values) > most:
        raise ContractError("columns", f"holds more than {most} records")
    return as_column(name, values)


def _require_known(name: Any, known: Iterable[str], place: str) -> None:
    if not isinstance(name, str) or name not in known:
        raise ContractError(f"{place}{name}", f"unknown field; known are {', '.join(known)}")


def _json_column(column: np.ndarray[Any, Any]) -> list[Any]:
    values: list[Any] = column.tolist()
    if column.dtype.kind == "f":
        return [None if math.isnan(value) else value for value in values]
    return values


@dataclass(frozen=True)
class EncodedBatch:
    """A message as `encode` writes it in msgpack, its columns still bytes.

    Several are merged at a small part of the cost of decoding them. Values are not checked.
    """

    plan_version: int
    dropped: int
    columns: dict[str, bytes]

    @classmethod
    def read(cls, message: bytes) -> EncodedBatch:
        """The batch in `message`. Raises `ContractError` if `encode` has not written it."""
        try:
            document = msgpack.unpackb(message)
        except (ValueError, msgpack.UnpackException) as error:
            raise ContractError("", f"the message is not valid msgpack: {error}") from None
        if not isinstance(document, dict) or document.keys() != set(_FIELDS):
            raise ContractError("", f"the message must have the fields {', '.join(_FIELDS)}")
        columns = document["columns"]
        if not isinstance(columns, dict) or columns.keys() | _SELDOM != COLUMNS.keys():
            raise ContractError("columns", f"must be {', '.join(COLUMNS)}")
        if not all(isinstance(column, bytes) for column in columns.values()):
            raise ContractError("columns", "must be bytes")
        if len({len(column) / COLUMNS[name][0].itemsize for name, column in columns.items()}) > 1:
            raise ContractError("columns", "must be of one length")
        for name in ("plan_version", "dropped"):
            if type(document[name]) is not int:
                raise ContractError(name, "must be a whole number")
        return cls(document["plan_version"], document["dropped"], columns)

    def __len__(self) -> int:
        return len(self.columns["rank"]) // COLUMNS["rank"][0].itemsize

    def column(self, name: str) -> bytes:
        """The values of a column, also of one that is left out."""
        found = self.columns.get(name)
        return np.full(len(self), np.nan, "<f8").tobytes() if found is None else found

    @staticmethod
    def merge(batches: Sequence[EncodedBatch]) -> bytes:
        """The message that holds all records of `batches`, which are of one plan version."""
        held = [name for name in COLUMNS if any(name in batch.columns for batch in batches)]
        document = {
            "version": VERSION,
            "plan_version": batches[0].plan_version,
            "dropped": sum(batch.dropped for batch in batches),
            "columns": {name: b"".join(batch.column(name) for batch in batches) for name in held},
        }
        packed: bytes = msgpack.packb(document)
        return packed
