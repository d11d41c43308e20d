"""Ranks that restore a checkpoint together, over an abortable group."""

from __future__ import annotations

import pickle
from typing import TypeVar

import torch

from ..process_groups.abortable import AbortableProcessGroup

T = TypeVar("T")


class RestoreGroup:
    """`resihp.checkpoint.Ranks` over a group whose waits end when one of its ranks is lost."""

    def __init__(self, group: AbortableProcessGroup, rank: int) -> None:
        self._group = group
        self.rank, self.all, self.run = rank, group.ranks, ""

    def gather(self, value: T) -> list[T]:
        """Return the value of every rank, in the order of `all`. Raises `PeerLostError`."""
        packed = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = [int(n) for n in self._group.all_gather(torch.tensor([len(packed)]))]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(packed)] = packed
        everyones = zip(self._group.all_gather(padded), lengths, strict=True)
        return [pickle.loads(each[:length].numpy().tobytes()) for each, length in everyones]

    gather_in_background = gather

    def all_ready(self, is_ready: bool) -> bool:
        """Return whether all ranks are ready."""
        return all(self.gather(is_ready))
