"""Migration of partial gradient sums of the step in progress, when the layout changes.

A replica's sum has the size and the ranges of its parameters, so the same moves carry it: from the
ranks of one replica of the old layout to those of one replica of the new layout. The old sums stay
intact until the new generation is committed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from resihp.contracts import Layout, Plan, Replica
from resihp.layout import Move, Param, Parameters, Range, StateRange, holdings, moves

from ..microbatches.assignment import remaining_assignments
from ..microbatches.ledger import SurvivingSum, indices
from ..microbatches.tree_sum import Node, nodes
from ..process_groups.abortable import AbortableProcessGroup
from ..step import Engine, Setup
from ..step.gradient_accumulation import Gradients, Parts, StepRemainder
from ..step.shard import STATE_DTYPE, Shard, copy_shared_rows
from .exchange import GradientParts, TensorExchange, view_of


def moves_of_sums(
    parameters: Parameters, before: Plan, after: Plan, kept: Sequence[SurvivingSum]
) -> tuple[Move, ...]:
    """The moves of all `kept` sums to the replicas that continue them."""
    planned: list[Move] = []
    for replica, share in enumerate(remaining_assignments(after, before.layout, kept)):
        target = Layout((after.layout.replicas[replica],))
        for one in share.inherited:
            source = before.layout.replicas[one.replica]
            for some in _separate_copies(one, source, parameters):
                planned += moves(Layout((source,)), target, some)
    return tuple(planned)


@dataclass(frozen=True)
class GradientMigration:
    """Moves the surviving sums of one step from the ranks of one plan to those of the next.

    group     all ranks alive; all of them call `run` with the same `kept`
    exchange  has links for all moves of `moves_of_sums`
    """

    setup: Setup
    group: AbortableProcessGroup
    exchange: TensorExchange
    before: Plan
    after: Plan

    def run(
        self, kept: Sequence[SurvivingSum], engine: Engine | None, shard: Shard | None
    ) -> StepRemainder:
        """Move every kept sum. `engine` is of the old generation, `shard` of the new one."""
        shares = remaining_assignments(self.after, self.before.layout, kept)
        parts: Parts = []
        for replica, share in enumerate(shares):
            for one in share.inherited:
                parts += self._move_sum(one, replica, engine, shard)
        return StepRemainder(shares, parts, self._losses(kept, engine))

    def _move_sum(
        self, one: SurvivingSum, replica: int, engine: Engine | None, shard: Shard | None
    ) -> Parts:
        """Move one sum to `replica`; returns this rank's ranges, empty outside of the replica."""
        source = self.before.layout.replicas[one.replica]
        target = self.after.layout.replicas[replica]
        parameters = self.setup.model.parameters
        parts, *others = (
            self._move(one, source, target, some, engine)
            for some in _separate_copies(one, source, parameters)
        )
        if self.group.rank not in target.ranks:
            return []
        assert shard is not None
        for second in others:
            parts = [_added(*both) for both in zip(parts, second, strict=True)]
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
        """Move the ranges of `parameters` between two replicas; returns this rank's ranges."""
        layouts, keys = (Layout((source,)), Layout((target,))), self._nodes(one)
        held, due = (holdings(layout, parameters).get(self.group.rank, {}) for layout in layouts)
        parts: Parts = [(node, {}) for node in keys]
        if self.group.rank in source.ranks:
            assert engine is not None, "a sum survives only if all of its ranks are alive"
            parts = engine.parts_of(one)
            assert tuple(node for node, _ in parts) == keys, "counts and sums differ"
        sums = [self._local(gradients, held, due) for _, gradients in parts]
        old = GradientParts([_in_ranges(gradients, held) for _, gradients in parts])
        new = GradientParts([_in_ranges(gradients, due) for gradients in sums])
        planned = moves(*layouts, parameters)
        self.exchange.run(planned, len(keys), view_of(old), view_of(new))
        return sums

    def _nodes(self, one: SurvivingSum) -> tuple[Node, ...]:
        leaves = self.before.microbatches
        if one.total or not self.setup.deterministic:
            return ((0, leaves),)
        return nodes(indices(one.finished), leaves)

    def _local(
        self, old: Gradients, held: Mapping[Param, Range], due: Mapping[Param, Range]
    ) -> Gradients:
        """Gradients of the ranges `due`, filled where this rank holds them already.

        Where a range stays the same, the tensor is shared with the old sum.
        """
        local: Gradients = {}
        for param, span in due.items():
            if held.get(param) == span:
                local[param] = old[param]
                continue
            shape = list(param.shape)
            shape[param.dim or 0] = span[1] - span[0]
            local[param] = torch.zeros(shape, dtype=STATE_DTYPE, device=self.group.device)
            if param in held:
                copy_shared_rows(param, old[param], held[param], local[param], span)
        return local

    def _losses(self, kept: Sequence[SurvivingSum], engine: Engine | None) -> Mapping[int, float]:
        """The losses of all kept microbatches; each is known to at least one rank alive."""
        device = self.group.device
        known = torch.full(
            (self.before.microbatches,), -torch.inf, dtype=torch.float64, device=device
        )
        for losses in [] if engine is None else [engine.losses_of(one) for one in kept]:
            for index, loss in losses.items():
                known[index] = loss
        values = self.group.all_reduce_max(known).tolist()
        return {index: values[index] for one in kept for index in indices(one.finished)}


def _in_ranges(
    gradients: Gradients, ranges: Mapping[Param, Range]
) -> Mapping[StateRange, torch.Tensor]:
    return {(param, span): gradients[param] for param, span in ranges.items() if param in gradients}


def _separate_copies(
    one: SurvivingSum, source: Replica, parameters: Parameters
) -> tuple[Parameters, ...]:
    """Parameters that move separately, to be added at the destination.

    The two copies of a tied parameter hold different halves of a replica's sum; in a sum over all
    replicas they are equal.
    """
    if parameters.second_copies.all and len(source.stages) > 1 and not one.total:
        return parameters.first_copies, parameters.second_copies
    return (parameters.first_copies,)


def _added(first: Gradients, second: Gradients) -> Gradients:
    """The sum of both, out of place."""
    added = dict(first)
    for param, gradient in second.items():
        added[param] = added[param] + gradient if param in added else gradient
    return added
