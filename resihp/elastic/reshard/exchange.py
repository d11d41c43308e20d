"""Carries ranges of tensors between ranks, through few buffers that are made once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, cycle
from typing import Protocol

import torch
import torch.distributed as dist

from resihp.layout import Move, Param, Range

from ..step.gradient_accumulation import Gradients
from ..step.shard import rows
from .shared_memory import LocalPeer, empty_table, is_readable, table_of

DIRECT_NUMEL = 1 << 14
"""A piece of at least so many elements travels alone if it lies contiguous at both ends."""


@dataclass(frozen=True)
class Piece:
    """Rows of one tensor: the parameter itself (`copy` 0), or one that has its shape."""

    move: Move
    copy: int


@dataclass(frozen=True)
class TransferBucket:
    """Pieces that go from one rank to another in one exchange.

    A direct parcel is one piece that needs no packing: its rows are contiguous in memory whatever
    range of the parameter a rank holds.
    """

    source: int
    target: int
    pieces: tuple[Piece, ...]
    is_direct: bool

    @property
    def numel(self) -> int:
        """Elements of all pieces."""
        return sum(piece.move.numel for piece in self.pieces)


def transfer_buckets(planned: Sequence[Move], copies: int, most_numel: int) -> list[TransferBucket]:
    """All moves, for each of `copies` tensors of a parameter, in parcels of at most `most_numel`.

    A row that is longer than that travels alone. Every rank computes the same parcels in the same
    order, so that the two ends of each agree on what comes next.
    """
    done: list[TransferBucket] = []
    open_: dict[tuple[int, int], list[Piece]] = {}
    for move in planned:
        ends = (move.source, move.target)
        for copy in range(copies):
            for part in _cut(move, most_numel):
                piece = Piece(part, copy)
                if part.param.dim in (None, 0) and part.numel >= DIRECT_NUMEL:
                    done.append(TransferBucket(*ends, (piece,), is_direct=True))
                    continue
                packed = open_.setdefault(ends, [])
                if packed and _numel(packed) + part.numel > most_numel:
                    done.append(TransferBucket(*ends, tuple(packed), is_direct=False))
                    packed.clear()
                packed.append(piece)
    rest = [
        TransferBucket(*ends, tuple(left), is_direct=False) for ends, left in open_.items() if left
    ]
    return done + rest


def _cut(move: Move, most_numel: int) -> Iterator[Move]:
    rows_at_once = max(1, most_numel // move.param.row_numel)
    for start in range(move.start, move.stop, rows_at_once):
        yield replace(move, start=start, stop=min(start + rows_at_once, move.stop))


def _numel(pieces: Sequence[Piece]) -> int:
    return sum(piece.move.numel for piece in pieces)


Pair = tuple[int, int]
"""Two ranks between which state moves, the lower one first."""

View = Callable[[Piece], torch.Tensor]
"""The rows of a piece where this rank holds them."""

_WINDOW = 4


class TensorExchange:
    """One rank's end of the exchange with its peers.

    A neighbour says where it holds what this rank lacks, and is read (`neighbours`). Between other
    two ranks parcels follow one another in the one order in which all ranks know them, and at most
    a window of them is under way at a rank: so none waits in a circle, and what is buffered stays
    within `buffer_bytes`. Direct parcels are not buffered at all. `on_transfer` is called, with its
    number, before each parcel or slice of this rank.
    """

    def __init__(
        self,
        pairs: Mapping[Pair, LocalPeer],
        rank: int,
        *,
        buffer_bytes: int,
        on_transfer: Callable[[int], None],
    ) -> None:
        self._pairs, self._rank, self._on_transfer = pairs, rank, on_transfer
        self._most = max(1, buffer_bytes // _WINDOW // 4)
        self._buffers: list[torch.Tensor] = []

    @property
    def held_bytes(self) -> int:
        """Memory of the buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def carry(
        self,
        planned: Sequence[Move],
        copies: int,
        give: View,
        take: View,
        meanwhile: Iterable[None] = (),
    ) -> int:
        """Exchange all `planned` moves; collective over the ranks that send or receive any.

        Every rank passes the same moves. What `give` shows is final, and stays as it is until all
        ranks have voted. `meanwhile` is this rank's own work, a bit of it after each parcel that
        sets out; all of it is done in the end. Returns the bytes that this rank received. Raises
        `PeerLostError` if a peer is lost.
        """
        mine = [move for move in planned if self._rank in (move.source, move.target)]
        read = [move for move in mine if self._is_read(move)]
        sent = transfer_buckets(
            [move for move in mine if not self._is_read(move)], copies, self._most
        )
        tables = self._tell(read, copies, give)
        numbers, received = count(), 0
        own = chain((0 for _ in meanwhile), self._read(tables, take, numbers))
        under_way: deque[Callable[[], int]] = deque()
        for parcel, buffer in zip(sent, cycle(self._room_for(sent)), strict=False):
            if len(under_way) == _WINDOW:
                received += under_way.popleft()()
            self._on_transfer(next(numbers))
            begin = self._send if parcel.source == self._rank else self._receive
            under_way.append(begin(parcel, buffer, give if begin == self._send else take))
            received += next(own, 0)
        return received + sum(own) + sum(end() for end in under_way)

    def _is_read(self, move: Move) -> bool:
        """Whether the target of one of this rank's moves reads it where the source holds it."""
        neighbour = self._pairs[_ends(move)]
        is_source = move.source == self._rank
        may = neighbour.is_read if is_source else neighbour.source is not None
        return may and is_readable(move)

    def _tell(self, moves: Sequence[Move], copies: int, give: View) -> list[_Table]:
        """Say to neighbours where what they read lies, and begin to learn it from others."""
        tables = []
        for pair in sorted({_ends(move) for move in moves}):
            for source in pair:  # both ends begin with the same one
                some = [move for move in moves if _ends(move) == pair and move.source == source]
                pieces = [Piece(move, copy) for move in some for copy in range(copies)]
                if not pieces:
                    continue
                dims = max(len(move.param.shape) for move in some)
                values = empty_table(len(pieces), dims)
                if source == self._rank:
                    values = table_of([give(piece) for piece in pieces])
                work = self._pairs[pair].group.start_broadcast(values, source)
                tables.append(_Table(self._pairs[pair], source, pieces, values, work))
        return tables

    def _read(self, tables: Iterable[_Table], take: View, numbers: Iterator[int]) -> Iterator[int]:
        """Copy what neighbours hold as soon as they have said where; the bytes of each slice."""
        for table in tables:
            neighbour = table.neighbour
            neighbour.group.wait(table.work)
            if table.source != self._rank:
                targets = [take(piece) for piece in table.pieces]
                yield from neighbour.read(
                    targets, table.values, 4 * self._most, lambda: self._on_transfer(next(numbers))
                )

    def _room_for(self, sent: Sequence[TransferBucket]) -> list[torch.Tensor]:
        """The buffers, made when they are first needed.

        Filled, so that memory is there before it is needed: touching it costs more than a copy.
        """
        if not self._buffers and any(not parcel.is_direct for parcel in sent):
            self._buffers = [torch.zeros(self._most) for _ in range(_WINDOW)]
        return self._buffers or [torch.zeros(0)]

    def _send(self, parcel: TransferBucket, buffer: torch.Tensor, give: View) -> Callable[[], int]:
        if parcel.is_direct:
            flat = give(parcel.pieces[0])
        else:
            flat = _room(buffer, parcel.numel)
            for piece, part in _parts(parcel, flat):
                view = give(piece)
                part.view_as(view).copy_(view)
        work = self._start(parcel, flat)

        def end() -> int:
            self._pairs[_ends(parcel)].group.wait(work)
            return 0

        return end

    def _receive(
        self, parcel: TransferBucket, buffer: torch.Tensor, take: View
    ) -> Callable[[], int]:
        is_direct = parcel.is_direct
        flat = take(parcel.pieces[0]) if is_direct else _room(buffer, parcel.numel)
        work = self._start(parcel, flat)

        def end() -> int:
            self._pairs[_ends(parcel)].group.wait(work)
            if not is_direct:
                for piece, part in _parts(parcel, flat):
                    view = take(piece)
                    view.copy_(part.view_as(view))
            return flat.numel() * flat.element_size()

        return end

    def _start(self, parcel: TransferBucket, flat: torch.Tensor) -> dist.Work:
        return self._pairs[_ends(parcel)].group.start_broadcast(flat, parcel.source)


