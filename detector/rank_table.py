"""A layout as arrays over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import Layout

from .arrays import Floats, Ints, positions


@dataclass(frozen=True)
class RankTable:
    """Place of every rank in the layout; all arrays run over `ranks`, which are sorted.

    dp, pp    replica and stage
    group     id of the tensor-parallel group
    slot      position within the tensor-parallel group
    peers     id of the class of ranks that hold the same layers and the same share of them
    layers    number of layers held
    share     fraction of each layer held
    first, last   1.0 where the stage holds the embedding, the head; else 0.0
    """

    ranks: Ints
    dp: Ints
    pp: Ints
    group: Ints
    slot: Ints
    peers: Ints
    layers: Floats
    share: Floats
    first: Floats
    last: Floats

    @property
    def size(self) -> int:
        """Number of ranks."""
        return int(self.ranks.size)

    @cached_property
    def members(self) -> frozenset[int]:
        """The ranks as a set."""
        return frozenset(self.ranks.tolist())

    @property
    def class_sizes(self) -> Ints:
        """Number of ranks in each class of peers."""
        return np.bincount(self.peers).astype(np.int64)

    def index(self, ranks: NDArray[np.integer]) -> Ints:
        """Positions of ranks in the table; -1 for ranks outside the layout."""
        return positions(self.ranks, ranks)

    @classmethod
    def of(cls, layout: Layout) -> RankTable:
        """The table of a layout."""
        rows: list[tuple[float, ...]] = []
        stages = [
            (dp, pp, stage)
            for dp, replica in enumerate(layout.replicas)
            for pp, stage in enumerate(replica.stages)
        ]
        for group, (dp, pp, stage) in enumerate(stages):
            start, stop = stage.layers[0], stage.layers[0] + stage.layer_count
            is_last = float(stage.chunks[-1][1] == layout.layers)
            members = sorted(zip(stage.ranks, stage.shares, strict=True))
            held = sum(stage.shares)
            for slot, (rank, units) in enumerate(members):
                rows.append((rank, dp, pp, group, slot, start, stop, units / held, is_last))
        rows.sort()
        table = np.array(rows, np.float64)
        ranks, dp, pp, group, slot, start, stop = table[:, :7].astype(np.int64).T
        shares, last = table[:, 7], table[:, 8]
        kind = np.stack([start, stop, np.round(shares * 1e9).astype(np.int64)], axis=1)
        _, peers = np.unique(kind, axis=0, return_inverse=True)
        return cls(
            ranks=ranks,
            dp=dp,
            pp=pp,
            group=group,
            slot=slot,
            peers=peers.reshape(-1).astype(np.int64),
            layers=(stop - start).astype(np.float64),
            share=shares,
            first=(start == 0).astype(np.float64),
            last=last,
        )
