"""A sensor: one quantity of the host or the accelerator that can be read at any time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto


class Quantity(Enum):
    """Meaning of what a sensor reads.

    TOTAL   a count since some time; a sample holds its growth per second
    TIME    the same of seconds; a sample holds the share of its time by which it grew, at most 1
    LEVEL   a present value; a sample holds its mean
    EVENTS  a code that is read once, 0 for none; a sample holds the last one
    """

    TOTAL = auto()
    TIME = auto()
    LEVEL = auto()
    EVENTS = auto()


@dataclass(frozen=True)
class Sensor:
    """One sensor; `name` is a field of `SensorSample`.

    `read` returns None while there is nothing to read, and raises one of `absent` where there is
    no such sensor on this machine; any other exception is a failure.
    """

    name: str
    quantity: Quantity
    read: Callable[[], float | None]
    absent: tuple[type[Exception], ...] = (OSError,)
