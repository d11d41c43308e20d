"""The process groups of one plan, seen from one rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from resihp.contracts import Layout, Place, Stage
from resihp.layout import (
    ActivationTransfer,
    GradientReduction,
    Parameters,
    boundary_transfers,
    gradient_reductions,
)

from ..microbatches.ledger import GradientHolding, Spans
from .abortable import AbortableProcessGroup, ProcessGroupFactory

_WAITED_FOR = 2
"""Threads of a group whose exchanges training waits for, one after the other: gloo ends each sooner
than with one thread, in half the time at best, for sums of 256 KiB on two cores."""


@dataclass(frozen=True)
class P2PLink:
    """A chunk of a boundary activation, with one group for each direction.

    Two groups, because the two ends of a link start their transfers in different orders: within
    one direction the order is that of the microbatches at both ends.
    """

    transfer: ActivationTransfer
    forward: AbortableProcessGroup
    backward: AbortableProcessGroup


@dataclass(frozen=True)
class StageBoundary:
    """What this rank sends or receives between its stage and a neighbour."""

    chunks: int
    links: tuple[P2PLink, ...]


@dataclass(frozen=True)
class LayoutGroups:
    """Every group in which this rank takes part.

    everyone  all ranks that work in the layout
    tp        the rank's stage
    before    boundary to the previous stage; None on the first
    after     boundary to the next stage; None on the last
    around    boundary from the last stage to the first, between two model chunks; on these two
              stages of an interleaved replica, else None
    sums      gradient sums over the replicas in which this rank takes part
    """

    layout: Layout
    place: Place
    everyone: AbortableProcessGroup
    tp: AbortableProcessGroup
    before: StageBoundary | None
    after: StageBoundary | None
    around: StageBoundary | None = None
    sums: tuple[tuple[GradientReduction, AbortableProcessGroup], ...] = field(default=())

    @property
    def stage(self) -> Stage:
        """The stage in which this rank stands."""
        return self.layout.stage_at(self.place)

    @property
    def chunks(self) -> int:
        """Model chunks of this rank's stage."""
        return len(self.stage.chunks)

    def source(self, chunk: int) -> StageBoundary | None:
        """Where the input of a model chunk comes from; None for the first of the model."""
        return self.around if self.before is None and chunk > 0 else self.before

    def target(self, chunk: int) -> StageBoundary | None:
        """Where the output of a model chunk goes to; None for the last of the model."""
        return self.around if self.after is None and chunk + 1 < self.chunks else self.after

    def holding(self, generation: int, finished: Spans, *, summed: bool) -> GradientHolding:
        """Describe gradients of `finished` microbatches that this rank holds."""
        members = len(self.layout.replicas[self.place.dp].ranks)
        return GradientHolding(generation, self.place.dp, members, finished, summed)

    @property
    def all(self) -> tuple[AbortableProcessGroup, ...]:
        """All of them, in the order in which every rank builds its own."""
        sides = (s for s in (self.before, self.after, self.around) if s is not None)
        links = [link for side in sides for link in side.links]
        between = [group for link in links for group in (link.forward, link.backward)]
        sums = [group for _, group in self.sums]
        return (self.everyone, self.tp, *between, *sums)


def build_layout_groups(
    factory: ProcessGroupFactory, layout: Layout, parameters: Parameters, *, name: str
) -> LayoutGroups:
    """Build this rank's groups for `layout`. Collective over the ranks of the layout.

    `name` is unique to the attempt, so that no attempt meets what another left in the store.
    Building a group blocks until all of its ranks do so; every rank builds its groups in one
    global order (all, stage, boundaries along the pipeline, sums), so none waits in a circle.
    """
    place = layout.place_of(factory.rank)
    assert place is not None, "only ranks of the layout build its generation"
    stages = layout.replicas[place.dp].stages
    stage = stages[place.pp]
    everyone = factory.group(f"{name}/everyone", sorted(layout.ranks), threads=_WAITED_FOR)
    tp = factory.group(f"{name}/tp", stage.ranks, threads=_WAITED_FOR)
    before = after = around = None
    if place.pp > 0:
        before = _boundary(factory, name, stages[place.pp - 1], stage)
    if place.pp + 1 < len(stages):
        after = _boundary(factory, name, stage, stages[place.pp + 1])
    if len(stage.chunks) > 1 and stage in (stages[0], stages[-1]):
        around = _boundary(factory, f"{name}/around", stages[-1], stages[0])
    sums = tuple(
        (reduction, factory.group(f"{name}/sum", reduction.ranks))
        for reduction in gradient_reductions(layout, parameters)
        if factory.rank in reduction.ranks and len(reduction.ranks) > 1
    )
    return LayoutGroups(layout, place, everyone, tp, before, after, around, sums)


def _boundary(
    factory: ProcessGroupFactory, name: str, sender: Stage, receiver: Stage
) -> StageBoundary:
    transfers = boundary_transfers(sender, receiver)
    links = []
    for transfer in transfers:
        ends = (transfer.source, transfer.target)
        if factory.rank in ends:
            label = f"{name}/link{transfer.chunk}"
            forward = factory.group(f"{label}/forward", ends)
            links.append(P2PLink(transfer, forward, factory.group(f"{label}/backward", ends)))
    return StageBoundary(len(transfers), tuple(links))
