"""State that groups receive in their new places, and shares with which they receive less."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import Job, Layout

from ..cost_model import group_cost, layer_cost
from ..link_costs import ALL_LINKS_HEALTHY, LinkSlowdowns
from ..migration import NO_STATE, RankState, StateBytes, overlap, rank_states
from .tp_groups import TPGroup

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_REACH = 2  # layers by which boundaries between stages may move

_Piece = tuple[float, float, int, int, bool, bool]
"""Width after the change, the part of it that is kept, and the layers and ends held before."""


class ReceivedState:
    """Bytes that the ranks of chains receive with given layers; arrays are [group, rank].

    The layout before holds one model chunk per stage. `total` merges ranks that held the same
    layers, so that it costs as much as one rank.
    """

    def __init__(self, before: Layout, groups: Sequence[TPGroup], sizes: StateBytes) -> None:
        self._sizes = sizes
        states = dict(rank_states(before))
        pieces = [list(_pieces(group, states)) for group in groups]
        self._by_rank = _arrays(pieces)
        self._merged = _arrays([_merged(entries) for entries in pieces])
        self.kinds = [tuple(entries) for entries in pieces]

    def total(self, chains: Ints, layers: Ints) -> Floats:
        """Bytes of all ranks of every chain, [..., chain]; layers [..., chain, stage]."""
        return np.asarray(self._received(self._merged, chains, layers).sum(axis=(-1, -2)))

    def most(self, chains: Ints, layers: Ints) -> Floats:
        """Bytes of the rank that receives most in every chain, [..., chain]."""
        return np.asarray(self._received(self._by_rank, chains, layers).max(axis=(-1, -2)))

    def home(self, chain: Sequence[int], layers: int) -> list[int]:
        """Layers per stage with boundaries as close as possible to the ones before.

        Layers of a missing stage are divided between its neighbours.
        """
        largest = [max(self.kinds[group], key=lambda piece: piece[1]) for group in chain]
        spans = [piece[2:4] if piece[1] > 0.0 else None for piece in largest]
        edges = [0]
        for index in range(1, len(chain)):
            left, right = spans[index - 1], spans[index]
            near = [*([left[1]] if left else []), *([right[0]] if right else [])]
            ideal = sum(near) / len(near) if near else layers * index / len(chain)
            latest = layers - len(chain) + index
            edges.append(min(max(math.ceil(ideal), edges[-1] + 1), latest))
        return [stop - start for start, stop in pairwise([*edges, layers])]

    def fewest(self, chains: Ints, home: Ints, room: Ints) -> Ints:
        """Layers with which the ranks of every chain receive least, [limit, chain, stage], where a
        stage may have at most `room` layers, of the same shape.

        Exact for boundaries between stages that are within two layers of those of `home`, [chain,
        stage], by a dynamic program over them. Layers of 0 where there are none.
        """
        total, each = int(home[0].sum()), np.zeros((len(chains), 1), np.int64)
        inner = np.cumsum(home, axis=1)[:, :-1, None] + np.arange(-_REACH, _REACH + 1)
        edges = [each, *inner.transpose(1, 0, 2), each + total]
        least, choices = np.zeros((len(room), *each.shape)), []
        for stage, (before, after) in enumerate(pairwise(edges)):
            low, high = before[:, :, None], after[:, None, :]
            piece = [array[chains[:, stage], None, None] for array in self._merged[:4]]
            received = _received_layers(piece, low[..., None], high[..., None]).sum(axis=-1)
            held = high - low
            able = (held >= 1) & (held <= room[:, :, stage, None, None])
            sums = np.where(able, least[..., None] + received, np.inf)
            choices.append(sums.argmin(axis=2))
            least = sums.min(axis=2)
        at = np.zeros(least.shape, np.int64)
        cuts = [np.full_like(at, total)]
        for before, choice in zip(reversed(edges[:-1]), reversed(choices), strict=True):
            at = np.take_along_axis(choice, at, axis=2)
            cuts.append(np.take_along_axis(before[None], at, axis=2))
        layers = np.diff(np.concatenate(cuts[::-1], axis=2), axis=2)
        return np.asarray(np.where(np.isfinite(least), layers, 0))

    def _received(self, arrays: tuple[Floats, ...], chains: Ints, layers: Ints) -> Floats:
        """Bytes [..., chain, stage, rank]."""
        *piece, first, last = (array[chains] for array in arrays)
        width, kept, _, _ = piece
        after = np.cumsum(layers, axis=-1)
        received = _received_layers(piece, (after - layers)[..., None], after[..., None])
        received *= self._sizes.layer
        received[..., 0, :] += self._sizes.embedding * (width - first * kept)[..., 0, :]
        received[..., -1, :] += self._sizes.embedding * (width - last * kept)[..., -1, :]
        return np.asarray(received)


def _received_layers(pieces: Sequence[Floats], low: Ints, high: Ints) -> Floats:
    """Layers, as sums of fractions, that ranks receive of those from `low` to `high`."""
    width, kept, start, stop = pieces
    common = np.minimum(high, stop) - np.maximum(low, start)
    return np.asarray((high - low) * width - np.maximum(common, 0.0) * kept)


def _pieces(group: TPGroup, before: Mapping[int, RankState]) -> Iterator[_Piece]:
    units, edge = sum(group.shares), 0
    for rank, share in zip(group.ranks, group.shares, strict=True):
        part = (edge / units, (edge + share) / units)
        had = before.get(rank, NO_STATE)
        start, stop = had.chunks[0] if had.chunks else (0, 0)
        yield part[1] - part[0], overlap(part, had.part), start, stop, had.first, had.last
        edge += share


def _merged(pieces: Iterable[_Piece]) -> list[_Piece]:
    """Pieces of ranks that held the same layers, as one."""
    sums: dict[tuple[int, int, bool, bool], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for width, kept, start, stop, first, last in pieces:
        entry = sums[start, stop, first, last]
        entry[0] += width
        entry[1] += kept
    return [(width, kept, *origin) for origin, (width, kept) in sums.items()]


def _arrays(pieces: Sequence[Sequence[_Piece]]) -> tuple[Floats, ...]:
    """Fields of the pieces, each [group, piece], padded with pieces of no width."""
    slots = max(map(len, pieces))
    table = np.zeros((6, len(pieces), slots))
    for row, entries in enumerate(pieces):
        table[:, row, : len(entries)] = np.array(entries, float).T
    return tuple(table)


class NearbyShares:
    """Shares of groups close to the ones before the change, for a time that a layer may take.

    Cached: many groups have the same shares and speeds.
    """

    def __init__(
        self,
        job: Job,
        before: Layout,
        speeds: Mapping[int, float],
        links: LinkSlowdowns = ALL_LINKS_HEALTHY,
    ) -> None:
        self._job, self._speeds, self._cost = job, speeds, layer_cost(job)
        self._links = links
        self._parts = {rank: state.part for rank, state in rank_states(before)}
        self._known: dict[tuple[object, ...], tuple[int, ...]] = {}

    def has_moved(self, group: TPGroup) -> bool:
        """True if a rank holds a part of the layers that it did not hold before."""
        units, edge = sum(group.shares), 0
        for rank, share in zip(group.ranks, group.shares, strict=True):
            low, high = self._parts.get(rank, (0.0, 0.0))
            if edge < low * units - 1e-6 or edge + share > high * units + 1e-6:
                return True
            edge += share
        return False

    def group(self, group: TPGroup, slower: float) -> TPGroup:
        """Group whose ranks receive least, with layers that take at most `slower` times as long."""
        speeds = tuple(self._speeds.get(rank, 1.0) for rank in group.ranks)
        parts = tuple(self._parts.get(rank, (0.0, 0.0)) for rank in group.ranks)
        key = (speeds, parts, group.shares, slower)
        if key not in self._known:
            self._known[key] = self._nearest(speeds, parts, group.shares, slower)
        shares = self._known[key]
        slowdown = self._links.collective(group.ranks)
        cost = group_cost(self._job, self._cost, shares, speeds, group.ranks, slowdown)
        return TPGroup(group.ranks, shares, group.column, cost)

    def _nearest(
        self,
        speeds: Sequence[float],
        parts: Sequence[tuple[float, float]],
        shares: Sequence[int],
        slower: float,
    ) -> tuple[int, ...]:
        """Dynamic program over the boundaries between the ranks."""
        units = sum(shares)
        layer_ms = self._cost.forward_ms + self._cost.backward_ms
        fixed = 2.0 * self._cost.fixed_ms / layer_ms * units
        limit = slower * max((fixed + q) / p for q, p in zip(shares, speeds, strict=True))
        low, high = np.arange(units + 1)[:, None], np.arange(units + 1)
        least = np.where(high == 0, 0.0, np.inf)
        choices = []
        for speed, (start, stop) in zip(speeds, parts, strict=True):
            widths = high - low
            kept = np.minimum(high, stop * units) - np.maximum(low, start * units)
            received = widths - np.maximum(kept, 0.0)
            allowed = (widths >= 1) & (fixed + widths <= limit * speed * (1 + 1e-9))
            sums = np.where(allowed, least[:, None] + received, np.inf)
            choices.append(sums.argmin(axis=0))
            least = sums.min(axis=0)
        found, edge = [], units
        for choice in reversed(choices):
            found.append(edge - int(choice[edge]))
            edge = int(choice[edge])
        return tuple(reversed(found))
