"""Passes of one pipeline stage: receive, compute, send."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import functional

from resihp.contracts import Op
from resihp.layout import Param
from resihp.pipeline.orders import Part, Pass

from ..models import Model, Packed
from ..models.compilation import compiling
from ..models.recomputation import recomputed, recomputing_attention
from ..process_groups.abortable import AbortableProcessGroup
from ..process_groups.layout_groups import LayoutGroups, P2PLink, StageBoundary
from .setup import Recompute, TransferRecorder
from .shard import Shard, part_ranges
from .split_backward import SplitBackward
from .telemetry import TransferStamps


@dataclass
class _Running:
    """Microbatch between its forward and its backward pass through a chunk.

    embedded  output of the first part where a split backward pass ends before it
    entry     leaf that accumulates the gradient of the chunk's input
    output    output of the chunk
    """

    embedded: torch.Tensor | None
    entry: torch.Tensor
    output: torch.Tensor
    halves: SplitBackward | None = None


class StageRunner:
    """Runs the passes of one stage; gradients accumulate in the shard's tensors.

    `run` a pass, then `send` what it returned; `drain` when all passes of a step have run.
    With `split`, backward passes come in halves. `compute_dtype` is the precision of torch's
    autocast for the forward pass; None: none. `recompute` says what a backward pass computes again.
    `compile_backend` compiles parts of layers; not with `split`, which would run them again.
    `record_transfer` takes the records of transfers.
    """

    def __init__(
        self,
        model: Model,
        groups: LayoutGroups,
        shard: Shard,
        *,
        split: bool = False,
        compute_dtype: torch.dtype | None = None,
        recompute: Recompute | None = None,
        compile_backend: str | None = None,
        record_transfer: TransferRecorder | None = None,
    ) -> None:
        self._record_transfer, self._recompute = record_transfer, recompute
        self._model, self._groups, self._parts = model, groups, shard.parts
        replica, index = groups.layout.replicas[groups.place.dp], groups.place.pp
        self._chunks = [
            model.parameters.chunk_parts(replica, index, chunk) for chunk in range(replica.chunks)
        ]
        self._ranges = {
            part: part_ranges(held, shard.ranges)
            for parts in self._chunks
            for part, held in parts.items()
        }
        # A pipeline of one stage has no bubble: its second half is the whole pass.
        self._split = split and (groups.before is not None or groups.after is not None)
        self._compute_dtype = compute_dtype
        self._compile_backend = None if self._split else compile_backend
        self._running: dict[tuple[int, int], _Running] = {}
        self._box = P2PQueue()

    @property
    def in_flight(self) -> int:
        """Number of microbatches between forward and backward."""
        return len(self._running)

    def run(self, item: Pass, packed: Packed, loss_weight: float) -> torch.Tensor:
        """Run one pass; return the activation or the gradient of the input for the neighbour stage.

        The last chunk of the model returns the sum of the token losses from a forward pass.
        `loss_weight` is the weight of one token's loss in the loss of the step.
        """
        key = (item.microbatch, item.chunk)
        if item.op is Op.FORWARD:
            self._running[key] = running = self._forward(item.chunk, packed)
            return running.output.detach()
        running = self._running[key]
        if item.part is not Part.INPUT:
            del self._running[key]
        if not self._split:
            if item.part is not Part.INPUT:
                running.output.backward(self._gradient(item, running, packed, loss_weight))
            return running.entry if running.entry.grad is None else running.entry.grad
        if item.part is Part.INPUT:
            running.halves = SplitBackward(running.entry, running.output)
            return running.halves.run_input(self._gradient(item, running, packed, loss_weight))
        assert running.halves is not None, "the input half comes first"
        running.halves.run_weights()
        if running.embedded is not None:
            running.embedded.backward(running.entry.grad)
        return running.entry

    def send(self, item: Pass, outgoing: torch.Tensor, packed: Packed) -> None:
        """Send what `run` returned to the neighbour that needs it, without waiting."""
        source, target = self._groups.source(item.chunk), self._groups.target(item.chunk)
        neighbour = target if item.op is Op.FORWARD else source
        if neighbour is not None and item.part is not Part.WEIGHT:
            stamps = self._stamps(item.op is Op.FORWARD, item.chunk, packed)
            self._box.send(item.op, neighbour, outgoing, stamps)

    def drain(self) -> None:
        """Wait until all sends have arrived."""
        self._box.drain()

    def flops(self, item: Pass, packed: Packed) -> float:
        """Return the floating-point operations of a pass; backward takes twice those of forward.

        Recomputed layers are added to the backward pass, or to its first half.
        """
        forward = {
            part: self._model.flops(part, self._ranges[part], packed)
            for part in self._chunks[item.chunk]
        }
        total = sum(forward.values())
        if item.op is Op.BACKWARD and item.part is not Part.WEIGHT and self._recompute == "layers":
            again = sum(flops for part, flops in forward.items() if part.startswith("layers."))
        else:
            again = 0.0
        return again + total * (2.0 if item.op is Op.BACKWARD and item.part is Part.WHOLE else 1.0)

    def params(self, item: Pass) -> set[Param]:
        """Return the parameters to whose gradients a backward pass adds."""
        return {param for held in self._chunks[item.chunk].values() for param in held}

    def _forward(self, chunk: int, packed: Packed) -> _Running:
        source, tokens = self._groups.source(chunk), len(packed.tokens)
        embedded, entry = None, torch.empty(0, device=self._groups.device)
        if source is not None:
            stamps = self._stamps(False, chunk, packed)
            entry = receive(Op.FORWARD, source, self._groups.tp, tokens, self._model.width, stamps)
            entry.requires_grad_()
        hidden = entry
        dtype, is_selective = self._compute_dtype, self._recompute == "attention"
        with (
            torch.autocast(entry.device.type, dtype, enabled=dtype is not None),
            recomputing_attention(is_selective),
            compiling(self._compile_backend),
        ):
            for name in self._chunks[chunk]:
                module = self._parts[name]
                if name.startswith("layers.") and self._recompute == "layers":
                    hidden = recomputed(module, hidden, packed)
                elif name != "first":
                    hidden = module(hidden, packed)
                else:
                    hidden = module(packed)
                    if self._split:
                        embedded, entry = hidden, hidden.detach().requires_grad_()
                        hidden = entry
        return _Running(embedded, entry, hidden.float())

    def _gradient(
        self, item: Pass, running: _Running, packed: Packed, loss_weight: float
    ) -> torch.Tensor:
        """Gradient of the step's loss by this chunk's output."""
        target, tokens = self._groups.target(item.chunk), len(packed.tokens)
        if target is None:
            return torch.full_like(running.output, loss_weight)
        stamps = self._stamps(True, item.chunk, packed)
        return receive(Op.BACKWARD, target, self._groups.tp, tokens, self._model.width, stamps)

    def _stamps(self, after: bool, chunk: int, packed: Packed) -> TransferStamps:
        """Stamps of a transfer over the boundary after a chunk, or before it."""
        is_around = not after and self._groups.source(chunk) is self._groups.around
        return TransferStamps(self._record_transfer, packed, chunk - is_around)


class P2PQueue:
    """Queue of asynchronous sends; keeps tensors alive until they have arrived."""

    def __init__(self) -> None:
        self._in_flight: deque[tuple[AbortableProcessGroup, dist.Work, torch.Tensor]] = deque()

    def send(
        self, op: Op, boundary: StageBoundary, tensor_TD: torch.Tensor, stamps: TransferStamps
    ) -> None:
        """Send this rank's chunks of what a pass `op` returned to the neighbour stage."""
        for link, (group, source) in zip(boundary.links, _channels(op, boundary), strict=True):
            while self._in_flight and self._in_flight[0][1].is_completed():
                self._finish_oldest()
            chunk = _chunk(tensor_TD, link, boundary)
            stamps.sent(link.transfer.target if op is Op.FORWARD else link.transfer.source)
            self._in_flight.append((group, group.start_broadcast(chunk, source), chunk))

    def drain(self) -> None:
        """Wait until all sends have arrived."""
        while self._in_flight:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        group, work, _ = self._in_flight.popleft()
        group.wait(work)


def receive(
    op: Op,
    boundary: StageBoundary,
    tp: AbortableProcessGroup,
    tokens: int,
    width: int,
    stamps: TransferStamps,
) -> torch.Tensor:
    """Return what a pass `op` of the neighbour sent, [tokens, width], gathered over the TP group.

    The activation of the previous stage before a forward pass, its gradient from the next stage
    before a backward pass.
    """
    rows = _rows_per_chunk(tokens, boundary)
    chunks, degree = boundary.chunks, len(tp)
    carriers = [chunk * degree // chunks for chunk in range(chunks)]
    held = [carriers.count(index) for index in range(degree)]  # chunks that each rank transfers
    own_CD = torch.empty(max(held) * rows, width, device=tp.device)
    parts = own_CD.split(rows)
    for (group, source), part in zip(_channels(op, boundary), parts, strict=False):
        with stamps.receiving(source):
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
