"""Recorded operations as microbatch records.

| operation                                   | record     | compute_ms       | wait_ms   |
|---------------------------------------------|------------|------------------|-----------|
| forward-compute, backward-compute           | FORWARD, … | duration         | NaN       |
| forward-send, … backward-recv               | P2P        | transfer         | the rest  |
| grads-reduce-scatter, params-all-gather, …  | COLLECTIVE | transfer         | the rest  |
| optimizer                                   | OPTIMIZER  | duration         | NaN       |
| gc                                          | DATA       | duration         | NaN       |

A transfer lasts from the moment when the last of its ranks has started it. Garbage collection
stops the host and not the device, which is what DATA records stand for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from detector.whatif.dependencies import Dependencies
from detector.whatif.ops import COLLECTIVE, P2P, Floats, Kind, OpTable, Recording
from resihp.contracts import COLUMNS, Op

_OP = {
    Kind.FORWARD: Op.FORWARD,
    Kind.BACKWARD: Op.BACKWARD,
    Kind.OPTIMIZER: Op.OPTIMIZER,
    Kind.GC: Op.DATA,
    **dict.fromkeys(P2P, Op.P2P),
    **dict.fromkeys(COLLECTIVE, Op.COLLECTIVE),
}
_CODES = np.array([_OP[kind] for kind in Kind], np.uint8)


class RecordMaker:
    """Turns rows of a table of operations into records. `own_s` [N, D, T] is without waiting."""

    def __init__(
        self, ops: OpTable, recording: Recording, found: Dependencies, own_s: Floats
    ) -> None:
        self._ops, self._recording, self._found = ops, recording, found
        self._own_s = own_s.reshape(-1)
        self._waits = found.waits()
        served = found.serves
        self._microbatch = np.where(
            served >= 0, recording.microbatch[served], recording.microbatch
        )  # a transfer has that of the pass it serves

    def columns(self, rows: NDArray[np.intp]) -> dict[str, NDArray[Any]]:
        """The records of some rows, with `plan_version` 0 throughout."""
        op, replica, _ = np.unravel_index(self._recording.cell[rows], self._recording.start_s.shape)
        real = ~(self._found.idle | self._found.lone)[op]
        rows, op, replica = rows[real], op[real], replica[real]
        ops = self._ops.select(rows)
        own = self._own_s[self._recording.cell[rows]]
        known = self._waits[op] & np.isfinite(own)
        own = np.where(known, np.clip(own, 0.0, ops.duration_s), ops.duration_s)
        columns = {
            "rank": ops.rank,
            "step": ops.step,
            "microbatch": self._microbatch[op],
            "chunk": np.maximum(ops.chunk, 0),
            "op": _CODES[ops.kind],
            "compute_ms": own * 1e3,
            "wait_ms": np.where(known, (ops.duration_s - own) * 1e3, np.nan),
            "peer": self._peers(op, replica),
        }
        found: dict[str, NDArray[Any]] = {
            name: columns[name].astype(dtype, copy=False)
            if name in columns
            else np.full(rows.size, -1, dtype)
            for name, (dtype, _) in COLUMNS.items()
        }
        found["plan_version"] = np.zeros(rows.size, np.int64)
        return found

    def _peers(self, op: NDArray[np.intp], replica: NDArray[np.intp]) -> NDArray[np.integer]:
        """Rank at the other end of a transfer; -1 where there is none."""
        peer = self._found.peer[op]
        return np.where(peer >= 0, self._recording.rank[replica, self._recording.stage[peer]], -1)
