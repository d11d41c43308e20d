"""Process groups of one layout, as built by one rank."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from resihp.contracts import Layout, Place, Stage
from resihp.layout import (
    ActivationTransfer,
    Blocks,
    GradientReduction,
    Parameters,
    StateCopies,
    StateRanges,
    boundary_transfers,
    gradient_reductions,
    ranges_of,
    state_blocks,
)

from ..microbatches.ledger import GradientHolding, Spans
from .abortable import AbortableProcessGroup, ProcessGroupFactory

_BLOCKING_GROUP_THREADS = 2
"""Threads of a group whose collectives block training one after the other: gloo completes each
sooner than with one thread, at best in half the time, for sums of 256 KiB on two cores."""


@dataclass(frozen=True)
class P2PLink:
    """One chunk of a boundary activation, with a group for each direction.

    The two ends of a link start their transfers in different orders; within one direction both use
    the order of the microbatches.
    """

    transfer: ActivationTransfer
    forward: AbortableProcessGroup
    backward: AbortableProcessGroup


@dataclass(frozen=True)
class StageBoundary:
    """Links of this rank between its stage and an adjacent one."""

    chunks: int
    links: tuple[P2PLink, ...]


@dataclass(frozen=True)
class StateShards:
    """Optimizer state of a layout that is sharded over replicas.

    blocks  of the whole layout
    ranges  of which this rank holds the state
    """

    blocks: Blocks
    ranges: StateRanges


@dataclass(frozen=True)
class LayoutGroups:
    """All process groups of this rank in one layout.

    everyone  all ranks of the layout
    tp        ranks of this rank's stage
    before    boundary to the previous stage; None on the first
    after     boundary to the next stage; None on the last
    around    boundary from the last stage to the first, between two model chunks; on these two
              stages of an interleaved replica, else None
    sums      gradient sums over replicas in which this rank takes part
    state     None: each rank holds the optimizer state of all its parameters
    """

    layout: Layout
    place: Place
    everyone: AbortableProcessGroup
    tp: AbortableProcessGroup
    before: StageBoundary | None
    after: StageBoundary | None
    around: StageBoundary | None = None
    sums: tuple[tuple[GradientReduction, AbortableProcessGroup], ...] = field(default=())
    state: StateShards | None = None

    @property
    def device(self) -> torch.device:
        """Device of the tensors that the groups exchange."""
        return self.everyone.device

    @property
    def stage(self) -> Stage:
        """Stage of this rank."""
        return self.layout.stage_at(self.place)

    @property
    def chunks(self) -> int:
        """Model chunks of this rank's stage."""
        return len(self.stage.chunks)

    def source(self, chunk: int) -> StageBoundary | None:
        """Boundary that delivers the input of a model chunk; None for the first of the model."""
        return self.around if self.before is None and chunk > 0 else self.before

    def target(self, chunk: int) -> StageBoundary | None:
        """Boundary that takes the output of a model chunk; None for the last of the model."""
        return self.around if self.after is None and chunk + 1 < self.chunks else self.after

    def holding(self, generation: int, finished: Spans, *, summed: bool) -> GradientHolding:
        """Describe gradients of `finished` microbatches that this rank holds."""
        members = len(self.layout.replicas[self.place.dp].ranks)
        return GradientHolding(
            generation,
            self.place.dp,
            members,
            finished,
            summed=summed,
            is_scattered=self.state is not None,
        )

    @property
    def all(self) -> tuple[AbortableProcessGroup, ...]:
        """All groups, in the order in which every rank builds its own."""
        sides = (s for s in (self.before, self.after, self.around) if s is not None)
        links = [link for side in sides for link in side.links]
        between = [group for link in links for group in (link.forward, link.backward)]
        sums = [group for _, group in self.sums]
        return (self.everyone, self.tp, *between, *sums)


def build_layout_groups(
    factory: ProcessGroupFactory,
    layout: Layout,
    parameters: Parameters,
    *,
    name: str,
    copies: StateCopies | None = None,
) -> LayoutGroups:
    """Build this rank's groups for `layout`. Collective over the ranks of the layout.

    `name` is unique to the attempt, so that no attempt reads another one's keys in the store.
    `copies` of each range of the optimizer state are held; None: all ranks that hold the parameter
    hold one.
    Building a group blocks until all of its ranks do so; every rank builds its groups in one
    global order (all, stage, boundaries along the pipeline, sums), which excludes a deadlock.
    """
    place = layout.place_of(factory.rank)
    assert place is not None, "only ranks of the layout build its groups"
    stages = layout.replicas[place.dp].stages
    stage = stages[place.pp]
    threads = _BLOCKING_GROUP_THREADS
    everyone = factory.group(f"{name}/everyone", sorted(layout.ranks), threads=threads)
    tp = factory.group(f"{name}/tp", stage.ranks, threads=threads)
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
    state = None
    if copies is not None:
        blocks = state_blocks(layout, parameters, copies)
        state = StateShards(blocks, ranges_of(blocks).get(factory.rank, {}))
    return LayoutGroups(layout, place, everyone, tp, before, after, around, sums, state)


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
