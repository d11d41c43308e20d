"""State that is equal on all ranks: completed steps, optimizer scalars, data cursor."""

from __future__ import annotations

import io
from typing import Any

import torch

from ..process_groups.abortable import AbortableProcessGroup
from .data import Cursor
from .setup import Setup
from .shard import Shard, scalar_table


def distribute_replicated_state(
    group: AbortableProcessGroup,
    setup: Setup,
    completed: int,
    *,
    old: Shard | None,
    new: Shard | None,
    source: int,
) -> int:
    """Distribute the replicated state over `group`; collective. Returns the completed steps.

    Ranks outside the old layout (`old` is None) receive all of it. `source` is a rank inside, the
    same on all ranks.
    """
    table = old.scalars() if old is not None else scalar_table(setup.model, setup.optimizer)
    known = torch.cat([torch.tensor([completed], dtype=torch.float64), table.flatten()])
    known = group.all_reduce_max(known)
    completed = int(known[0])
    if new is not None:
        new.set_scalars(known[1:].view_as(table), completed)
    if isinstance(setup.data, Cursor):
        state = _broadcast(group, setup.data.state_dict(), source)
        if old is None:
            setup.data.load_state_dict(state)
    return completed


def _broadcast(group: AbortableProcessGroup, state: dict[str, Any], source: int) -> dict[str, Any]:
    """Return the `state` of rank `source`."""
    written = io.BytesIO()
    torch.save(state, written)
    packed = torch.frombuffer(bytearray(written.getvalue()), dtype=torch.uint8)
    length = int(group.broadcast(torch.tensor([len(packed)]), source))
    if len(packed) != length:
        packed = torch.empty(length, dtype=torch.uint8)
    group.broadcast(packed, source)
    loaded: dict[str, Any] = torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True)
    return loaded
