"""Gradient sums of the step in progress move to their heirs, like state, when the layout changes.

A replica's sum is as large as its parameters and cut as they are, so the same moves carry it: from
the ranks of one replica of the old layout to those of one replica of the new one. What it was made
from stays as it is until the new generation is taken on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from resihp.contracts import Layout, Plan, Replica
from resihp.layout import Move, Param, Parameters, Range, holdings, moves

from ..microbatches.assignment import remaining_assignments
from ..microbatches.ledger import SurvivingSum, indices
from ..microbatches.tree_sum import Node, nodes
from ..process_groups.abortable import AbortableProcessGroup
from ..step import Engine, Setup
from ..step.gradient_accumulation import Gradients, Parts, StepRemainder
from ..step.shard import Shard, rows
from .exchange import GradientParts, TensorExchange, state_view


def inherited(
    parameters: Parameters, before: Plan, after: Plan, kept: Sequence[SurvivingSum]
) -> tuple[Move, ...]:
    """The moves of all kept sums to their heirs."""
    planned: list[Move] = []
    for heir, share in enumerate(remaining_assignments(after, before.layout, kept)):
        target = Layout((after.layout.replicas[heir],))
        for one in share.inherited:
            source = before.layout.replicas[one.replica]
            for some in _apart(one, source, parameters):
                planned += moves(Layout((source,)), target, some)
    return tuple(planned)


@dataclass(frozen=True)
class GradientMigration:
    """One step's kept sums on their way from the generation of one plan to that of the next.

    `group` holds every rank that is alive; all of them call `settle` with the same `kept`, for
    which `courier` can carry all moves that are `inherited`.
    """

    setup: Setup
    group: AbortableProcessGroup
    courier: TensorExchange
    rank: int
    before: Plan
    after: Plan

    def settle(
        self, kept: Sequence[SurvivingSum], engine: Engine | None, shard: Shard | None
    ) -> StepRemainder:
        """Bring every kept sum to its heir. `engine` is the old one, `shard` the new one."""
        shares = remaining_assignments(self.after, self.before.layout, kept)
        parts: Parts = []
        for heir, share in enumerate(shares):
            for one in share.inherited:
                parts += self._hand_over(one, heir, engine, shard)
        return StepRemainder(shares, parts, self._losses(kept, engine))

    def _hand_over(
        self, one: SurvivingSum, heir: int, engine: Engine | None, shard: Shard | None
    ) -> Parts:
        """Move one sum to replica `heir`; what this rank inherits: nothing outside of it."""
        source = self.before.layout.replicas[one.replica]
        target = self.after.layout.replicas[heir]
        parameters = self.setup.model.parameters
        parts, *others = (
            self._move(one, source, target, some, engine)
            for some in _apart(one, source, parameters)
        )
        if self.rank not in target.ranks:
            return []
        assert shard is not None
        for second in others:
            parts = [_joined(*both) for both in zip(parts, second, strict=True)]
        for gradients in parts:
            for param, tensor in shard.tensors.items():
                gradients.setdefault(param, torch.zeros_like(tensor))
        return list(zip(self._nodes(one), parts, strict=True))

    def _move(
        self,
        one: SurvivingSum,
        source: Replica,
        target: Replica,
        parameters: Parameters,
        engine: Engine | None,
    ) -> list[Gradients]:
        """Move the ranges of `parameters` from one replica to another; what this rank then has."""
        layouts, keys = (Layout((source,)), Layout((target,))), self._nodes(one)
        held, due = (holdings(layout, parameters).get(self.rank, {}) for layout in layouts)
        giver = None
        if self.rank in source.ranks:
            assert engine is not None, "a sum is kept only if all of its ranks are alive"
            parts = engine.parts_of(one)
            assert tuple(node for node, _ in parts) == keys, "accounts and sums differ"
            giver = GradientParts(held, [gradients for _, gradients in parts])
        taker = GradientParts(due, [_own(giver, index, due) for index in range(len(keys))])
        planned = moves(*layouts, parameters)
        self.courier.carry(planned, len(keys), state_view(giver), state_view(taker))
        return [*taker.parts]

    def _nodes(self, one: SurvivingSum) -> tuple[Node, ...]:
        leaves = self.before.microbatches
        if one.total or not self.setup.deterministic:
            return ((0, leaves),)
        return nodes(indices(one.finished), leaves)

    def _losses(self, kept: Sequence[SurvivingSum], engine: Engine | None) -> Mapping[int, float]:
        """The losses of all kept microbatches; each is known to some rank that is alive."""
        known = torch.full((self.before.microbatches,), -torch.inf, dtype=torch.float64)
        told = [] if engine is None else [engine.losses_of(one) for one in kept]
        for losses in told:
            for index, loss in losses.items():
                known[index] = loss
        values = self.group.all_reduce_max(known).tolist()
        return {index: values[index] for one in kept for index in indices(one.finished)}


def _apart(one: SurvivingSum, source: Replica, parameters: Parameters) -> tuple[Parameters, ...]:
    """What of a sum moves apart, to be added up where it meets.

    The two copies of a tied parameter hold different halves of its sum; in a sum over all
    replicas they are equal.
    """
    if parameters.second_copies.all and len(source.stages) > 1 and not one.total:
        return parameters.first_copies, parameters.second_copies
    return (parameters.first_copies,)


def _own(giver: GradientParts | None, index: int, due: Mapping[Param, Range]) -> Gradients:
    """What a rank has of a sum already: the very tensor where its range stays the same."""
    own: Gradients = {}
    for param, span in due.items():
        held = giver.ranges.get(param) if giver is not None else None
        if giver is not None and held == span:
            own[param] = giver.parts[index][param]
            continue
        shape = list(param.shape)
        shape[param.dim or 0] = span[1] - span[0]
        own[param] = torch.zeros(shape)
        if giver is None or held is None:
            continue
        shared = (max(held[0], span[0]), min(held[1], span[1]))
        if shared[0] < shared[1]:
            from_ = rows(giver.parts[index][param], param, shared, held[0])
            rows(own[param], param, shared, span[0]).copy_(from_)
    return own


def _joined(first: Gradients, second: Gradients) -> Gradients:
    """Both sums in one; what they were made from stays as it is."""
    joined = dict(first)
    for param, gradient in second.items():
        joined[param] = joined[param] + gradient if param in joined else gradient
    return joined
