"""Recorded operations as microbatch records.

| operation                                   | record     | compute_ms       | wait_ms   |
|---------------------------------------------|------------|------------------|-----------|
| forward-compute, backward-compute           | FORWARD, … | duration         | NaN       |
| forward-send, … backward-recv               | P2P        | transfer         | the rest  |
| grads-reduce-scatter, params-all-gather, …  | COLLECTIVE | transfer         | the rest  |
| optimizer                                   | OPTIMIZER  | duration         | NaN       |
| gc                                          | DATA       | duration         | NaN       |

A transfer lasts from the moment when the last of its ranks has started it. Garbage collection
stops the host and not the device, as DATA records do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detector.whatif.dependencies import Dependencies
from detector.whatif.operations import COLLECTIVE, P2P, Floats, OpGrid, OpKind, OpTable
from resihp.contracts import COLUMNS, Op

_OP = {
    OpKind.FORWARD: Op.FORWARD,
    OpKind.BACKWARD: Op.BACKWARD,
    OpKind.OPTIMIZER: Op.OPTIMIZER,
    OpKind.GC: Op.DATA,
    **dict.fromkeys(P2P, Op.P2P),
    **dict.fromkeys(COLLECTIVE, Op.COLLECTIVE),
}
_CODES = np.array([_OP[kind] for kind in OpKind], np.uint8)


@dataclass(frozen=True, eq=False)
class Rows:
    """Columns of a table that its `OpGrid` does not hold.

    ranks       global ranks that were recorded, in ascending order
    rank        of every row; None where one rank was recorded at each place
    duration_s  of every row; None where each cell was recorded once
    """

    ranks: tuple[int, ...]
    rank: NDArray[np.integer] | None
    duration_s: Floats | None

    @classmethod
    def of(cls, ops: OpTable, recording: OpGrid) -> Rows:
        """Of the table that the recording was made of."""
        ranks = tuple(np.unique(ops.rank).tolist())
        places = int(np.count_nonzero(recording.rank >= 0))
        alone = len(ranks) == places == np.unique(recording.rank[recording.rank >= 0]).size
        once = np.count_nonzero(~np.isnan(recording.duration_s)) == len(ops)
        return cls(ranks, None if alone else ops.rank, None if once else ops.duration_s)


class RecordMaker:
    """Turns recorded operations into records. `own_s` [N, D, T] is without waiting."""

    def __init__(self, rows: Rows, recording: OpGrid, found: Dependencies, own_s: Floats) -> None:
        self._rows, self._recording, self._found = rows, recording, found
        self._own_s = own_s.reshape(-1)
        self._duration_s = recording.duration_s.reshape(-1)
        self._waits = found.waits()
        served = found.serves
        self._microbatch = np.where(
            served >= 0, recording.microbatch[served], recording.microbatch
        )  # a transfer has that of the pass it serves

    def columns(self, rows: NDArray[np.intp] | slice) -> dict[str, NDArray[Any]]:
        """The records of some rows, with `plan_version` 0 throughout."""
        recording, cell = self._recording, self._recording.cell[rows]
        op, replica, step = np.unravel_index(cell, recording.start_s.shape)
        whole = self._duration_s[cell]
        if self._rows.duration_s is not None:
            whole = self._rows.duration_s[rows]
        rank = recording.rank[replica, recording.stage[op]]
        if self._rows.rank is not None:
            rank = self._rows.rank[rows]
        own = self._own_s[cell]
        known = self._waits[op] & np.isfinite(own)
        own = np.where(known, np.clip(own, 0.0, whole), whole)
        columns = {
            "rank": rank,
            "step": recording.steps[step],
            "microbatch": self._microbatch[op],
            "chunk": np.maximum(recording.chunk[op], 0),
            "op": _CODES[recording.kind[op]],
            "compute_ms": own * 1e3,
            "wait_ms": np.where(known, (whole - own) * 1e3, np.nan),
            "peer": self._peers(op, replica),
        }
        real = ~(self._found.idle | self._found.lone)[op]
        found: dict[str, NDArray[Any]] = {
            name: columns[name][real].astype(dtype, copy=False)
            if name in columns
            else np.full(np.count_nonzero(real), -1, dtype)
            for name, (dtype, _) in COLUMNS.items()
        }
        found["plan_version"] = np.zeros(np.count_nonzero(real), np.int64)
        return found

    def _peers(self, op: NDArray[np.intp], replica: NDArray[np.intp]) -> NDArray[np.integer]:
        """Rank at the other end of a transfer; -1 where there is none."""
        peer = self._found.peer[op]
        return np.where(peer >= 0, self._recording.rank[replica, self._recording.stage[peer]], -1)
