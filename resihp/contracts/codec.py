"""Wire form of a `TelemetryBatch`: one versioned document, the same in JSON and in msgpack.

    {"version": 1, "plan_version": 0, "dropped": 0, "columns": {"rank": [0, 0], "step": [7, 7], …}}

In msgpack a column may also be the little-endian bytes of its dtype, which is what `encode`
writes: it is an order of magnitude cheaper on the trainer's side. NaN is `null` in JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgpack
import numpy as np

from .errors import ContractError
from .telemetry import COLUMNS, TelemetryBatch

VERSION = 1
_FIELDS = ("version", "plan_version", "dropped", "columns")


class WireFormat(StrEnum):
    """Media types of a telemetry message."""

    JSON = "application/json"
    MSGPACK = "application/msgpack"


def encode(batch: TelemetryBatch, form: WireFormat = WireFormat.MSGPACK) -> bytes:
    """The message that holds `batch`."""
    head = {"version": VERSION, "plan_version": batch.plan_version, "dropped": batch.dropped}
    if form is WireFormat.JSON:
        columns: dict[str, Any] = {n: _json_column(c) for n, c in batch.columns().items()}
        return json.dumps({**head, "columns": columns}, separators=(",", ":")).encode()
    columns = {
        name: column.astype(column.dtype.newbyteorder("<"), copy=False).tobytes()
        for name, column in batch.columns().items()
    }
    packed: bytes = msgpack.packb({**head, "columns": columns})
    return packed


def decode(
    message: bytes, form: WireFormat = WireFormat.MSGPACK, *, max_records: int | None = None
) -> TelemetryBatch:
    """The batch in `message`. Raises `ContractError` naming the field that is wrong."""
    document = _parse(message, form)
    if not isinstance(document, Mapping):
        raise ContractError("", "the message must be an object")
    for name in document:
        if name not in _FIELDS:
            raise ContractError(str(name), f"unknown field; known are {', '.join(_FIELDS)}")
    for name in ("version", "columns"):
        if name not in document:
            raise ContractError(name, "is missing")
    if document["version"] != VERSION:
        raise ContractError("version", f"must be {VERSION}, not {document['version']!r}")
    columns = _columns(document["columns"])
    if max_records is not None and len(columns["rank"]) > max_records:
        raise ContractError("columns", f"holds more than {max_records} records")
    return TelemetryBatch(
        **columns,
        plan_version=document.get("plan_version", 0),
        dropped=document.get("dropped", 0),
    )


def _parse(message: bytes, form: WireFormat) -> Any:
    try:
        if form is WireFormat.JSON:
            return json.loads(message)
        return msgpack.unpackb(message)
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        name = "JSON" if form is WireFormat.JSON else "msgpack"
        raise ContractError("", f"the message is not valid {name}: {error}") from None


def _columns(columns: Any) -> dict[str, Any]:
    if not isinstance(columns, Mapping):
        raise ContractError("columns", "must be an object")
    for name in columns:
        if name not in COLUMNS:
            raise ContractError(
                f"columns.{name}", f"unknown column; known are {', '.join(COLUMNS)}"
            )
    for name, (_, default) in COLUMNS.items():
        if default is None and name not in columns:
            raise ContractError(f"columns.{name}", "is missing")
    return {name: _unpack(name, column) for name, column in columns.items()}


def _unpack(name: str, column: Any) -> Any:
    dtype = COLUMNS[name][0].newbyteorder("<")
    if isinstance(column, bytes):
        if len(column) % dtype.itemsize:
            raise ContractError(f"columns.{name}", f"is not a whole number of {dtype.name} values")
        return np.frombuffer(column, dtype)
    if not isinstance(column, list):
        raise ContractError(f"columns.{name}", "must be a list")
    return column


def _json_column(column: np.ndarray[Any, Any]) -> list[Any]:
    values: list[Any] = column.tolist()
    if column.dtype.kind == "f":
        return [None if math.isnan(value) else value for value in values]
    return values
