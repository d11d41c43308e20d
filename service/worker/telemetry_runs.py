"""Telemetry messages joined into runs, each of which a session applies as one batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import ContractError, TelemetryBatch
from resihp.contracts.codec import EncodedBatch, decode
from resihp.contracts.telemetry import COLUMNS

_DTYPES = {name: dtype.newbyteorder("<") for name, (dtype, _) in COLUMNS.items()}


@dataclass(frozen=True)
class TelemetryPart:
    """One message; the values of its columns are checked when a run is joined.

    ranks  those that its records are of
    """

    plan_version: int
    columns: dict[str, NDArray[Any]]
    ranks: frozenset[int]

    @classmethod
    def of(cls, body: bytes) -> TelemetryPart:
        """The message in `body`. Raises `ContractError` naming the field that is wrong."""
        try:
            plain = EncodedBatch.read(body)
        except ContractError:  # columns left out or given as lists, or an error to be named
            batch = decode(body)
            columns, version = batch.columns(), batch.plan_version
        else:
            version = plain.plan_version
            columns = {name: np.frombuffer(plain.column(name), _DTYPES[name]) for name in COLUMNS}
        return cls(version, columns, frozenset(columns["rank"].tolist()))

    def __len__(self) -> int:
        return int(self.columns["rank"].size)


def runs(parts: Iterable[TelemetryPart]) -> Iterator[list[TelemetryPart]]:
    """Consecutive parts of one plan in which no rank occurs twice.

    The order of the messages of one rank matters: a step is closed without a lost record, and a
    restart of the job is recognised, by the messages that follow. Messages of different ranks
    overtake each other anyway.
    """
    run: list[TelemetryPart] = []
    seen: set[int] = set()
    for part in parts:
        if run and (part.plan_version != run[0].plan_version or not seen.isdisjoint(part.ranks)):
            yield run
            run, seen = [], set()
        run.append(part)
        seen |= part.ranks
    if run:
        yield run


def joined(run: Sequence[TelemetryPart]) -> TelemetryBatch:
    """All records of a run, which is not empty. Raises `ContractError`."""
    columns: dict[str, Any] = {
        name: np.concatenate([part.columns[name] for part in run]) if len(run) > 1 else first
        for name, first in run[0].columns.items()
    }
    return TelemetryBatch(**columns, plan_version=run[0].plan_version)
