"""Checks of the numbers and names in contracts. What passes is a plain `int` or `float`: numpy's
numbers are no JSON, and a fraction is no count. Members of enums may be given by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from math import inf
from numbers import Integral, Real
from typing import Any, TypeVar

from resihp.formatting import listed

from .errors import ContractError

T = TypeVar("T")
Named = TypeVar("Named", bound=StrEnum)
_MOST = 2**63 - 1  # what other programs read as a whole number


def make_plain(
    owner: object,
    check: Callable[..., object],
    *fields: str,
    optional: bool = False,
    **bounds: float | str,
) -> None:
    """Put what `check` makes of them in place of the fields of a frozen dataclass; None stays where
    it is `optional`. Raises `ContractError` naming the field."""
    for field in fields:
        value = getattr(owner, field)
        if value is None and optional:
            continue
        try:
            plain = check(value, **bounds)
        except ContractError as error:
            raise ContractError(field, error.problem) from None
        if plain is not value:
            object.__setattr__(owner, field, plain)


def checked(field: str, check: Callable[..., T], value: object, **bounds: float | str) -> T:
    """`check` of a value. Raises `ContractError` naming the field."""
    try:
        return check(value, **bounds)
    except ContractError as error:
        raise ContractError(field, error.problem) from None


def whole_number(value: object, *, least: int = -_MOST, most: int = _MOST) -> int:
    """The plain `int` of a whole number within bounds; 4.0 is none. Raises `ContractError`."""
    if type(value) is not int:
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise ContractError("", f"must be a whole number, not {_shown(value)}")
        value = int(value)
    if not least <= value <= most:
        bound = f"at most {most}" if value > most else f"{least} or more"
        raise ContractError("", f"must be {bound}, not {value}")
    return value


def whole_numbers(values: Iterable[Any], *, least: int = -_MOST) -> tuple[int, ...]:
    """The plain `int`s of whole numbers within bounds. Raises `ContractError`."""
    plain: tuple[Any, ...] = values if isinstance(values, tuple) else tuple(values)
    if set(map(type, plain)) == {int} and least <= min(plain) and max(plain) <= _MOST:
        return plain  # in layouts of many stages nearly all are
    return tuple(whole_number(value, least=least) for value in plain)


def number(
    value: object,
    *,
    least: float = -inf,
    above: float = -inf,
    most: float = inf,
    what: str = "a number",
) -> float:
    """The plain `float` of a finite number within bounds. Raises `ContractError`."""
    plain = value
    if type(value) is not float and isinstance(value, (int, Real)) and type(value) is not bool:
        try:
            plain = float(value)
        except OverflowError:  # a whole number beyond all floats
            plain = inf
    if type(plain) is float and least <= plain <= most and above < plain < inf:
        return plain
    bounds = ["finite"]
    if above > -inf:
        bounds.append(f"above {above:g}")
    elif least > -inf:
        bounds.append(f"{least:g} or more")
    if most < inf:
        bounds.append(f"at most {most:g}")
    raise ContractError("", f"must be {what}, {listed(bounds)}, not {_shown(value)}")


def named(kind: type[Named]) -> Callable[[str], Named]:
    """Check for members of an enum, which may be given by name; it raises `ContractError`."""

    def check(value: str) -> Named:
        try:
            return kind(value)
        except ValueError:
            shown = f"must be one of {', '.join(kind)}, not {value!r}"
            raise ContractError("", shown) from None

    return check


def kind_name(value: object) -> str:
    """Name of the type of a JSON value."""
    return "null" if value is None else type(value).__name__


def _shown(value: object) -> str:
    return str(value) if isinstance(value, Real) else kind_name(value)
