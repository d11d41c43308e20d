"""State that is equal on all ranks: completed steps, optimizer scalars, data cursor."""

from __future__ import annotations

import io

import torch

from ..process_groups.abortable import AbortableProcessGroup
from ..process_groups.byte_collectives import broadcast_bytes
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
    known = group.all_reduce_max(known.to(group.device)).cpu()
    completed = int(known[0])
    if new is not None:
        new.set_scalars(known[1:].view_as(table), completed)
    if isinstance(setup.data, Cursor):
        written = io.BytesIO()
        torch.save(setup.data.state_dict(), written)
        state = broadcast_bytes(group, written.getvalue(), source)
        if old is None:
            setup.data.load_state_dict(torch.load(io.BytesIO(state), weights_only=True))
    return completed
