"""Microbatch records: what one piece of work took, and how much work it held."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._numbers import make_plain, whole_number
from .errors import ContractError


class Op(IntEnum):
    """Kind of work that a record timed."""

    FORWARD = 0
    BACKWARD = 1
    OPTIMIZER = 2
    P2P = 3
    COLLECTIVE = 4
    DATA = 5


# Column name -> dtype, and the value that stands where a column was not given (None: required).
COLUMNS: dict[str, tuple[np.dtype[Any], float | None]] = {
    "rank": (np.dtype(np.int32), None),
    "step": (np.dtype(np.int64), None),
    "microbatch": (np.dtype(np.int32), None),
    "chunk": (np.dtype(np.int16), 0),
    "op": (np.dtype(np.uint8), None),
    "compute_ms": (np.dtype(np.float64), None),
    "wait_ms": (np.dtype(np.float64), np.nan),
    "tokens": (np.dtype(np.int64), -1),
    "sequences": (np.dtype(np.int64), -1),
    "sum_sq_len": (np.dtype(np.int64), -1),
    "max_len": (np.dtype(np.int64), -1),
    "peer": (np.dtype(np.int32), -1),
    "start_ms": (np.dtype(np.float64), np.nan),
}
MOST_STEP = 2**53
"""No step is later: JSON readers know whole numbers exactly up to here."""
MOST_DROPPED = 2**32 - 1
"""No message reports more dropped records, so that their sum over a job stays a 64-bit number."""
MOST_MS = 1e15
"""No time is longer (30,000 years): sums and squares of times stay finite."""
_AT_LEAST = {
    "rank": 0,
    "step": 0,
    "microbatch": -1,
    "chunk": 0,
    "tokens": -1,
    "sequences": -1,
    "sum_sq_len": -1,
    "max_len": -1,
    "peer": -1,
}
_AT_MOST = {"step": MOST_STEP, "op": int(max(Op))}
_MOST = {"plan_version": int(np.iinfo(np.int64).max), "dropped": MOST_DROPPED}


@dataclass(frozen=True, kw_only=True, eq=False)
class TelemetryBatch:
    """Equally long columns, one row per microbatch record.

    rank        global rank that did the work
    step        training step, counted from 0
    microbatch  index within the step of the replica; -1 where the record belongs to no microbatch
    chunk       model chunk within the stage (0 unless interleaved)
    op          `Op` codes
    compute_ms  the device's own time, waiting excluded
    wait_ms     time blocked on others; NaN where not measured
    tokens, sequences, sum_sq_len, max_len
                the work in it: tokens, number of sequences, sum of squared sequence lengths,
                longest sequence; -1 where not known
    peer        the other end of a P2P record; -1 where there is none or it is not known
    start_ms    time at which the work began, by any clock of the rank that never goes back; NaN
                where not known. Both ends of a transfer have it, so that the detector separates
                the transfer from the waiting; an end that only started to send has 0 `compute_ms`

    `plan_version` is the plan under which all of the records were made; `dropped` counts the
    records that the sender lost since its previous batch. Columns are converted to the dtypes of
    `COLUMNS` and made read-only. Raises `ContractError` naming the column.
    """

    rank: NDArray[np.int32]
    step: NDArray[np.int64]
    microbatch: NDArray[np.int32]
    op: NDArray[np.uint8]
    compute_ms: NDArray[np.float64]
    chunk: NDArray[np.int16] = None  # type: ignore[assignment]
    wait_ms: NDArray[np.float64] = None  # type: ignore[assignment]
    tokens: NDArray[np.int64] = None  # type: ignore[assignment]
    sequences: NDArray[np.int64] = None  # type: ignore[assignment]
    sum_sq_len: NDArray[np.int64] = None  # type: ignore[assignment]
    max_len: NDArray[np.int64] = None  # type: ignore[assignment]
    peer: NDArray[np.int32] = None  # type: ignore[assignment]
    start_ms: NDArray[np.float64] = None  # type: ignore[assignment]
    plan_version: int = 0
    dropped: int = 0

    def __post_init__(self) -> None:
        try:
            size = np.size(self.rank)
        except ValueError:  # rows of unlike lengths
            size = -1
        for name in COLUMNS:
            object.__setattr__(self, name, _column(name, getattr(self, name), size))
        _check_values(self)
        for name, most in _MOST.items():
            make_plain(self, whole_number, name, least=0, most=most)

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Take the values of a pickled batch or of a copied one, whose arrays can be written."""
        vars(self).update(state)
        for column in self.columns().values():
            column.flags.writeable = False

    def __len__(self) -> int:
        return int(self.rank.size)

    def columns(self) -> dict[str, NDArray[Any]]:
        """The columns by name, in the order of `COLUMNS`."""
        return {name: getattr(self, name) for name in COLUMNS}

    def select(self, rows: Any) -> TelemetryBatch:
        """The rows that a boolean mask, an index array or a slice picks."""
        columns = {name: column[rows] for name, column in self.columns().items()}
        return self._of_valid(columns, self.plan_version, self.dropped)

    @classmethod
    def _of_valid(
        cls, columns: Mapping[str, NDArray[Any]], plan_version: int, dropped: int
    ) -> TelemetryBatch:
        """A batch of rows of valid batches, which are not checked again."""
        batch = object.__new__(cls)
        for column in columns.values():
            column.flags.writeable = False
        vars(batch).update(columns, plan_version=plan_version, dropped=dropped)
        return batch

    @classmethod
    def empty(cls, *, plan_version: int = 0, dropped: int = 0) -> TelemetryBatch:
        """A batch without records."""
        none = {name: np.empty(0, dtype) for name, (dtype, _) in COLUMNS.items()}
        return cls(**none, plan_version=plan_version, dropped=dropped)

    @classmethod
    def concat(cls, batches: Iterable[TelemetryBatch]) -> TelemetryBatch:
        """All records of `batches`, which must be of one plan version, in order."""
        parts = list(batches)
        if not parts:
            return cls.empty()
        if len({part.plan_version for part in parts}) > 1:
            raise ContractError("plan_version", "batches of different plan versions do not mix")
        columns = {name: np.concatenate([getattr(p, name) for p in parts]) for name in COLUMNS}
        dropped = min(sum(part.dropped for part in parts), MOST_DROPPED)
        return cls._of_valid(columns, parts[0].plan_version, dropped)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TelemetryBatch):
            return NotImplemented
        return all(
            np.array_equal(getattr(self, f.name), getattr(other, f.name), equal_nan=True)
            if f.name in COLUMNS
            else getattr(self, f.name) == getattr(other, f.name)
            for f in fields(self)
        )

    __hash__ = None  # type: ignore[assignment]


