"""Stager: plans for a state, copies it through the host cache, and waits for that at the fence."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from threading import Condition

import torch
from torch import Tensor, nn

from resihp.contracts import ContractError

from ..format.shard_file import ShardFile, ShardSpec
from ..history import Lineage
from ..providers import TensorSource, memory_of
from ..ranks import Ranks, SaveItem, assign_writers, gather_valid
from ..state_dict import CollectedState, State, collect, extra_entry, opened
from .copier import Copier, address_of, chunks_of, write_order
from .fence import FenceWait
from .host_buffer import begin, collapse, populate
from .host_cache import BLOCK_BYTES, HostCache
from .in_flight import (
    CheckpointAbandoned,
    EncodeObjects,
    InFlightCheckpoint,
    Pace,
    ShardIdentity,
)
from .objects import ObjectSnapshots
from .zero_copy import SCRATCH_BLOCKS, WRITERS

_OBJECT_OFFSETS = (-1,)
"""Placeholder for the offsets of an object."""

_RESERVED_BLOCKS = WRITERS * SCRATCH_BLOCKS
LEAST_CACHE_BYTES = 2 * _RESERVED_BLOCKS * BLOCK_BYTES
"""Smallest host cache: half of it is memory of the threads that write from the tensors."""


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


def device_of(tensors: Iterable[Tensor]) -> torch.device:
    """Return the CUDA device that holds tensors of a state, else the CPU.

    Copies are ordered behind the training on one device: raises `ContractError` for several.
    """
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ContractError("state", f"lies on several devices ({names}), a rank saves one")
    return next(iter(devices), torch.device("cpu"))


def save_items_of(state: CollectedState) -> list[SaveItem]:
    """List what this rank holds and could write."""
    items = [
        SaveItem(e.key, e.offsets, tuple(e.source.shape), e.shape, e.nbytes, str(e.source.dtype))
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
    """References to the tensors of a state at a step, and everything else as it was then."""

    identity: ShardIdentity
    file: ShardFile
    sources: Sequence[TensorSource]
    objects: EncodeObjects
    versions: Sequence[int]

    @property
    def is_unchanged(self) -> bool:
        """True if no tensor has been modified in place since, as far as torch has noticed."""
        return _versions(self.sources) == self.versions


class Stager:
    """Copies states through the host cache, one at a time.

    kept         number of checkpoints that a level keeps in the cache
    spare        number of images for a slow level, beyond those kept and one more
    cache_bytes  size of the cache; None: all of these images of this rank's state

    room_s       seconds that fences have waited for room in the cache
    """

    def __init__(
        self, ranks: Ranks, *, kept: int = 0, spare: int = 0, cache_bytes: int | None = None
    ) -> None:
        self._ranks, self._kept, self._spare = ranks, kept, spare
        self._cache_bytes, self.room_s = cache_bytes, 0.0
        self._cache: HostCache | None = None
        self._in_flight: list[InFlightCheckpoint] = []
        self._changed, self._objects = Condition(), ObjectSnapshots()
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
        """Plan for the state if its shapes are new, and allocate the cache; a collective call.

        Raises `ContractError` for a state that cannot be saved, on this rank or on another one.
        """
        try:
            collected = collect(opened(state))
        except Exception as problem:
            gather_valid(self._ranks, problem)
            raise
        items = save_items_of(collected)
        told = gather_valid(self._ranks, (self.has_plan(items), items))
        if not all(has_plan for has_plan, _ in told):
            self.plan(collected, [each for _, each in told])
        self._fit_cache()
        return collected

    def has_plan(self, items: Sequence[SaveItem]) -> bool:
        """Return True if the plan is for a state with these items."""
        return self._plan is not None and self._plan.held == items

    def plan(self, state: CollectedState, everyones: Sequence[Sequence[SaveItem]]) -> None:
        """Plan for a state, given the items of all ranks.

        Raises `ContractError` for a state on several CUDA devices.
        """
        self._plan = None
        device = device_of(memory for e in state.tensors for memory in memory_of(e.source))
        order = write_order([entry.source for entry in state.tensors], self._optimizers)
        plan = self._plan = make_plan(state, self._ranks, order, everyones)
        picked = [state.tensors[pick].source for pick in plan.picks]
        self._unmoved = [source for source in picked if isinstance(source, Tensor)]
        if self._copier is None:
            self._copier = Copier(device)
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
        extra: object,
    ) -> CapturedState:
        """Capture a state that the plan is for, with objects and buffers of modules as they are.

        Raises `ContractError` if `extra` is no mapping.
        """
        assert self._plan is not None
        if not isinstance(extra, Mapping):
            kind = type(extra).__name__
            raise ContractError("extra", f"a mapping of names to values, not {kind}")
        volatile = {
            address_of(buffer)
            for module in (*self._modules, *collected.modules)
            for buffer in module.buffers()  # running statistics, which the forward pass may change
        } - {0}  # without memory
        sources = [collected.tensors[pick].source for pick in self._plan.picks]
        if volatile:
            sources = [_copied_if(source, volatile) for source in sources]
        entries = [entry for entry in collected.objects if entry.key in self._plan.objects]
        entries.append(extra_entry(dict(extra), self._ranks.rank))
        return CapturedState(
            ShardIdentity(step, self._ranks.rank, lineage, self._ranks.all),
            self._plan.file,
            sources,
            self._objects.take(entries),
            _versions(sources),
        )

    def lend(self, captured: CapturedState, window_s: float) -> InFlightCheckpoint | None:
        """Open a checkpoint, not begun yet; None if the cache has no room within the window.

        Chunks of earlier checkpoints may still be there, if levels are expected to release them.
        """
        cache = self._fit_cache()
        with self._changed:
            self._in_flight = [one for one in self._in_flight if not one.is_idle]
            soon = sum(len(o.blocks) for o in self._in_flight if o.released_within(window_s))
            if cache.free + soon < min(len(captured.file.chunks), cache.capacity):
                return None
        checkpoint = InFlightCheckpoint(
            captured.identity,
            captured.file,
            cache,
            captured.sources,
            captured.objects,
            self._changed,
        )
        self._in_flight.append(checkpoint)
        return checkpoint

    def start(self, checkpoint: InFlightCheckpoint, pace: Pace | None = None) -> None:
        """Begin to copy; with a pace, only what the level will not write from the tensors."""
        assert self._copier is not None
        if (checkpoint.cache.is_idle or checkpoint.streams) and not self._copier.pins:
            checkpoint.pace = pace
        self._copier.start(checkpoint)

    def fence(
        self,
        checkpoint: InFlightCheckpoint,
        tensors: Sequence[Tensor] | None,
        deadline_s: float | None = None,
    ) -> bool:
        """Wait until the tensors (None: all) may change; False if the checkpoint is abandoned.

        Chunks that a level is writing from the tensors are copied. For room in the cache it waits
        until the deadline of the monotonic clock; None: not at all if the cache could hold the
        whole state, else as long as storage makes progress. See `FenceWait`.
        """
        assert self._copier is not None
        if checkpoint.is_safe and not self._copier.pins:
            return True
        checkpoint.hurry.set()
        wait = FenceWait(checkpoint, self._copier, deadline_s)
        try:
            return wait.secure(_needed(checkpoint, tensors))
        except Exception as problem:
            checkpoint.abandon(problem)  # the caller changes the state in any case
            raise
        except BaseException as problem:  # a signal handler's: the state may stay as it is
            checkpoint.abandon(CheckpointAbandoned(f"interrupted by {problem!r}"))
            raise
        finally:
            self.room_s += wait.room_s
            self._copier.fence()

    def close(self, deadline_s: float | None = None) -> None:
        """End the copying thread, and wait for it; see `Copier.close`."""
        if self._copier is not None:
            self._copier.close(deadline_s)

    def _fit_cache(self) -> HostCache:
        """Allocate the cache for the plan; raises `ContractError` if its size cannot work."""
        assert self._plan is not None
        assert self._copier is not None
        images = (self._kept + 1) * len(self._plan.file.chunks)
        blocks, touched = images + self._spare * len(self._plan.file.chunks), images
        if self._cache_bytes is not None:
            reserved = 0 if self._copier.pins else _RESERVED_BLOCKS
            blocks = touched = self._cache_bytes // BLOCK_BYTES - reserved
            if self._kept and blocks < images:
                needed = (images + reserved) * BLOCK_BYTES
                reason = f"HostMemory keeps {self._kept} whole checkpoints in it, for which this "
                reason += f"state needs {needed} bytes, not {self._cache_bytes}"
                raise ContractError("host_cache_bytes", reason)
        if self._cache is None:
            self._cache = HostCache(pinned=self._copier.pins)
        with self._changed:
            added = self._cache.grow(blocks)
        if added is not None:
            begin(populate, [added[: touched * BLOCK_BYTES]])
        return self._cache


def _needed(checkpoint: InFlightCheckpoint, tensors: Sequence[Tensor] | None) -> Sequence[int]:
    """Chunks to copy so that the tensors (None: all) may change, in the order of copying."""
    if tensors is None:
        return range(checkpoint.count)
    numbers = chunks_of(checkpoint, tensors)
    is_ordered = checkpoint.streams and checkpoint.pace is None
    return range(numbers[-1] + 1) if numbers and is_ordered else numbers


def _versions(sources: Sequence[TensorSource]) -> list[int]:
    """Return torch's version counters of the memory of all sources."""
    tensors = (tensor for source in sources for tensor in memory_of(source))
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _copied_if(source: TensorSource, addresses: Set[int]) -> TensorSource:
    """Return a copy of a tensor at one of these addresses, other sources as they are."""
    is_volatile = isinstance(source, Tensor) and source.data_ptr() in addresses
    return source.clone() if is_volatile and isinstance(source, Tensor) else source
