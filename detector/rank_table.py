"""A layout as arrays over ranks, so that all of them are judged at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from resihp.contracts import Layout

from .arrays import Floats, Ints


@dataclass(frozen=True)
class RankTable:
    """Where every rank stands; all arrays run over `ranks`, which are sorted.

    dp, pp    replica and stage
    group     id of the tensor-parallel group
    peers     id of the class of ranks that hold the same layers and the same share of them
    layers    number of layers held
    share     fraction of each layer held
    first, last   whether the stage holds the embedding, the head
    """

    ranks: Ints
    dp: Ints
    pp: Ints
    group: Ints
    peers: Ints
    layers: Floats
    share: Floats
    first: Floats
    last: Floats

    @property
    def size(self) -> int:
        """Number of ranks."""
        return int(self.ranks.size)

    @property
    def class_sizes(self) -> Ints:
        """Number of ranks in each class of peers."""
        return np.bincount(self.peers).astype(np.int64)

    def index(self, ranks: Ints) -> Ints:
        """Positions of ranks; -1 for those that do not work in the layout."""
        found = np.minimum(np.searchsorted(self.ranks, ranks), self.size - 1)
        return np.where(self.ranks[found] == ranks, found, -1)


def slots_of(places: RankTable) -> Ints:
    """Place of each rank within its tensor-parallel group."""
    order = np.lexsort((places.ranks, places.group))
    first = np.searchsorted(places.group[order], places.group[order])
    slot = np.empty(places.size, np.int64)
    slot[order] = np.arange(places.size) - first
    return slot


def rank_table_of(layout: Layout) -> RankTable:
    """The arrays of a layout."""
    rows: list[tuple[float, ...]] = []
    total = layout.layers
    for group, (dp, pp, stage) in enumerate(
        (dp, pp, stage)
        for dp, replica in enumerate(layout.replicas)
        for pp, stage in enumerate(replica.stages)
    ):
        lower, upper = stage.layers[0], stage.layers[0] + stage.layer_count
        whole = sum(stage.shares)
        for member, units in zip(stage.ranks, stage.shares, strict=True):
            last = float(stage.chunks[-1][1] == total)
            rows.append((member, dp, pp, group, lower, upper, units / whole, last))
    rows.sort()
    table = np.array(rows, np.float64)
    whole_numbers = table[:, :6].astype(np.int64).T
    start, stop, share = table[:, 4], table[:, 5], table[:, 6]
    kind = np.stack([start, stop, np.round(share * 1e9)], axis=1).astype(np.int64)
    _, peers = np.unique(kind, axis=0, return_inverse=True)
    return RankTable(
        ranks=whole_numbers[0],
        dp=whole_numbers[1],
        pp=whole_numbers[2],
        group=whole_numbers[3],
        peers=peers.reshape(-1).astype(np.int64),
        layers=stop - start,
        share=share,
        first=(start == 0).astype(np.float64),
        last=table[:, 7],
    )
