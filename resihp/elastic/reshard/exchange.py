"""Exchange of tensor ranges between ranks, within a bounded window of buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, count, cycle
from typing import Protocol

import torch

from resihp.layout import Move, StateRange, StateRanges, by_param, containing

from ..process_groups.transport import Transfer, Transport
from ..step.shard import STATE_DTYPE, rows
from .buffers import WINDOW, buffer_zeros
from .shared_memory import PeerLink

UNPACKED_NUMEL = 1 << 14
"""A piece of at least so many elements is sent from and to its tensor, if contiguous there."""

Pair = tuple[int, int]
"""Two ranks that exchange state, the lower one first."""


@dataclass(frozen=True)
class Piece:
    """Rows of one tensor: the parameter itself (`copy` 0), or one that has its shape."""

    move: Move
    copy: int


View = Callable[[Piece], torch.Tensor]
"""The rows of a piece in the tensors of this rank."""


@dataclass(frozen=True)
class TransferBucket:
    """Pieces that go from one rank to another in one transfer.

    is_packed  copied through a buffer; else one piece, contiguous at both ends
    """

    source: int
    target: int
    pieces: tuple[Piece, ...]
    is_packed: bool

    @property
    def numel(self) -> int:
        """Elements of all pieces."""
        return sum(piece.move.numel for piece in self.pieces)


def transfer_buckets(planned: Sequence[Move], copies: int, max_numel: int) -> list[TransferBucket]:
    """All moves, for each of `copies` tensors of a parameter, in buckets of at most `max_numel`.

    A single longer row has a bucket of its own. Every rank computes the same buckets in the same
    order, so that both ends agree on the next one.
    """
    done: list[TransferBucket] = []
    open_: dict[tuple[int, int], list[Piece]] = {}
    for move in planned:
        ends = (move.source, move.target)
        for copy in range(copies):
            for part in _cut(move, max_numel):
                piece = Piece(part, copy)
                if part.param.dim in (None, 0) and part.numel >= UNPACKED_NUMEL:
                    done.append(TransferBucket(*ends, (piece,), is_packed=False))
                    continue
                packed = open_.setdefault(ends, [])
                if packed and sum(one.move.numel for one in packed) + part.numel > max_numel:
                    done.append(TransferBucket(*ends, tuple(packed), is_packed=True))
                    packed.clear()
                packed.append(piece)
    rest = [
        TransferBucket(*ends, tuple(left), is_packed=True) for ends, left in open_.items() if left
    ]
    return done + rest


def _cut(move: Move, max_numel: int) -> Iterator[Move]:
    rows_at_once = max(1, max_numel // move.param.row_numel)
    for start in range(move.start, move.stop, rows_at_once):
        yield replace(move, start=start, stop=min(start + rows_at_once, move.stop))


class TensorExchange:
    """One rank's end of the exchange with its peers.

    Zero-copy transports read the tensors in place. Over all others, buckets follow one another in
    one global order and a rank has at most `WINDOW` of them in progress: this excludes a deadlock
    and bounds the buffers to `buffer_bytes`.

    on_transfer  called with a running number for each bucket started and each slice read, from 0
    """

    def __init__(
        self,
        links: Mapping[Pair, PeerLink],
        rank: int,
        *,
        buffer_bytes: int,
        on_transfer: Callable[[int], None],
    ) -> None:
        self.rank, self._links, self._on_transfer = rank, links, on_transfer
        self._numbers = count()
        self._max_numel = max(1, buffer_bytes // WINDOW // STATE_DTYPE.itemsize)
        self._buffers: list[torch.Tensor] = []

    @property
    def buffer_bytes(self) -> int:
        """Memory of the buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def run(
        self,
        planned: Sequence[Move],
        copies: int,
        source: View,
        target: View,
        meanwhile: Iterable[None] = (),
    ) -> int:
        """Execute all `planned` moves; collective over the ranks that send or receive any.

        Every rank passes the same moves. The tensors of `source` stay unchanged until all ranks
        have voted. `meanwhile` is local work, of which one item is done after each bucket started;
        all of it is done in the end. Returns the bytes received by this rank. Raises
        `PeerLostError` if a peer is lost.
        """
        in_place: list[Move] = []
        through_buffers: list[Move] = []
        for move in planned:
            if self.rank in (move.source, move.target):
                (in_place if self._transport(move).is_zero_copy else through_buffers).append(move)
        buckets = transfer_buckets(through_buffers, copies, self._max_numel)
        reads = list(self._start_in_place(in_place, copies, source, target))
        received = 0
        local = chain((0 for _ in meanwhile), self._finish(reads))
        in_progress: deque[Transfer] = deque()
        for bucket, buffer in zip(buckets, cycle(self._allocate(buckets)), strict=False):
            if len(in_progress) == WINDOW:
                received += sum(in_progress.popleft())
            self._on_transfer(next(self._numbers))
            is_source = bucket.source == self.rank
            start, view = (self._send, source) if is_source else (self._recv, target)
            in_progress.append(start(bucket, buffer, view))
            received += next(local, 0)
        return received + sum(local) + sum(map(sum, in_progress))

    def _transport(self, move: Move) -> Transport:
        pair = (min(move.source, move.target), max(move.source, move.target))
        return self._links[pair].transport(move)

    def _start_in_place(
        self, moves: Sequence[Move], copies: int, source: View, target: View
    ) -> Iterator[Transfer]:
        """One transfer for each pair of ranks and direction; both ends in the same order."""
        directions = {(move.source, move.target) for move in moves}
        for ends in sorted(directions, key=lambda ends: (min(ends), max(ends), ends)):
            some = [move for move in moves if (move.source, move.target) == ends]
            transport = self._transport(some[0])
            pieces = [Piece(move, copy) for move in some for copy in range(copies)]
            if transport.source == self.rank:
                yield transport.send([source(piece) for piece in pieces])
            else:
                yield transport.recv([target(piece) for piece in pieces])

    def _finish(self, transfers: Iterable[Transfer]) -> Transfer:
        for transfer in transfers:
            for received_bytes in transfer:
                self._on_transfer(next(self._numbers))
                yield received_bytes

    def _allocate(self, buckets: Sequence[TransferBucket]) -> list[torch.Tensor]:
        """The buffers, allocated when first needed.

        Zeroed, because first touching the pages costs more than a copy.
        """
        if not self._buffers and any(bucket.is_packed for bucket in buckets):
            device = next(iter(self._links.values())).group.device
            self._buffers = list(buffer_zeros(WINDOW, self._max_numel, device=device))
        return self._buffers or [torch.zeros(0, device="cpu")]

    def _send(self, bucket: TransferBucket, buffer: torch.Tensor, view: View) -> Transfer:
        flat = view(bucket.pieces[0])
        if bucket.is_packed:
            flat = _room(buffer, bucket.numel)
            for piece, part in _split(bucket, flat):
                rows_ = view(piece)
                part.view_as(rows_).copy_(rows_)
        return self._transport(bucket.pieces[0].move).send([flat])

    def _recv(self, bucket: TransferBucket, buffer: torch.Tensor, view: View) -> Transfer:
        flat = _room(buffer, bucket.numel) if bucket.is_packed else view(bucket.pieces[0])
        transfer = self._transport(bucket.pieces[0].move).recv([flat])

        def unpacked() -> Transfer:
            yield from transfer
            for piece, part in _split(bucket, flat) if bucket.is_packed else ():
                rows_ = view(piece)
                rows_.copy_(part.view_as(rows_))

        return unpacked()


