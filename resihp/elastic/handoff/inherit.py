"""Gradient sums of the step in progress move to their heirs, like state, when the layout changes.

A replica's sum is as large as its parameters and cut as they are, so the same moves carry it: from
the ranks of one replica of the old layout to those of one replica of the new one. What it was made
from stays as it is until the new world is taken on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from resihp.contracts import Layout, Plan
from resihp.layout import Param, Range, moves

from ..engine import Engine, Setup
from ..engine.shard import Shard, rows
from ..engine.sums import Gradients, Parts, Rest
from ..instep.ledger import Kept, indices
from ..instep.shares import rest_shares
from ..instep.tree import Node, nodes
from ..worlds.comm import Group
from .stream import stream


@dataclass(frozen=True)
class Succession:
    """One step's kept sums on their way from the world of one plan to that of the next.

    `group` holds every rank that is alive; all of them call `settle` with the same `kept`.
    """

    setup: Setup
    group: Group
    rank: int
    before: Plan
    after: Plan
    limit_bytes: int

    def settle(self, kept: Sequence[Kept], engine: Engine | None, shard: Shard | None) -> Rest:
        """Bring every kept sum to its heir. `engine` is the old one, `shard` the new one."""
        shares = rest_shares(self.after, self.before.layout, kept)
        parts: Parts = []
        for heir, share in enumerate(shares):
            for one in share.inherited:
                parts += self._hand_over(one, heir, engine, shard)
        return Rest(shares, parts, self._losses(kept, engine))

    def _hand_over(self, one: Kept, heir: int, engine: Engine | None, shard: Shard | None) -> Parts:
        """Move one sum to replica `heir`; what this rank inherits: nothing outside of it."""
        source = Layout((self.before.layout.replicas[one.replica],))
        target = Layout((self.after.layout.replicas[heir],))
        keys = self._nodes(one)
        giver = taker = None
        if self.rank in source.ranks:
            assert engine is not None, "a sum is kept only if all of its ranks are alive"
            parts = engine.parts_of(one)
            assert tuple(node for node, _ in parts) == keys, "accounts and sums differ"
            giver = _Side(engine.shard.ranges, [gradients for _, gradients in parts])
        if self.rank in target.ranks:
            assert shard is not None
            taker = _Side(shard.ranges, [_own(giver, index, shard) for index in range(len(keys))])
        stream(
            self.group,
            self.rank,
            moves(source, target, self.setup.model.parameters),
            giver,
            taker,
            copies=len(keys),
            limit_bytes=self.limit_bytes,
        )
        return list(zip(keys, taker.parts, strict=True)) if taker is not None else []

    def _nodes(self, one: Kept) -> tuple[Node, ...]:
        leaves = self.before.microbatches
        if one.total or not self.setup.deterministic:
            return ((0, leaves),)
        return nodes(indices(one.finished), leaves)

    def _losses(self, kept: Sequence[Kept], engine: Engine | None) -> Mapping[int, float]:
        """The losses of all kept microbatches; each is known to some rank that is alive."""
        known = torch.full((self.before.microbatches,), -torch.inf, dtype=torch.float64)
        told = [] if engine is None else [engine.losses_of(one) for one in kept]
        for losses in told:
            for index, loss in losses.items():
                known[index] = loss
        values = self.group.all_reduce_max(known).tolist()
        return {index: values[index] for one in kept for index in indices(one.finished)}


@dataclass(frozen=True)
class _Side:
    """One rank's end of the moves: a `Holder` of the gradients of some nodes."""

    ranges: Mapping[Param, Range]
    parts: Sequence[Gradients]

    def state(self, param: Param) -> tuple[torch.Tensor, ...]:
        """The gradients of each node."""
        return tuple(gradients[param] for gradients in self.parts)


def _own(giver: _Side | None, index: int, new: Shard) -> Gradients:
    """What a rank has of a sum already: the very tensor where its range stays the same."""
    own: Gradients = {}
    for param, span in new.ranges.items():
        held = giver.ranges.get(param) if giver is not None else None
        if giver is not None and held == span:
            own[param] = giver.parts[index][param]
            continue
        own[param] = torch.zeros_like(new.tensors[param])
        if giver is None or held is None:
            continue
        shared = (max(held[0], span[0]), min(held[1], span[1]))
        if shared[0] < shared[1]:
            from_ = rows(giver.parts[index][param], param, shared, held[0])
            rows(own[param], param, shared, span[0]).copy_(from_)
    return own
