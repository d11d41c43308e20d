"""What a step says of every rank: observed over expected compute time."""

from __future__ import annotations

from dataclasses import dataclass

from ..base.arrays import Floats, Ints


@dataclass(frozen=True)
class FixedShare:
    """The part of the expected time that does not grow with the work; arrays over ranks.

    mean     share of the expected time, over the rank's records
    unsure   standard error of that share
    both     sum over the records of (share - mean) * residual
    square   sum over the records of (share - mean)**2
    noise    standard deviation of a record's residual
    """

    mean: Floats
    unsure: Floats
    both: Floats
    square: Floats
    noise: float


@dataclass(frozen=True)
class StepResidual:
    """What one step says of every rank; arrays over ranks.

    value   log of observed over expected compute time; NaN where there is none
    error   standard error that the expectation and the number of records leave
    records number of records behind it
    spread  robust standard deviation of single records around their rank's value
    wider   how much further apart healthy ranks lie than devices: witnesses bring their own offsets
    fixed   what of it does not grow with the work; None where lengths tell
    """

    value: Floats
    error: Floats
    records: Ints
    spread: float
    wider: float = 1.0
    fixed: FixedShare | None = None
