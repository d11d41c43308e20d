"""State of a detector to bytes and back, exactly: msgpack with numpy arrays as raw bytes."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np

from resihp.contracts import ContractError

from .arrays import State

FORMAT = 6


def pack(state: State) -> bytes:
    """The bytes that `unpack` turns back."""
    packed: bytes = msgpack.packb({"format": FORMAT, "state": state}, default=_encode)
    return packed


def unpack(data: bytes) -> State:
    """What was packed. Raises `ContractError` for anything that `pack` did not write."""
    try:
        document = msgpack.unpackb(data, object_hook=_decode, strict_map_key=False)
        if document["format"] != FORMAT:
            raise ContractError("state", f"is of format {document['format']}, not {FORMAT}")
        state: State = document["state"]
    except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
        raise ContractError("state", f"is not a saved detector: {error}") from None
    return state


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        data = np.ascontiguousarray(value)
        return {"__array__": data.dtype.str, "shape": list(data.shape), "data": data.tobytes()}
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"cannot save {type(value).__name__}")


def _decode(value: dict[str, Any]) -> Any:
    if "__array__" not in value:
        return value
    flat = np.frombuffer(value["data"], np.dtype(value["__array__"]))
    return flat.reshape(value["shape"]).copy()
