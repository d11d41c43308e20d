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

from detector.whatif.dependencies import Dependencies, transfer_seconds
from detector.whatif.ops import COLLECTIVE, P2P, Kind, OpTable, Recording
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


def telemetry_columns(
    ops: OpTable, recording: Recording, found: Dependencies
) -> dict[str, NDArray[Any]]:
    """The records of a table of operations, with `plan_version` 0 throughout."""
    template = recording.cell // int(np.prod(recording.start_s.shape[1:]))
    waits = found.waits()[template]
    own = transfer_seconds(recording, found).reshape(-1)[recording.cell]
    known = waits & np.isfinite(own)
    own = np.where(known, np.clip(own, 0.0, ops.duration_s), ops.duration_s)
    columns = {
        "rank": ops.rank,
        "step": ops.step,
        "microbatch": _microbatches(recording, found)[template],
        "chunk": np.maximum(ops.chunk, 0),
        "op": _CODES[ops.kind],
        "compute_ms": own * 1e3,
        "wait_ms": np.where(known, (ops.duration_s - own) * 1e3, np.nan),
        "peer": _peers(recording, found),
    }
    keep = ~found.idle[template]
    size = int(keep.sum())
    out: dict[str, NDArray[Any]] = {
        name: columns[name][keep].astype(dtype) if name in columns else np.full(size, -1, dtype)
        for name, (dtype, _) in COLUMNS.items()
    }
    out["plan_version"] = np.zeros(size, np.int64)
    return out


def _microbatches(recording: Recording, found: Dependencies) -> NDArray[np.integer]:
    """Microbatch [N] of every operation; a transfer has that of the pass it serves."""
    served = found.serves
    return np.where(served >= 0, recording.microbatch[served], recording.microbatch)


def _peers(recording: Recording, found: Dependencies) -> NDArray[np.integer]:
    """Rank at the other end of every row's transfer; -1 where there is none."""
    operation, replica, _ = np.unravel_index(recording.cell, recording.start_s.shape)
    peer = found.peer[operation]
    return np.where(peer >= 0, recording.rank[replica, recording.stage[peer]], -1)
