"""Activations and their gradients between pipeline stages of any tensor-parallel degrees."""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch.nn import functional

from resihp.contracts import Op

from ..process_groups.abortable import AbortableProcessGroup
from ..process_groups.layout_groups import P2PLink, StageBoundary


class P2PQueue:
    """Queue of asynchronous sends; keeps tensors alive until they have arrived."""

    def __init__(self) -> None:
        self._in_flight: deque[tuple[AbortableProcessGroup, dist.Work, torch.Tensor]] = deque()

    def send(self, op: Op, boundary: StageBoundary, tensor_TD: torch.Tensor) -> None:
        """Send this rank's chunks of what a pass `op` returned to the neighbour stage."""
        for link, (group, source) in zip(boundary.links, _channels(op, boundary), strict=True):
            while self._in_flight and self._in_flight[0][1].is_completed():
                self._finish_oldest()
            chunk = _chunk(tensor_TD, link, boundary)
            self._in_flight.append((group, group.start_broadcast(chunk, source), chunk))

    def drain(self) -> None:
        """Wait until all sends have arrived."""
        while self._in_flight:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        group, work, _ = self._in_flight.popleft()
        group.wait(work)


def receive(
    op: Op, boundary: StageBoundary, tp: AbortableProcessGroup, tokens: int, width: int
) -> torch.Tensor:
    """Return what a pass `op` of the neighbour sent, [tokens, width], gathered over the TP group.

    The activation of the previous stage before a forward pass, its gradient from the next stage
    before a backward pass.
    """
    rows = _rows_per_chunk(tokens, boundary)
    held = [_chunks_of(index, len(tp), boundary.chunks) for index in range(len(tp))]
    own_CD = torch.empty(max(held) * rows, width, device=tp.device)
    parts = own_CD.split(rows)
    for (group, source), part in zip(_channels(op, boundary), parts, strict=False):
        group.broadcast(part, source)
    if len(tp) == 1:
        return own_CD[:tokens]
    gathered = tp.all_gather(own_CD)
    kept = [part[: count * rows] for part, count in zip(gathered, held, strict=True)]
    return torch.cat(kept)[:tokens]


def _channels(op: Op, boundary: StageBoundary) -> list[tuple[AbortableProcessGroup, int]]:
    """Return the group of each link for what passes `op` exchange, and the rank that sends."""
    if op is Op.FORWARD:
        return [(link.forward, link.transfer.source) for link in boundary.links]
    return [(link.backward, link.transfer.target) for link in boundary.links]


def _chunks_of(index: int, degree: int, chunks: int) -> int:
    """Return the number of `chunks` that rank `index` of a group of `degree` transfers."""
    return sum(chunk * degree // chunks == index for chunk in range(chunks))


def _rows_per_chunk(tokens: int, boundary: StageBoundary) -> int:
    return -(-tokens // boundary.chunks)


def _chunk(tensor_TD: torch.Tensor, link: P2PLink, boundary: StageBoundary) -> torch.Tensor:
    """Return the rows of one chunk, padded to the common chunk length."""
    rows = _rows_per_chunk(len(tensor_TD), boundary)
    start = link.transfer.chunk * rows
    chunk = tensor_TD.detach()[start : start + rows]
    if len(chunk) < rows:
        chunk = functional.pad(chunk, (0, 0, 0, rows - len(chunk)))
    return chunk.contiguous()
