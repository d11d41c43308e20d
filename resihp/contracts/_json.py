"""Strict conversion between frozen dataclasses and plain JSON values.

Unknown, missing and ill-typed fields raise `ContractError` with the dotted path of the field,
so that a person who wrote the document by hand finds the place.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import types
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from .errors import ContractError

T = TypeVar("T")
_MOST = 2**63 - 1  # what other programs read as a whole number
OMIT_EMPTY = "omit empty"
"""In a field's metadata: documents leave it out where it is empty."""


def to_json(value: Any) -> Any:
    """A dataclass, enum, tuple or mapping as dicts, lists, strings and numbers.

    Of a dataclass, the fields that its constructor takes.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = ((f, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init)
        return {f.name: to_json(v) for f, v in held if v or OMIT_EMPTY not in f.metadata}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(to_json(key)): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    return value


def from_json(cls: type[T], value: Any, path: str = "") -> T:
    """The instance of `cls` that `value` describes. Raises `ContractError` naming the field."""
    return typing.cast(T, _convert(cls, value, path))


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _convert(kind: Any, value: Any, path: str) -> Any:
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return _convert_optional(kind, value, path)
    if origin is tuple:
        return _convert_tuple(typing.get_args(kind), value, path)
    if origin is not None and issubclass(origin, Mapping):
        return _convert_mapping(typing.get_args(kind), value, path)
    if dataclasses.is_dataclass(kind):
        return _convert_dataclass(kind, value, path)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _convert_enum(kind, value, path)
    return _convert_scalar(kind, value, path)


def _convert_optional(kind: Any, value: Any, path: str) -> Any:
    options = [option for option in typing.get_args(kind) if option is not type(None)]
    if value is None and len(options) < len(typing.get_args(kind)):
        return None
    if len(options) != 1:
        raise AssertionError(f"{kind} is not a plain optional")
    return _convert(options[0], value, path)


def _convert_tuple(args: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ContractError(path, f"must be a list, not {_name(value)}")
    if len(args) == 2 and args[1] is Ellipsis:
        args = (args[0],) * len(value)
    if len(args) != len(value):
        raise ContractError(path, f"must hold {len(args)} values, not {len(value)}")
    pairs = zip(args, value, strict=True)
    return tuple(_convert(kind, item, f"{path}[{i}]") for i, (kind, item) in enumerate(pairs))


def _convert_mapping(args: tuple[Any, ...], value: Any, path: str) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise ContractError(path, f"must be an object, not {_name(value)}")
    return {
        _key(args[0], key, path): _convert(args[1], item, _join(path, str(key)))
        for key, item in value.items()
    }


def _key(kind: Any, key: Any, path: str) -> Any:
    """JSON keys are strings; integer keys are written in decimal."""
    if kind is int and isinstance(key, str):
        try:
            return int(key)
        except ValueError:
            raise ContractError(_join(path, key), "the key must be a whole number") from None
    return _convert(kind, key, _join(path, str(key)))


def _convert_dataclass(cls: Any, value: Any, path: str) -> Any:
    if not isinstance(value, Mapping):
        raise ContractError(path, f"must be an object, not {_name(value)}")
    hints = _hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    for key in value:
        if key not in fields:
            known = ", ".join(fields)
            raise ContractError(_join(path, str(key)), f"unknown field; known are {known}")
    arguments = {}
    for name, field in fields.items():
        if name in value:
            arguments[name] = _convert(hints[name], value[name], _join(path, name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ContractError(_join(path, name), "is missing")
    try:
        return cls(**arguments)
    except ContractError as error:
        raise ContractError(_join(path, error.field), error.problem) from None


def _convert_enum(kind: type[enum.Enum], value: Any, path: str) -> enum.Enum:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(str(member.value) for member in kind)
        raise ContractError(path, f"must be one of {known}, not {value!r}") from None


def _convert_scalar(kind: Any, value: Any, path: str) -> Any:
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:  # a whole number beyond all floats
            number = math.inf
        if not math.isfinite(number):
            raise ContractError(path, "must be finite")
        return number
    if kind is int and _is_int(value) and not -_MOST <= value <= _MOST:
        raise ContractError(path, f"must be at most {_MOST}")
    if kind is Any or (_is_int(value) if kind is int else isinstance(value, kind)):
        return value
    words = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
    raise ContractError(path, f"must be {words.get(kind, kind)}, not {_name(value)}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _join(path: str, name: str) -> str:
    if not path or not name:
        return path or name
    return f"{path}{name}" if name.startswith("[") else f"{path}.{name}"


def _name(value: Any) -> str:
    return "null" if value is None else type(value).__name__
