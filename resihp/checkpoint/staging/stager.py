"""Stager: plans for a state, lends it a buffer, copies it, and waits for the copy at the fence."""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Condition

import torch
from torch import Tensor, nn

from ..format.shard_file import ShardFile, ShardSpec, encode_object, object_section
from ..history import Lineage
from ..ranks import Ranks, SaveItem, assign_writers
from ..state_dict import CollectedState, ObjectEntry, State, collect, extra_entry
from .buffer_pool import BufferPool
from .copier import Copier, chunks_of, write_order
from .host_buffer import begin, collapse
from .in_flight import (
    CheckpointAbandoned,
    EncodeObjects,
    InFlightCheckpoint,
    Pace,
    ShardIdentity,
)

_OBJECT_OFFSETS = (-1,)
"""Placeholder for the offsets of an object."""


@dataclass(frozen=True, eq=False)
class WritePlan:
    """Entries that this rank writes.

    held     what the state has; the plan is for any state with the same
    picks    positions in the state's list of tensors, in the order of the file
    objects  keys of the objects
    """

    held: Sequence[SaveItem]
    file: ShardFile
    picks: tuple[int, ...]
    objects: frozenset[str]


def save_items_of(state: CollectedState) -> list[SaveItem]:
    """List what this rank holds and could write."""
    items = [
        SaveItem(e.key, e.offsets, tuple(e.tensor.shape), e.shape, e.nbytes, str(e.tensor.dtype))
        for e in state.tensors
    ]
    return items + [SaveItem(entry.key, _OBJECT_OFFSETS, (), (), 0) for entry in state.objects]


def make_plan(
    state: CollectedState,
    ranks: Ranks,
    order: Sequence[int],
    everyones: Sequence[Sequence[SaveItem]],
) -> WritePlan:
    """Select what this rank writes, given the items of all ranks or of this one alone.

    order  positions of the tensors, in the order to write them
    """
    held = save_items_of(state)
    if len(everyones) == len(ranks.all):
        mine = assign_writers(everyones)[ranks.all.index(ranks.rank)]
    else:
        mine = {(item.key, item.offsets) for item in held}
    tensors = state.tensors
    picks = tuple(i for i in order if (tensors[i].key, tensors[i].offsets) in mine)
    return WritePlan(
        held,
        ShardFile([ShardSpec.of(tensors[i]) for i in picks]),
        picks,
        frozenset(e.key for e in state.objects if (e.key, _OBJECT_OFFSETS) in mine),
    )


@dataclass(frozen=True, eq=False)
class CapturedState:
    """References to the tensors of a state at a step, and copies of everything else."""

    identity: ShardIdentity
    file: ShardFile
    sources: Sequence[Tensor]
    objects: EncodeObjects
    versions: Sequence[int]

    @property
    def is_unchanged(self) -> bool:
        """True if no tensor has been modified in place since, as far as torch has noticed."""
        return [_version(source) for source in self.sources] == self.versions


