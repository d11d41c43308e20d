"""Cuts moves into parcels of bounded size: what one rank sends another in one exchange."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from resihp.layout import Move

DIRECT_NUMEL = 1 << 14
"""A piece of at least so many elements travels alone if it lies contiguous at both ends."""


@dataclass(frozen=True)
class Piece:
    """Rows of one tensor: the parameter itself (`copy` 0), or one that has its shape."""

    move: Move
    copy: int


@dataclass(frozen=True)
class Parcel:
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


def parcels(planned: Sequence[Move], copies: int, most_numel: int) -> list[Parcel]:
    """All moves, for each of `copies` tensors of a parameter, in parcels of at most `most_numel`.

    A row that is longer than that travels alone. Every rank computes the same parcels in the same
    order, so that the two ends of each agree on what comes next.
    """
    done: list[Parcel] = []
    open_: dict[tuple[int, int], list[Piece]] = {}
    for move in planned:
        ends = (move.source, move.target)
        for copy in range(copies):
            for part in _cut(move, most_numel):
                piece = Piece(part, copy)
                if part.param.dim in (None, 0) and part.numel >= DIRECT_NUMEL:
                    done.append(Parcel(*ends, (piece,), is_direct=True))
                    continue
                packed = open_.setdefault(ends, [])
                if packed and _numel(packed) + part.numel > most_numel:
                    done.append(Parcel(*ends, tuple(packed), is_direct=False))
                    packed.clear()
                packed.append(piece)
    rest = [Parcel(*ends, tuple(left), is_direct=False) for ends, left in open_.items() if left]
    return done + rest


def _cut(move: Move, most_numel: int) -> Iterator[Move]:
    rows_at_once = max(1, most_numel // move.param.row_numel)
    for start in range(move.start, move.stop, rows_at_once):
        yield replace(move, start=start, stop=min(start + rows_at_once, move.stop))


def _numel(pieces: Sequence[Piece]) -> int:
    return sum(piece.move.numel for piece in pieces)
