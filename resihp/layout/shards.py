"""Shards of every rank: its ranges of parameters, and those of which it holds optimizer state.

Optimizer state is where the parameter is, or sharded over replicas (ZeRO stage 1, Rajbhandari et
al., arXiv 1910.02054). It is then cut into blocks whose edges depend on the parameter alone. The
ranks that could hold a block are ordered by a hash of block and rank (highest random weight, Thaler
& Ravishankar 1998): where one of them is lost, the next in order takes its place, and other blocks
stay where they are.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from resihp.contracts import Layout

from .communication import GradientReduction, gradient_reductions
from .parameters import Param, Parameters, Range

_BLOCKS = 32
"""Blocks of a parameter, unless they would be too small or too large."""

_BLOCK_NUMEL = 1 << 16
"""Least elements of a block: smaller ones would cost more to handle than they even out."""

_MOST_NUMEL = 1 << 22
"""Most elements of a block of several rows: of larger ones a few ranks would hold too much."""

StateRange = tuple[Param, Range]
"""Rows of a parameter whose optimizer state one rank holds."""

StateRanges = Mapping[Param, tuple[Range, ...]]
"""Ranges of each parameter whose optimizer state one rank holds, ascending and not adjacent."""


@dataclass(frozen=True)
class StateCopies:
    """Number of ranks that hold the optimizer state of each range of a parameter.

    ranks_per_node  so many consecutive ranks, of a multiple of it on, share a node; where they can,
                    the copies of a range are on several nodes
    """

    count: int
    ranks_per_node: int = 1


@dataclass(frozen=True)
class StateBlock:
    """Rows `span` of a parameter, and the ranks that hold their optimizer state, in order."""

    param: Param
    span: Range
    ranks: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the rows."""
        return (self.span[1] - self.span[0]) * self.param.row_numel


def holdings(layout: Layout, parameters: Parameters) -> dict[int, dict[Param, Range]]:
    """Range of each parameter that each rank of the layout holds."""
    held: dict[int, dict[Param, Range]] = {}
    for replica in layout.replicas:
        for pp, stage in enumerate(replica.stages):
            ranges = [(p, p.ranges(stage.shares)) for p in parameters.of_stage(replica, pp)]
            for index, rank in enumerate(stage.ranks):
                held[rank] = {param: r[index] for param, r in ranges if r[index][0] < r[index][1]}
    return held


def by_param(held: Iterable[StateRange]) -> StateRanges:
    """Return the ranges of each parameter."""
    ranges: dict[Param, tuple[Range, ...]] = {}
    for param, span in held:
        ranges[param] = (*ranges.get(param, ()), span)
    return ranges


def containing(ranges: StateRanges, param: Param, span: Range) -> StateRange:
    """Return the range, of those that a rank holds, in which rows `span` are."""
    return param, next(one for one in ranges[param] if one[0] <= span[0] and span[1] <= one[1])


Blocks = Mapping[tuple[int, ...], tuple[StateBlock, ...]]
"""The blocks of each gradient reduction of a layout, by its ranks."""


def state_blocks(layout: Layout, parameters: Parameters, copies: StateCopies) -> Blocks:
    """Return all blocks of a layout, each held by some of the ranks that hold the parameter.

    Where fewer ranks hold it, all of them do. Of a parameter without a split dimension, only the
    first rank of a stage counts. All ranks of a reduction hold about the same number of elements.
    Deterministic.
    """
    reductions = gradient_reductions(layout, parameters)
    return {reduction.ranks: tuple(_assigned(reduction, copies)) for reduction in reductions}


def state_ranges(
    layout: Layout, parameters: Parameters, copies: StateCopies | None
) -> dict[int, StateRanges]:
    """Return the ranges whose optimizer state each rank of the layout holds.

    copies  of each range, as in `state_blocks`; None: on all ranks that hold the parameter
    """
    if copies is None:
        whole = holdings(layout, parameters)
        return {r: {param: (span,) for param, span in held.items()} for r, held in whole.items()}
    held = ranges_of(state_blocks(layout, parameters, copies))
    return {rank: held.get(rank, {}) for rank in layout.ranks}


def ranges_of(blocks: Blocks) -> dict[int, StateRanges]:
    """Return the ranges of each rank that holds any of `blocks`."""
    spans: dict[int, dict[Param, list[Range]]] = defaultdict(lambda: defaultdict(list))
    for some in blocks.values():
        for block in some:
            for rank in block.ranks:
                spans[rank][block.param].append(block.span)
    return {
        rank: {param: _joined(some) for param, some in held.items()} for rank, held in spans.items()
    }


def _assigned(reduction: GradientReduction, copies: StateCopies) -> Iterator[StateBlock]:
    """Yield the blocks of a reduction, in its order."""
    ranks = reduction.ranks
    blocks = [(param, span) for param, piece in reduction.pieces for span in _cut(param, piece)]
    if len(ranks) <= copies.count:  # cut all the same: parts of the norm are those of any layout
        yield from (StateBlock(param, span, ranks) for param, span in blocks)
        return
    preferred = np.argsort(_weights(blocks, ranks), axis=1, kind="stable").tolist()
    sizes = [(span[1] - span[0]) * param.row_numel for param, span in blocks]
    room = [copies.count * sum(sizes) / len(ranks)] * len(ranks)
    nodes = [rank // copies.ranks_per_node for rank in ranks]
    held: dict[int, tuple[int, ...]] = {}
    for block in sorted(range(len(blocks)), key=lambda block: -sizes[block]):
        chosen: list[int] = []
        for _ in range(copies.count):
            free = [index for index in preferred[block] if index not in chosen]
            apart = {nodes[index] for index in chosen}
            free = [index for index in free if nodes[index] not in apart] or free
            fitting = (index for index in free if room[index] >= sizes[block])
            chosen.append(next(fitting, max(free, key=lambda index: room[index])))
            room[chosen[-1]] -= sizes[block]
        held[block] = tuple(ranks[index] for index in chosen)
    yield from (StateBlock(*one, held[block]) for block, one in enumerate(blocks))


def _cut(param: Param, piece: Range) -> list[Range]:
    """Cut a piece at edges that are the same in every layout."""
    most = max(1, _MOST_NUMEL // param.row_numel)
    rows = max(min(-(-param.size // _BLOCKS), most), -(-_BLOCK_NUMEL // param.row_numel))
    edges = range(piece[0] // rows * rows, piece[1], rows)
    return [(max(edge, piece[0]), min(edge + rows, piece[1])) for edge in edges]


def _weights(blocks: Sequence[tuple[Param, Range]], ranks: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Hash of each block and rank, [blocks, ranks]; the least comes first."""
    names = [zlib.crc32(param.key.encode()) << 32 | start for param, (start, _) in blocks]
    name, rank = np.array(names, np.uint64)[:, None], np.array(ranks, np.uint64)[None, :]
    return _mixed(_mixed(name) + rank)


def _mixed(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix all bits (the finalizer of SplitMix64, Steele et al. 2014)."""
    bits = bits + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _joined(spans: Sequence[Range]) -> tuple[Range, ...]:
    """Join adjacent ranges."""
    joined: list[Range] = []
    for start, stop in sorted(spans):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)
