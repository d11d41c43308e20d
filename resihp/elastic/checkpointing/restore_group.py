"""Ranks that restore a checkpoint together, over an abortable group."""

from __future__ import annotations

import pickle
from typing import TypeVar

from ..process_groups.abortable import AbortableProcessGroup
from ..process_groups.byte_collectives import all_gather_bytes

T = TypeVar("T")


class RestoreGroup:
    """`resihp.checkpoint.Ranks` over a group whose waits end when one of its ranks is lost."""

    def __init__(self, group: AbortableProcessGroup, rank: int) -> None:
        self._group = group
        self.rank, self.all, self.run = rank, group.ranks, ""

    def gather(self, value: T) -> list[T]:
        """Return the value of every rank, in the order of `all`. Raises `PeerLostError`."""
        return [pickle.loads(data) for data in all_gather_bytes(self._group, pickle.dumps(value))]

    gather_in_background = gather

    def all_ready(self, is_ready: bool) -> bool:
        """Return whether all ranks are ready."""
        return all(self.gather(is_ready))
