"""State of objects to bytes and back, exactly: declared attributes, packed with msgpack."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import itertools
import types
import typing
from collections import deque
from collections.abc import Mapping
from functools import cache, partial
from typing import Any, ClassVar

import msgpack
import numpy as np

from resihp.contracts import ContractError

State = dict[str, Any]
"""Saved attributes: arrays, numbers, strings, and lists and dicts of them."""

FORMAT = 29
ARRAY = "array:"
"""Beginning of the names of large arrays."""
_LARGE_BYTES = 1 << 14


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


def pack(state: State, arrays: dict[str, bytes] | None = None) -> bytes:
    """The bytes that `unpack` turns back.

    Large arrays are put into `arrays`, where given, by a name that depends on their content alone:
    what has not changed since another `pack` has the name that it had.
    """
    encode = partial(_encode, arrays)
    packed: bytes = msgpack.packb({"format": FORMAT, "state": state}, default=encode)
    return packed


def unpack(data: bytes, arrays: Mapping[str, bytes] = types.MappingProxyType({})) -> State:
    """The state that was packed, of which `arrays` holds the large ones by name. Raises
    `ContractError` for bytes that `pack` did not write, and if an array is missing."""
    try:
        decode = partial(_decode, arrays)
        document = msgpack.unpackb(data, object_hook=decode, strict_map_key=False)
        if document["format"] != FORMAT:
            raise ContractError("state", f"is of format {document['format']}, not {FORMAT}")
        state: State = document["state"]
    except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
        raise ContractError("state", f"is not a saved state: {error}") from None
    return state


_AS_THEY_ARE = frozenset({int, float, str, bool, bytes, types.NoneType, np.ndarray})


def _plain(value: Any) -> Any:
    """A value as arrays, numbers, strings, lists and dicts."""
    kind: Any = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if (names := _field_names(kind)) is not None:
        return {name: _plain(getattr(value, name)) for name in names}
    match value:
        case Persistent():
            value = value.state()
        case enum.Enum():
            value = value.value
        case dict() if all(isinstance(key, int | str) for key in value):
            value = {key: _plain(item) for key, item in value.items()}
        case Mapping():
            value = [[_plain(key), _plain(item)] for key, item in value.items()]
        case set() | frozenset():
            value = sorted(_plain(item) for item in value)
        case list() | tuple() | deque():
            value = [_plain(item) for item in value]
    return value


@cache
def _field_names(kind: type) -> tuple[str, ...] | None:
    """Fields that the constructor of a dataclass takes; None for other types."""
    if not dataclasses.is_dataclass(kind) or issubclass(kind, Persistent):
        return None
    return tuple(field.name for field in dataclasses.fields(kind) if field.init)


def _restored(kind: Any, value: Any) -> Any:
    """The value of type `kind` of which `_plain` made `value`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if value is None or kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _restored(next(k for k in arguments if k is not types.NoneType), value)
    if origin is not None and issubclass(origin, Mapping):
        pairs = value.items() if isinstance(value, dict) else value
        return {_restored(arguments[0], k): _restored(arguments[1], item) for k, item in pairs}
    if origin is not None and issubclass(origin, list | tuple | set | frozenset | deque):
        uniform = origin is not tuple or arguments[-1] is Ellipsis
        kinds = itertools.repeat(arguments[0]) if uniform else arguments
        return origin(_restored(k, item) for k, item in zip(kinds, value, strict=False))
    return _restored_object(kind, value) if isinstance(kind, type) else value


def _restored_object(kind: Any, value: Any) -> Any:
    """A dataclass, named tuple or enum; any other value as it is."""
    if issubclass(kind, enum.Enum):
        return kind(value)
    hints = _hints(kind)
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        items = zip(hints.values(), value, strict=True)
        return kind(*(_restored(hint, item) for hint, item in items))
    if "__dataclass_fields__" in vars(kind):
        return kind(**{name: _restored(hints[name], item) for name, item in value.items()})
    return value


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _encode(arrays: dict[str, bytes] | None, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        content = value.tobytes()
        kept: bytes | str = content
        if arrays is not None and len(content) >= _LARGE_BYTES:
            kept = ARRAY + hashlib.blake2b(content, digest_size=16).hexdigest()
            arrays[kept] = content
        return {"__array__": value.dtype.str, "shape": list(value.shape), "data": kept}
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"cannot save {type(value).__name__}")


def _decode(arrays: Mapping[str, bytes], value: dict[Any, Any]) -> Any:
    if "__array__" not in value:
        return value
    content = value["data"]
    content = arrays[content] if isinstance(content, str) else content
    flat = np.frombuffer(content, np.dtype(value["__array__"]))
    return flat.reshape(value["shape"]).copy()
