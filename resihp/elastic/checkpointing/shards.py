"""State of a rank as pieces of named tensors that any layout can read.

`model.KEY` is a parameter, `optimizer.KEY.NAME` its moment of that name, and `optimizer.scalars`
[groups, names] the optimizer's numbers for each group of parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from resihp.checkpoint import ShardedTensorPiece
from resihp.layout import Param, Parameters, Range, containing

from ..step.shard import Shard, rows

SCALARS = "optimizer.scalars"


def pieces_of(
    shard: Shard, spans: Sequence[tuple[Param, Range]], parameters: Parameters
) -> list[ShardedTensorPiece]:
    """Return the pieces of the ranges `spans`: views of the shard, copies of the scalars.

    The rank with the first row of a group's first parameter has the scalars of the group.
    """
    pieces = [piece for param, span in spans for piece in _pieces(shard, param, span)]
    firsts = {param for param, span in spans if span[0] == 0}
    table = shard.scalars()
    for row, (_, params) in enumerate(shard.settings.groups(parameters)):
        if params[0] in firsts and table.shape[1]:
            values = table[row : row + 1]
            pieces.append(ShardedTensorPiece(SCALARS, tuple(table.shape), (row, 0), values))
    return pieces


def all_pieces(shard: Shard) -> list[ShardedTensorPiece]:
    """Return views of all state that `shard` holds but the scalars, allocating missing moments.

    Writing to a piece writes to the shard. Where its optimizer state is sharded, other parameters
    are gathered.
    """
    for held in shard.slices:
        shard.reserve(held)
    return [piece for param, span in shard.slices for piece in _pieces(shard, param, span)]


def scalars_piece(table: torch.Tensor) -> list[ShardedTensorPiece]:
    """Return the whole table of scalars; empty where the optimizer has none."""
    if not table.shape[1]:
        return []
    return [ShardedTensorPiece(SCALARS, tuple(table.shape), (0, 0), table)]


def _pieces(shard: Shard, param: Param, span: Range) -> Iterator[ShardedTensorPiece]:
    if span[0] == span[1]:
        return
    offsets = [0] * len(param.shape)
    offsets[param.dim or 0] = span[0]
    moments = (f"optimizer.{param.key}.{name}" for name in shard.settings.form.moments)
    names = (f"model.{param.key}", *moments)
    held = containing(shard.state_ranges, param, span)
    for name, tensor in zip(names, shard.state(held), strict=True):
        view = rows(tensor, param, span, held[1][0])
        yield ShardedTensorPiece(name, param.shape, tuple(offsets), view)