def pairs_of(planned: Sequence[Move], rank: int) -> list[Pair]:
    """The pairs of ranks that exchange state, `rank` one of them; in one global order."""
    every = {(min(m.source, m.target), max(m.source, m.target)) for m in planned}
    return sorted(pair for pair in every if rank in pair)


class StateHolder(Protocol):
    """State of ranges of parameters, in the memory of this rank."""

    @property
    def state_ranges(self) -> StateRanges: ...

    def state(self, held: StateRange) -> Sequence[torch.Tensor]: ...


@dataclass(frozen=True)
class GradientParts:
    """Gradient sums, one for each of `parts`, all of them of the same ranges."""

    parts: Sequence[Mapping[StateRange, torch.Tensor]]

    @property
    def state_ranges(self) -> StateRanges:
        """Ranges of each parameter."""
        return by_param(self.parts[0] if self.parts else ())

    def state(self, held: StateRange) -> Sequence[torch.Tensor]:
        """The gradient of a range in each of the sums."""
        return [gradients[held] for gradients in self.parts]


def view_of(holder: StateHolder | None) -> View:
    """The view of pieces in `holder`; None for a rank that sends or receives nothing."""
    ranges = holder.state_ranges if holder is not None else {}

    @lru_cache(maxsize=1)  # all copies of a move follow one another
    def state(held: StateRange) -> Sequence[torch.Tensor]:
        assert holder is not None, "only ranks that hold state send or receive it"
        return holder.state(held)

    def view(piece: Piece) -> torch.Tensor:
        move = piece.move
        span = (move.start, move.stop)
        held = containing(ranges, move.param, span)
        return rows(state(held)[piece.copy], move.param, span, held[1][0])

    return view


def _room(buffer: torch.Tensor, numel: int) -> torch.Tensor:
    """`numel` elements of the buffer; new memory for a single row that is longer."""
    return buffer[:numel] if numel <= len(buffer) else buffer.new_empty(numel)


def _split(bucket: TransferBucket, flat: torch.Tensor) -> list[tuple[Piece, torch.Tensor]]:
    sizes = [piece.move.numel for piece in bucket.pieces]
    return list(zip(bucket.pieces, flat.split(sizes), strict=True))
