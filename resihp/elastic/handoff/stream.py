"""Moves training state from one layout to another, in bounded pieces, leaving the old one whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch

from resihp.layout import Move, Param, Range

from ..engine.shard import Shard, rows
from ..worlds.comm import Group


class Holder(Protocol):
    """What holds ranges of tensors that may move; `Shard` is one."""

    @property
    def ranges(self) -> Mapping[Param, Range]:
        """Range of each parameter held."""
        ...

    def state(self, param: Param) -> tuple[torch.Tensor, ...]:
        """The tensors that move for a parameter, each cut to its range."""
        ...


def keep_own(old: Shard, new: Shard) -> None:
    """Copy what this rank holds in both layouts."""
    for param, target in new.ranges.items():
        source = old.ranges.get(param)
        if source is None or old.tensors[param] is new.tensors[param]:
            continue
        shared = (max(source[0], target[0]), min(source[1], target[1]))
        if shared[0] < shared[1]:
            for from_, to in zip(old.state(param), new.state(param), strict=True):
                rows(to, param, shared, target[0]).copy_(rows(from_, param, shared, source[0]))


def stream(
    group: Group,
    rank: int,
    planned: Sequence[Move],
    old: Holder | None,
    new: Holder | None,
    *,
    copies: int,
    limit_bytes: int,
) -> int:
    """Exchange all moves in rounds; no rank buffers more than `limit_bytes` in one round.

    Collective over `group`, which holds every source and target; all ranks pass the same moves.
    `copies` tensors move for each parameter (`Optimizer.copies`). Returns the bytes that this rank
    received.
    """
    received_bytes = 0
    for turn in _rounds(planned, copies, limit_bytes):
        out = [m for peer in group.ranks for m in turn if (m.source, m.target) == (rank, peer)]
        into = [m for peer in group.ranks for m in turn if (m.source, m.target) == (peer, rank)]
        pieces = [view.reshape(-1) for move in out for view in _views(old, move)]
        sent = torch.cat(pieces) if pieces else torch.empty(0)
        out_counts = [copies * _numel(m for m in out if m.target == peer) for peer in group.ranks]
        into_counts = [copies * _numel(m for m in into if m.source == peer) for peer in group.ranks]
        received = torch.empty(sum(into_counts))
        group.all_to_all(received, sent, into_counts, out_counts)
        _unpack(received, into, new)
        received_bytes += received.numel() * received.element_size()
    return received_bytes


def _rounds(planned: Sequence[Move], copies: int, limit_bytes: int) -> Iterator[list[Move]]:
    """Moves in order, cut so that what one rank sends or receives in a round stays in bounds."""
    turn: list[Move] = []
    load: dict[tuple[str, int], int] = {}
    for move in (part for whole in planned for part in _cut(whole, copies, limit_bytes)):
        size = move.numel * copies * 4
        ends = (("out", move.source), ("in", move.target))
        if turn and any(load.get(end, 0) + size > limit_bytes for end in ends):
            yield turn
            turn, load = [], {}
        turn.append(move)
        for end in ends:
            load[end] = load.get(end, 0) + size
    if turn:
        yield turn


def _cut(move: Move, copies: int, limit_bytes: int) -> Iterator[Move]:
    rows_at_once = max(1, limit_bytes // (move.param.row_numel * copies * 4))
    for start in range(move.start, move.stop, rows_at_once):
        stop = min(start + rows_at_once, move.stop)
        yield Move(move.param, start, stop, move.source, move.target)


def _views(shard: Holder | None, move: Move) -> list[torch.Tensor]:
    assert shard is not None, "only ranks that hold state send or receive it"
    origin = shard.ranges[move.param][0]
    span = (move.start, move.stop)
    return [rows(tensor, move.param, span, origin) for tensor in shard.state(move.param)]


def _unpack(received: torch.Tensor, into: Sequence[Move], new: Holder | None) -> None:
    offset = 0
    for move in into:
        for view in _views(new, move):
            view.copy_(received[offset : offset + view.numel()].view_as(view))
            offset += view.numel()


def _numel(planned: Iterable[Move]) -> int:
    return sum(move.numel for move in planned)
