"""Strict conversion between frozen dataclasses and plain JSON values.

Unknown, missing and ill-typed fields raise `ContractError` with the dotted path of the field,
so that a person who wrote the document by hand finds the place. A client of a newer sidecar skips
the unknown ones.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, cached_property
from typing import Any, TypeVar

from ._numbers import kind_name, number, whole_number
from .errors import ContractError

T = TypeVar("T")
OMIT_EMPTY = "omit empty"
"""In a field's metadata: documents leave it out where it is empty."""
_PLAIN = frozenset({int, float, str, bool, types.NoneType})


def to_json(value: Any) -> Any:
    """A dataclass, enum, tuple or mapping as dicts, lists, strings and numbers.

    Of a dataclass, the fields that its constructor takes.
    """
    kind: Any = type(value)
    if kind in _PLAIN:
        return value
    if (fields := _written_fields(kind)) is not None:
        held = ((name, getattr(value, name), may_lack) for name, may_lack in fields)
        return {name: to_json(item) for name, item, may_lack in held if item or not may_lack}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(to_json(key)): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    return value


@cache
def _written_fields(kind: type) -> tuple[tuple[str, bool], ...] | None:
    """Fields that the constructor of a dataclass takes, and whether documents leave out an empty
    one; None for other types."""
    if not dataclasses.is_dataclass(kind):
        return None
    return tuple((f.name, OMIT_EMPTY in f.metadata) for f in dataclasses.fields(kind) if f.init)


def from_json(cls: type[T], value: Any, path: str = "", *, skip_unknown: bool = False) -> T:
    """The instance of `cls` that `value` describes. Raises `ContractError` naming the field.

    skip_unknown  fields that are not known count for nothing, at any depth: those of a newer writer
    """
    try:
        return typing.cast(T, _converter(typing.cast(Hashable, cls), skip_unknown)(value))
    except ContractError as error:
        raise ContractError(_join(path, error.field), error.problem) from None


_Convert = Callable[[Any], Any]
"""Converts a JSON value. Raises `ContractError` with the path of the field within the value."""


@cache
def _converter(kind: Any, skip_unknown: bool) -> _Convert:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _optional(kind, args, skip_unknown)
    if origin is tuple:
        return _tuple(args, skip_unknown)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(args[0], args[1], skip_unknown)
    if dataclasses.is_dataclass(kind):
        return _DataclassConverter(kind, skip_unknown)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _enum(kind)
    scalars: dict[Any, _Convert] = {int: whole_number, float: number, Any: _any}
    return scalars.get(kind) or _instance(kind)


def _optional(kind: Any, args: tuple[Any, ...], skip_unknown: bool) -> _Convert:
    options = [option for option in args if option is not type(None)]
    if len(options) != 1 or len(args) != 2:
        raise AssertionError(f"{kind} is not a plain optional")
    convert = _converter(options[0], skip_unknown)
    return lambda value: None if value is None else convert(value)


def _within(place: str, convert: _Convert, value: Any) -> Any:
    """The converted value at a place of another one."""
    try:
        return convert(value)
    except ContractError as error:
        raise ContractError(_join(place, error.field), error.problem) from None


def _tuple(args: tuple[Any, ...], skip_unknown: bool) -> _Convert:
    is_open = len(args) == 2 and args[1] is Ellipsis
    converters = [_converter(kind, skip_unknown) for kind in (args[:1] if is_open else args)]

    def convert(value: Any) -> tuple[Any, ...]:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ContractError("", f"must be a list, not {kind_name(value)}")
        by_place = converters * len(value) if is_open else converters
        if len(by_place) != len(value):
            raise ContractError("", f"must hold {len(by_place)} values, not {len(value)}")
        try:
            return tuple(one(item) for one, item in zip(by_place, value, strict=True))
        except ContractError:  # of which place
            for i, (one, item) in enumerate(zip(by_place, value, strict=True)):
                _within(f"[{i}]", one, item)
            raise

    return convert


def _mapping(key_kind: Any, kind: Any, skip_unknown: bool) -> _Convert:
    convert_key, convert_item = _converter(key_kind, skip_unknown), _converter(kind, skip_unknown)

    def key_of(key: Any) -> Any:
        """JSON keys are strings; integer keys are written in decimal."""
        if key_kind is not int or not isinstance(key, str):
            return convert_key(key)
        try:
            return int(key)
        except ValueError:
            raise ContractError("", "the key must be a whole number") from None

    def convert(value: Any) -> dict[Any, Any]:
        if not isinstance(value, Mapping):
            raise ContractError("", f"must be an object, not {kind_name(value)}")
        return {
            _within(str(key), key_of, key): _within(str(key), convert_item, item)
            for key, item in value.items()
        }

    return convert


class _DataclassConverter:
    """Converts objects to instances of a dataclass, whose fields are looked at once it is used: it
    may hold others of its kind."""

    def __init__(self, cls: Any, skip_unknown: bool) -> None:
        self._cls, self._skip_unknown = cls, skip_unknown

    @cached_property
    def _fields(self) -> dict[str, _Convert]:
        hints = typing.get_type_hints(self._cls)
        taken = [f.name for f in dataclasses.fields(self._cls) if f.init]
        return {name: _converter(hints[name], self._skip_unknown) for name in taken}

    @cached_property
    def _required(self) -> list[str]:
        unset = dataclasses.MISSING
        return [
            f.name
            for f in dataclasses.fields(self._cls)
            if f.init and f.default is unset and f.default_factory is unset
        ]

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise ContractError("", f"must be an object, not {kind_name(value)}")
        fields = self._fields
        if self._skip_unknown:
            value = {key: value[key] for key in value if key in fields}
        for key in value:
            if key not in fields:
                known = ", ".join(fields)
                raise ContractError(str(key), f"unknown field; known are {known}")
        for name in self._required:
            if name not in value:
                raise ContractError(name, "is missing")
        return self._cls(**{key: _within(key, fields[key], value[key]) for key in value})


def _enum(kind: type[enum.Enum]) -> _Convert:
    def convert(value: Any) -> enum.Enum:
        try:
            return kind(value)
        except ValueError:
            known = ", ".join(str(member.value) for member in kind)
            raise ContractError("", f"must be one of {known}, not {value!r}") from None

    return convert


def _any(value: Any) -> Any:
    return value


def _instance(kind: Any) -> _Convert:
    words = {str: "a string", bool: "true or false"}.get(kind, kind)

    def convert(value: Any) -> Any:
        if not isinstance(value, kind):
            raise ContractError("", f"must be {words}, not {kind_name(value)}")
        return value

    return convert


def _join(path: str, name: str) -> str:
    if not path or not name:
        return path or name
    return f"{path}{name}" if name.startswith("[") else f"{path}.{name}"
