"""From a state to a checkpoint in a host buffer: the plan, the buffer, the order of the copy."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from threading import Condition
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..history import Lineage
from ..ranks import Ranks, SaveItem
from ..state_dict import ObjectEntry, State, TensorEntry, collect
from .buffer_pool import BufferPool
from .copier import Copier, chunks_of, write_order
from .host_buffer import begin, collapse
from .in_flight import CheckpointAbandoned, InFlightCheckpoint, Pace, ShardIdentity
from .write_plan import (
    WritePlan,
    buffer_addresses,
    extra_entry,
    frozen,
    make_plan,
    save_items_of,
    signature_of,
    snapshot,
)


class PlannedState(NamedTuple):
    """What a state holds, and whether there are buffers of its shape (not: free ones)."""

    parts: list[TensorEntry]
    objects: list[ObjectEntry]
    has_buffers: bool


class Stager:
    """Copies states into host buffers, one state at a time, and waits for copies at the fence."""

    def __init__(self, ranks: Ranks, buffers: int, spare: int = 0) -> None:
        self._ranks = ranks
        self._slots = BufferPool(buffers, spare)
        self._changed = Condition()
        self._copier: Copier | None = None
        self._optimizers: list[torch.optim.Optimizer] = []
        self._modules: list[nn.Module] = []
        self._plan: WritePlan | None = None
        self._unmoved: list[Tensor] = []

    def know(self, optimizer: torch.optim.Optimizer, modules: Sequence[nn.Module]) -> None:
        """Copy in the order in which this optimizer writes; save buffers of modules at once."""
        self._optimizers.append(optimizer)
        self._modules += modules

    def fit(self, state: State) -> PlannedState:
        """Plan for the state if its shapes are new, and make the buffers fit it; collective."""
        held = collect(state)
        if not self.has_plan(*held):
            self.plan(*held, self._ranks.gather(save_items_of(*held)))
        return self.fitted(*held)

    def has_plan(self, parts: Sequence[TensorEntry], objects: Sequence[ObjectEntry]) -> bool:
        """Whether the plan is for a state of these shapes."""
        return self._plan is not None and self._plan.signature == signature_of(parts, objects)

    def plan(
        self,
        parts: Sequence[TensorEntry],
        objects: Sequence[ObjectEntry],
        everyones: Sequence[Sequence[SaveItem]],
    ) -> None:
        """Plan for a state, given what all ranks hold."""
        self._plan = None
        order = write_order([part.tensor for part in parts], self._optimizers)
        plan = self._plan = make_plan(parts, objects, self._ranks, order, everyones)
        self._unmoved = [parts[pick].tensor for pick in plan.picks]

    def fitted(self, parts: list[TensorEntry], objects: list[ObjectEntry]) -> PlannedState:
        """Make the buffers fit the plan."""
        assert self._plan is not None
        if self._copier is None:
            cuda = (part.tensor.device for part in parts if part.tensor.is_cuda)
            self._copier = Copier(next(cuda, torch.device("cpu")))
            weakref.finalize(self, self._copier.end)  # where nobody closes it
        return PlannedState(
            parts, objects, self._slots.fit(self._plan.file, pinned=self._copier.pins)
        )

    def settle(self) -> None:
        """Move the state to huge pages, once for each plan, in the background.

        After the first checkpoint rather than beside it, where the loop has not been prepared.
        """
        with self._changed:
            tensors, self._unmoved = self._unmoved, []
        begin(collapse, tensors)

    def lend(
        self,
        step: int,
        lineage: Lineage,
        found: PlannedState,
        state: State,
        extra: Mapping[str, object],
        window_s: float,
    ) -> InFlightCheckpoint | None:
        """A checkpoint in a buffer, not yet begun; None where no buffer is free in time."""
        assert self._plan is not None
        lent = self._slots.lend(window_s)
        if lent is None:
            return None
        given = state.values() if isinstance(state, Mapping) else ()
        volatile = buffer_addresses([*self._modules, *given])
        mine = [thing for thing in found.objects if thing.key in self._plan.objects]
        mine.append(extra_entry(extra, self._ranks.rank))
        return InFlightCheckpoint(
            ShardIdentity(step, self._ranks.rank, lineage, self._ranks.all),
            self._plan.file,
            lent[0],
            [snapshot(found.parts[pick].tensor, volatile) for pick in self._plan.picks],
            frozen(mine),
            self._changed,
            previous=lent[1],
        )

    @property
    def picks(self) -> tuple[int, ...]:
        """Positions of the parts that are copied, in the order of the buffer."""
        return self._plan.picks if self._plan is not None else ()

    def start(self, checkpoint: InFlightCheckpoint, pace: Pace | None = None) -> None:
        """Begin to copy; with a pace, what the level that reads tensors will not write in time."""
        assert self._copier is not None
        if checkpoint.previous is None and not self._copier.pins:
            checkpoint.pace = pace
        self._copier.start(checkpoint)

    def fence(self, checkpoint: InFlightCheckpoint, tensors: Sequence[Tensor] | None) -> bool:
        """Wait until the tensors (None: all) may change; False where it gives the checkpoint up.

        It waits for copies, never for storage: a copy that waits for room in the buffer is given
        up instead, and what a level is writing from the tensors is copied.
        """
        assert self._copier is not None
        if checkpoint.is_safe and not self._copier.pins:
            return True
        checkpoint.hurry.set()
        try:
            needed = range(checkpoint.count) if tensors is None else chunks_of(checkpoint, tensors)
            return self._secure(checkpoint, needed, self._copier)
        except BaseException as problem:
            checkpoint.veto(problem)  # the state is about to change all the same
            raise
        finally:
            self._copier.fence()

    def _secure(
        self, checkpoint: InFlightCheckpoint, needed: Sequence[int], copier: Copier
    ) -> bool:
        while True:
            helps = copier.help(checkpoint, needed)
            with checkpoint.changed:
                if checkpoint.problem is not None or checkpoint.progress.are_safe(needed):
                    return True
                number = checkpoint.progress.first_unsafe(needed)
                if number is not None and not checkpoint.has_room(number):
                    checkpoint.veto(CheckpointAbandoned("no room in the buffer at the fence"))
                    return False
                if number is None or not helps:
                    checkpoint.changed.wait()

    def close(self) -> None:
        """End the copying thread."""
        if self._copier is not None:
            self._copier.close()
