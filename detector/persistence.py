"""State of objects to bytes and back, exactly: declared attributes, packed with msgpack."""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections import deque
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

import msgpack
import numpy as np

from resihp.contracts import ContractError

State = dict[str, Any]
"""Saved attributes: arrays, numbers, strings, and lists and dicts of them."""

FORMAT = 8


class Persistent:
    """Base class of objects whose state is some of their attributes.

    A class names them in `_saved`. An attribute that is itself `Persistent` is loaded in place. Any
    other is restored by its annotation in the class body, which may combine dataclasses, named
    tuples, enums, `dict`, `list`, `tuple`, `set`, `deque` and optionals of them; a deque keeps
    its limit. An attribute without annotation is restored as it was packed, which is right for
    arrays, numbers and strings. What the constructor derives from its arguments is not saved.

    >>> class Counter(Persistent):
    ...     _saved = ("seen", "total")
    ...     seen: dict[int, tuple[str, ...]]
    ...     def __init__(self) -> None:
    ...         self.seen, self.total = {}, 0
    >>> counter, other = Counter(), Counter()
    >>> counter.seen[3] = ("a", "b")
    >>> other.load(unpack(pack(counter.state())))
    >>> other.seen
    {3: ('a', 'b')}
    """

    _saved: ClassVar[tuple[str, ...]] = ()

    def state(self) -> State:
        """The saved attributes by name, for `load`; arrays are not copied."""
        return {name: _plain(getattr(self, name)) for name in self._saved}

    def load(self, state: State) -> None:
        """Restores what `state` returned on an object that was made with the same arguments."""
        cls: Any = type(self)
        hints = _hints(cls)
        for name in self._saved:
            value, current = state[name], getattr(self, name)
            if isinstance(current, Persistent) and value is not None:
                current.load(value)
            else:
                restored = _restored(hints.get(name, Any), value)
                if isinstance(current, deque):
                    restored = deque(restored, current.maxlen)
                setattr(self, name, restored)


def pack(state: State) -> bytes:
    """The bytes that `unpack` turns back."""
    packed: bytes = msgpack.packb({"format": FORMAT, "state": state}, default=_encode)
    return packed


def unpack(data: bytes) -> State:
    """The state that was packed. Raises `ContractError` for bytes that `pack` did not write."""
    try:
        document = msgpack.unpackb(data, object_hook=_decode, strict_map_key=False)
        if document["format"] != FORMAT:
            raise ContractError("state", f"is of format {document['format']}, not {FORMAT}")
        state: State = document["state"]
    except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
        raise ContractError("state", f"is not a saved state: {error}") from None
    return state


def _plain(value: Any) -> Any:
    """A value as arrays, numbers, strings, lists and dicts."""
    if isinstance(value, Persistent):
        return value.state()
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: _plain(getattr(value, name)) for name in _fields(type(value))}
    if isinstance(value, Mapping):
        if all(isinstance(key, int | str) for key in value):
            return {key: _plain(item) for key, item in value.items()}
        return [[_plain(key), _plain(item)] for key, item in value.items()]
    if isinstance(value, set | frozenset):
        return sorted(_plain(item) for item in value)
    if isinstance(value, list | tuple | deque):
        return [_plain(item) for item in value]
    return value


def _restored(kind: Any, value: Any) -> Any:
    """The value of type `kind` of which `_plain` made `value`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if value is None:
        return None
    if origin in (typing.Union, types.UnionType):
        return _restored(next(k for k in arguments if k is not types.NoneType), value)
    if origin is None:
        return _restored_plain(kind, value)
    if issubclass(origin, Mapping):
        pairs = value.items() if isinstance(value, dict) else value
        key_kind, item_kind = arguments
        return {_restored(key_kind, k): _restored(item_kind, item) for k, item in pairs}
    if origin is tuple and arguments[-1] is not Ellipsis:
        return tuple(_restored(k, item) for k, item in zip(arguments, value, strict=True))
    if issubclass(origin, list | tuple | set | frozenset | deque):
        return origin(_restored(arguments[0], item) for item in value)
    return value  # arrays


def _restored_plain(kind: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = _hints(kind)
        return kind(**{name: _restored(hints[name], item) for name, item in value.items()})
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(value)
    if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        kinds = _hints(kind).values()
        return kind(*(_restored(k, item) for k, item in zip(kinds, value, strict=True)))
    return value


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


@cache
def _fields(cls: type) -> tuple[str, ...]:
    """Fields that the constructor of a dataclass takes."""
    return tuple(field.name for field in dataclasses.fields(cls) if field.init)


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        data = np.ascontiguousarray(value)
        return {"__array__": data.dtype.str, "shape": list(data.shape), "data": data.tobytes()}
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"cannot save {type(value).__name__}")


def _decode(value: dict[Any, Any]) -> Any:
    if "__array__" not in value:
        return value
    flat = np.frombuffer(value["data"], np.dtype(value["__array__"]))
    return flat.reshape(value["shape"]).copy()
