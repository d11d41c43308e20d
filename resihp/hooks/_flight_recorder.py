"""Last collective of this process, from the flight recorder of torch.distributed.

The recorder keeps the newest collectives of all process groups (`TORCH_FR_BUFFER_SIZE`, 2,000 by
default). It is private to torch: where it is missing or reads otherwise, nothing is said.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""Functions that return the record of NCCL's collectives, and of all other backends'."""
_MOST_CHARACTERS = 200


def last_collective() -> str:
    """Describe the oldest collective that has not completed, else the newest one; "" without any.

    Takes some milliseconds: to be called when a rank hangs.
    """
    entries = [entry for name in _DUMPS for entry in _recorded(name)]
    if not entries:
        return ""
    pending = [entry for entry in entries if not _is_over(entry)]
    if pending:
        oldest = min(pending, key=_created_ns)
        return f"{_name(oldest)} has not completed"[:_MOST_CHARACTERS]
    newest = max(entries, key=_created_ns)
    return f"{_name(newest)} has completed, and none is under way"[:_MOST_CHARACTERS]


def _recorded(name: str) -> list[Mapping[str, Any]]:
    torch = sys.modules.get("torch")
    dump = getattr(getattr(getattr(torch, "_C", None), "_distributed_c10d", None), name, None)
    if dump is None:
        return []
    entries: list[Mapping[str, Any]] = json.loads(dump(True, False)).get("entries", [])
    return entries


def _is_over(entry: Mapping[str, Any]) -> bool:
    """Return whether the collective has ended; that of gloo is only retired."""
    return entry["state"] == "completed" or bool(entry["retired"])


def _created_ns(entry: Mapping[str, Any]) -> int:
    return int(entry["time_created_ns"])


def _name(entry: Mapping[str, Any]) -> str:
    op = str(entry["profiling_name"]).split(":")[-1]
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    name, description = entry["process_group"]
    return f"{op} number {number} of process group {description or name}"