@dataclass(frozen=True)
class _Table:
    """Where the pieces lie that `source` shows to its neighbour, once `work` is done."""

    neighbour: LocalPeer
    source: int
    pieces: Sequence[Piece]
    values: torch.Tensor
    work: dist.Work


def pairs_of(planned: Sequence[Move], rank: int) -> list[Pair]:
    """The pairs of ranks between which state moves, `rank` one of them; in one global order."""
    every = {(min(m.source, m.target), max(m.source, m.target)) for m in planned}
    return sorted(pair for pair in every if rank in pair)


class Holder(Protocol):
    """What holds ranges of tensors that move; `Shard` is one."""

    @property
    def ranges(self) -> Mapping[Param, Range]:
        """Range of each parameter held."""
        ...

    def state(self, param: Param) -> Sequence[torch.Tensor]:
        """The tensors that move for a parameter, each cut to its range."""
        ...


@dataclass(frozen=True)
class GradientParts:
    """Gradient sums, one for each of `parts`, all of them cut to `ranges`."""

    ranges: Mapping[Param, Range]
    parts: Sequence[Gradients]

    def state(self, param: Param) -> Sequence[torch.Tensor]:
        """The parameter's gradient in each of the sums."""
        return [gradients[param] for gradients in self.parts]


def state_view(holder: Holder | None) -> View:
    """Where pieces of what moves lie in `holder`."""

    def view(piece: Piece) -> torch.Tensor:
        assert holder is not None, "only ranks that hold state send or receive it"
        move = piece.move
        origin = holder.ranges[move.param][0]
        tensor = holder.state(move.param)[piece.copy]
        return rows(tensor, move.param, (move.start, move.stop), origin)

    return view


def _ends(one: TransferBucket | Move) -> Pair:
    return min(one.source, one.target), max(one.source, one.target)


def _room(buffer: torch.Tensor, numel: int) -> torch.Tensor:
    """`numel` elements of the buffer; a single row may be longer than that."""
    return buffer[:numel] if numel <= len(buffer) else torch.empty(numel)


def _parts(parcel: TransferBucket, flat: torch.Tensor) -> list[tuple[Piece, torch.Tensor]]:
    sizes = [piece.move.numel for piece in parcel.pieces]
    return list(zip(parcel.pieces, flat.split(sizes), strict=True))