def _column(name: str, value: Any, size: int) -> NDArray[Any]:
    dtype, default = COLUMNS[name]
    if value is None:
        if default is None:
            raise ContractError(name, "is missing")
        column = np.full(size, default, dtype)
    else:
        column = as_column(name, value)
    if column.ndim != 1:
        raise ContractError(name, f"must have one dimension, not {column.ndim}")
    if column.size != size:
        raise ContractError(name, f"has {column.size} rows where rank has {size}")
    column.flags.writeable = False
    return column


def as_column(name: str, value: Any) -> NDArray[Any]:
    """The values of a column in its dtype, in an array that nobody else can change.

    Raises `ContractError` naming the column.
    """
    dtype = COLUMNS[name][0]
    try:
        raw = np.asarray(value)
        if raw.dtype != dtype:
            return _converted(name, raw, dtype)
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, ContractError):
            raise
        raise ContractError(name, f"must hold {_words(dtype)}") from None
    is_own = isinstance(value, (list, tuple, range)) or isinstance(raw.base, bytes)
    return raw if is_own else raw.copy()


def _converted(name: str, raw: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    if raw.size == 0:
        return raw.astype(dtype)
    if raw.dtype == object:  # None stands for "not measured" in JSON
        raw = np.array([np.nan if item is None else item for item in raw], np.float64)
    if raw.dtype.kind not in "iuf" or (dtype.kind != "f" and raw.dtype.kind == "f"):
        raise ContractError(name, f"must hold {_words(dtype)}, not {raw.dtype}")
    if dtype.kind != "f":
        limits = np.iinfo(dtype)
        if int(raw.min()) < limits.min or int(raw.max()) > limits.max:
            raise ContractError(name, f"holds a value outside {limits.min}..{limits.max}")
    return raw.astype(dtype)


def _words(dtype: np.dtype[Any]) -> str:
    return "numbers" if dtype.kind == "f" else "whole numbers"


def _check_values(batch: TelemetryBatch) -> None:
    if not len(batch):
        return
    for name, least in _AT_LEAST.items():
        if int(getattr(batch, name).min()) < least:
            raise ContractError(name, f"holds a value below {least}")
    for name, most in _AT_MOST.items():
        if int(getattr(batch, name).max()) > most:
            raise ContractError(name, f"holds a value above {most}")
    # Comparisons with NaN are false.
    if not (batch.compute_ms.min() >= 0 and batch.compute_ms.max() <= MOST_MS):
        raise ContractError("compute_ms", f"must be finite, 0 or more and at most {MOST_MS:g}")
    if np.fmin.reduce(batch.wait_ms) < 0 or np.fmax.reduce(batch.wait_ms) > MOST_MS:
        raise ContractError(
            "wait_ms", f"must be 0 or more and at most {MOST_MS:g}, or NaN where not measured"
        )
    if np.fmax.reduce(np.abs(batch.start_ms)) > MOST_MS:
        raise ContractError("start_ms", f"must be within {MOST_MS:g}, or NaN where not known")
