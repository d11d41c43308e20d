"""Carries ranges of tensors between ranks, through few buffers that are made once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from resihp.layout import Move, Param, Range

from ..engine.shard import rows
from ..engine.sums import Gradients
from ..worlds.comm import Group
from .parcels import Parcel, Piece, parcels

Pair = tuple[int, int]
"""Two ranks between which state moves, the lower one first."""

View = Callable[[Piece], torch.Tensor]
"""The rows of a piece where this rank holds them."""

_WINDOW = 4


class Courier:
    """One rank's end of the exchange with its peers.

    Between two ranks parcels follow one another in the one order in which all ranks know them,
    and at most a window of them is under way at a rank: so none waits in a circle, and what is
    buffered stays within `buffer_bytes`. Direct parcels are not buffered at all. `on_parcel` is
    called, with its number, before each parcel of this rank.
    """

    def __init__(
        self,
        pairs: Mapping[Pair, Group],
        rank: int,
        *,
        buffer_bytes: int,
        on_parcel: Callable[[int], None],
    ) -> None:
        self._pairs, self._rank, self._on_parcel = pairs, rank, on_parcel
        self._most = max(1, buffer_bytes // _WINDOW // 4)
        # Filled, so that memory is there before it is needed: touching it costs more than a copy.
        self._buffers = [torch.zeros(self._most if pairs else 0) for _ in range(_WINDOW)]

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

        Every rank passes the same moves. `meanwhile` is this rank's own work, a bit of it after
        each parcel that sets out; all of it is done in the end. Returns the bytes that this rank
        received. Raises `WorldBrokenError` if a peer is lost.
        """
        received, own = 0, iter(meanwhile)
        under_way: deque[Callable[[], int]] = deque()
        mine = [p for p in parcels(planned, copies, self._most) if self._rank in _ends(p)]
        for number, parcel in enumerate(mine):
            if len(under_way) == _WINDOW:
                received += under_way.popleft()()
            self._on_parcel(number)
            buffer = self._buffers[number % _WINDOW]
            begin = self._send if parcel.source == self._rank else self._receive
            under_way.append(begin(parcel, buffer, give if begin == self._send else take))
            next(own, None)
        deque(own, maxlen=0)
        return received + sum(end() for end in under_way)

    def _send(self, parcel: Parcel, buffer: torch.Tensor, give: View) -> Callable[[], int]:
        if parcel.is_direct:
            flat = give(parcel.pieces[0])
        else:
            flat = _room(buffer, parcel.numel)
            for piece, part in _parts(parcel, flat):
                view = give(piece)
                part.view_as(view).copy_(view)
        work = self._start(parcel, flat)

        def end() -> int:
            self._pairs[_ends(parcel)].complete(work)
            return 0

        return end

    def _receive(self, parcel: Parcel, buffer: torch.Tensor, take: View) -> Callable[[], int]:
        is_direct = parcel.is_direct
        flat = take(parcel.pieces[0]) if is_direct else _room(buffer, parcel.numel)
        work = self._start(parcel, flat)

        def end() -> int:
            self._pairs[_ends(parcel)].complete(work)
            if not is_direct:
                for piece, part in _parts(parcel, flat):
                    view = take(piece)
                    view.copy_(part.view_as(view))
            return flat.numel() * flat.element_size()

        return end

    def _start(self, parcel: Parcel, flat: torch.Tensor) -> dist.Work:
        return self._pairs[_ends(parcel)].start_broadcast(flat, parcel.source)


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
class Summed:
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


def _ends(parcel: Parcel) -> Pair:
    return min(parcel.source, parcel.target), max(parcel.source, parcel.target)


def _room(buffer: torch.Tensor, numel: int) -> torch.Tensor:
    """`numel` elements of the buffer; a single row may be longer than that."""
    return buffer[:numel] if numel <= len(buffer) else torch.empty(numel)


def _parts(parcel: Parcel, flat: torch.Tensor) -> list[tuple[Piece, torch.Tensor]]:
    sizes = [piece.move.numel for piece in parcel.pieces]
    return list(zip(parcel.pieces, flat.split(sizes), strict=True))
