"""Collectives on byte strings of any length, over an abortable group."""

from __future__ import annotations

import torch

from .abortable import AbortableProcessGroup


def broadcast_bytes(group: AbortableProcessGroup, data: bytes, source: int) -> bytes:
    """Return the `data` of rank `source`; collective. Raises `PeerLostError`."""
    length = group.broadcast(torch.tensor([len(data)], device=group.device), source)
    buffer = _tensor(group, data, int(length)) if group.rank == source else None
    if buffer is None:
        buffer = torch.empty(int(length), dtype=torch.uint8, device=group.device)
    group.broadcast(buffer, source)
    return buffer.cpu().numpy().tobytes()


def all_gather_bytes(group: AbortableProcessGroup, data: bytes) -> list[bytes]:
    """Return the `data` of every rank, in group order; collective. Raises `PeerLostError`."""
    lengths = group.all_gather(torch.tensor([len(data)], device=group.device))
    padded = _tensor(group, data, max(int(length) for length in lengths))
    gathered = zip(group.all_gather(padded), lengths, strict=True)
    return [each.cpu().numpy().tobytes()[: int(length)] for each, length in gathered]


def _tensor(group: AbortableProcessGroup, data: bytes, length: int) -> torch.Tensor:
    """Return `data` as uint8 [length], padded with zeros."""
    padded = bytearray(data.ljust(length, b"\0"))
    return torch.frombuffer(padded, dtype=torch.uint8).to(group.device)