class Stager:
    """Copies states into host buffers, one at a time.

    buffers  number of host buffers, each of the size of this rank's state
    spare    number of those that a slow level uses
    """

    def __init__(self, ranks: Ranks, buffers: int, spare: int = 0) -> None:
        self._ranks = ranks
        self._pool = BufferPool(buffers, spare)
        self._changed = Condition()
        self._copier: Copier | None = None
        self._optimizers: list[torch.optim.Optimizer] = []
        self._modules: list[nn.Module] = []
        self._plan: WritePlan | None = None
        self._unmoved: list[Tensor] = []

    def know(self, optimizer: torch.optim.Optimizer, modules: Sequence[nn.Module]) -> None:
        """Copy in the order in which this optimizer writes; copy buffers of `modules` at `save`."""
        self._optimizers.append(optimizer)
        self._modules += modules

    def fit(self, state: State) -> CollectedState:
        """Plan for the state if its shapes are new, and allocate buffers; a collective call."""
        collected = collect(state)
        if not self.has_plan(collected):
            self.plan(collected, self._ranks.gather(save_items_of(collected)))
        self._fit_pool()
        return collected

    def has_plan(self, state: CollectedState) -> bool:
        """Return True if the plan is for a state of these shapes."""
        return self._plan is not None and self._plan.held == save_items_of(state)

    def plan(self, state: CollectedState, everyones: Sequence[Sequence[SaveItem]]) -> None:
        """Plan for a state, given the items of all ranks."""
        self._plan = None
        order = write_order([entry.tensor for entry in state.tensors], self._optimizers)
        plan = self._plan = make_plan(state, self._ranks, order, everyones)
        self._unmoved = [state.tensors[pick].tensor for pick in plan.picks]
        if self._copier is None:
            cuda = (e.tensor.device for e in state.tensors if e.tensor.is_cuda)
            self._copier = Copier(next(cuda, torch.device("cpu")))
            weakref.finalize(self, self._copier.end)  # ends the thread of an unclosed stager

    def move_to_huge_pages(self) -> None:
        """Move the state to huge pages in the background, once per plan.

        Called after the first checkpoint, or from `prepare`, so that it does not slow the former.
        """
        with self._changed:
            tensors, self._unmoved = self._unmoved, []
        begin(collapse, tensors)

    def capture(
        self,
        step: int,
        lineage: Lineage,
        collected: CollectedState,
        state: State,
        extra: Mapping[str, object],
    ) -> CapturedState:
        """Capture a state that the plan is for; copies objects and buffers of modules."""
        assert self._plan is not None
        modules = [*self._modules, *(state.values() if isinstance(state, Mapping) else ())]
        volatile = {
            buffer.data_ptr()
            for module in modules
            if isinstance(module, nn.Module)
            for buffer in module.buffers()  # running statistics, which the forward pass may change
        }
        tensors = [collected.tensors[pick].tensor for pick in self._plan.picks]
        sources = [t.clone() if volatile and t.data_ptr() in volatile else t for t in tensors]
        entries = [entry for entry in collected.objects if entry.key in self._plan.objects]
        entries.append(extra_entry(extra, self._ranks.rank))
        objects = [ObjectEntry(one.key, one.path, copy.deepcopy(one.value)) for one in entries]
        return CapturedState(
            ShardIdentity(step, self._ranks.rank, lineage, self._ranks.all),
            self._plan.file,
            sources,
            lambda start: object_section(
                ((e.key, e.path, encode_object(e.value)) for e in objects), start
            ),
            [_version(source) for source in sources],
        )

    def lend(self, captured: CapturedState, window_s: float) -> InFlightCheckpoint | None:
        """Lend a buffer to a checkpoint, not begun yet; None if none is free within the window."""
        self._fit_pool()
        lent = self._pool.lend(captured.file, window_s)
        if lent is None:
            return None
        slot, previous = lent
        return InFlightCheckpoint(
            captured.identity,
            captured.file,
            slot,
            captured.sources,
            captured.objects,
            self._changed,
            previous=previous,
        )

    def start(self, checkpoint: InFlightCheckpoint, pace: Pace | None = None) -> None:
        """Begin to copy; with a pace, only what the level will not write from the tensors."""
        assert self._copier is not None
        if checkpoint.previous is None and not self._copier.pins:
            checkpoint.pace = pace
        self._copier.start(checkpoint)

    def fence(
        self,
        checkpoint: InFlightCheckpoint,
        tensors: Sequence[Tensor] | None,
        deadline_s: float = 0.0,
    ) -> bool:
        """Wait until the tensors (None: all) may change; False if the checkpoint is abandoned.

        It waits for copies and not for storage: chunks that a level is writing from the tensors are
        copied. A copy that needs room in the buffer waits until the deadline of the monotonic
        clock, then the checkpoint is abandoned.
        """
        assert self._copier is not None
        if checkpoint.is_safe and not self._copier.pins:
            return True
        checkpoint.hurry.set()
        try:
            needed = range(checkpoint.count) if tensors is None else chunks_of(checkpoint, tensors)
            return self._secure(checkpoint, needed, self._copier, deadline_s)
        except BaseException as problem:
            checkpoint.abandon(problem)  # the caller changes the state in any case
            raise
        finally:
            self._copier.fence()

    def _secure(
        self,
        checkpoint: InFlightCheckpoint,
        needed: Sequence[int],
        copier: Copier,
        deadline_s: float,
    ) -> bool:
        while True:
            helps = copier.help(checkpoint, needed)
            with checkpoint.changed:
                if checkpoint.problem is not None or checkpoint.progress.are_safe(needed):
                    return True
                number = checkpoint.progress.first_uncopied(needed)
                if number is not None and not checkpoint.has_room(number):
                    left_s = deadline_s - time.monotonic()
                    if left_s <= 0:
                        checkpoint.abandon(CheckpointAbandoned("no room in the buffer"))
                        return False
                    checkpoint.changed.wait(left_s)
                elif number is None or not helps:
                    checkpoint.changed.wait()

    def close(self) -> None:
        """End the copying thread."""
        if self._copier is not None:
            self._copier.close()

    def _fit_pool(self) -> None:
        assert self._plan is not None
        assert self._copier is not None
        self._pool.fit(self._plan.file, pinned=self._copier.pins)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
