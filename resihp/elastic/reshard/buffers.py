"""Memory of a reshard: its budget, spill files, and the shard under construction."""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import torch
from torch import nn

from resihp.contracts import ContractError, Layout
from resihp.layout import (
    Param,
    Parameters,
    Range,
    StateCopies,
    StateRange,
    StateRanges,
    holdings,
    state_ranges,
)

from ..step.gradient_allreduce import SummedGradients
from ..step.shard import STATE_DTYPE, Shard

_log = logging.getLogger("resihp.elastic")

WINDOW = 4
"""Transfers through buffers that one rank has in progress at once."""


def buffer_zeros(*shape: int, device: torch.device) -> torch.Tensor:
    """Zeros for the duration of a change, with all pages touched.

    On the CPU they are a mapping of their own, which ends with the tensor: freed memory of the heap
    stays with the process, once for each of the threads that have made changes.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=STATE_DTYPE, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, prod(shape) * STATE_DTYPE.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=STATE_DTYPE).view(shape).zero_()


@dataclass(frozen=True)
class HeldState:
    """Ranges that one rank holds in a layout: of parameters, and of optimizer state.

    The summed gradients that move are those of the latter.
    """

    parameters: Mapping[Param, Range] = field(default_factory=dict)
    state: StateRanges = field(default_factory=dict)

    @classmethod
    def by_rank(
        cls, layout: Layout, parameters: Parameters, copies: StateCopies | None
    ) -> Mapping[int, HeldState]:
        """Return what each rank of a layout holds, with `copies` of each range of the state."""
        state = state_ranges(layout, parameters, copies)
        return {rank: cls(held, state[rank]) for rank, held in holdings(layout, parameters).items()}

    @classmethod
    def of(cls, shard: Shard) -> HeldState:
        """Return what a rank with this shard holds."""
        return cls(shard.ranges, shard.state_ranges)


def default_spill() -> Path | None:
    """A folder for temporary files on a disk, if this machine has one."""
    for folder in (Path("/var/tmp"), Path(tempfile.gettempdir())):
        if folder.is_dir() and not _is_in_memory(folder):
            return folder
    return None


def _is_in_memory(folder: Path) -> bool:
    """Return whether files of `folder` take memory, according to the mount table."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return False
    kinds = {Path(where): kind for _, where, kind, *_ in mounts}
    above: Collection[Path] = (folder.resolve(), *folder.resolve().parents)
    return next((kinds[path] for path in above if path in kinds), "") in ("tmpfs", "ramfs")


@dataclass(frozen=True)
class ReshardBudget:
    """Memory that a change of layout may take in addition to the larger of its two layouts.

    limit_bytes  per rank: transfer buffers, and state held for both layouts until all ranks have
                 committed the new one
    spill        folder on a disk for state beyond the limit. None: a plan that needs more is
                 refused; after a failure, the limit is exceeded instead
    attach       ranks of one host read each other's memory where the system permits it; otherwise
                 they exchange through sockets, as between hosts

    On a device state is not spilled, and half of what training has left there so far is the limit,
    if that is more.
    """

    limit_bytes: int = 256 << 20
    spill: Path | None = field(default_factory=default_spill)
    attach: bool = True

    def __post_init__(self) -> None:
        if self.limit_bytes <= 0:
            raise ContractError("limit_bytes", f"must be above 0, not {self.limit_bytes}")
        if self.spill is not None:
            object.__setattr__(self, "spill", Path(self.spill))  # of a name, as well
            if not self.spill.is_dir():
                raise ContractError("spill", f"{self.spill} is no folder")

    @property
    def buffer_bytes(self) -> int:
        """Part of the limit for the transfer buffers."""
        return min(16 << 20, self.limit_bytes // 4)

    def on(self, device: torch.device) -> ReshardBudget:
        """The same for state in the memory of a device, as it is now."""
        if device.type == "cpu":
            return self
        free, _ = torch.cuda.mem_get_info(device)
        # The most so far, not what is allocated now: passes go on while a layout is prepared.
        left = free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
        return replace(self, limit_bytes=max(self.limit_bytes, left // 2), spill=None)

    def excess(self, held_twice: int) -> int:
        """Part of `held_twice` bytes that is beyond the limit."""
        return max(0, held_twice - (self.limit_bytes - self.buffer_bytes))

    def refusal(
        self,
        old: Layout,
        new: Layout,
        parameters: Parameters,
        moments: int,
        copies: StateCopies | None = None,
    ) -> str | None:
        """Reason to refuse a change from `old` to `new`; None if it is within the budget.

        moments  tensors of optimizer state that each parameter has
        copies   of each range of it; None: on all ranks that hold the parameter
        """
        before, after = (HeldState.by_rank(one, parameters, copies) for one in (old, new))
        nothing = HeldState()
        needs = {r: held_twice(before.get(r, nothing), after[r], moments) for r in after}
        rank = max(needs, key=lambda rank: needs[rank])
        if self.spill is not None or not self.excess(needs[rank]):
            return None
        return (
            f"rank {rank} would hold {needs[rank] / 2**20:.0f} MiB twice besides its buffers; "
            f"the limit is {self.limit_bytes / 2**20:.0f} MiB and there is no folder to spill to"
        )


@dataclass(frozen=True)
class ReceivedBytes:
    """Bytes of each parameter that a rank holds in a layout, and not in another in this range.

    state      parameter and moments
    gradients  summed ones, in the pause
    """

    state: Mapping[Param, int]
    gradients: Mapping[Param, int]

    @classmethod
    def of(cls, old: HeldState, new: HeldState, moments: int) -> ReceivedBytes:
        """Return what is in `new` and not in `old`."""
        state, gradients = defaultdict[Param, int](int), defaultdict[Param, int](int)
        for param, span in new.parameters.items():
            is_same = old.parameters.get(param) == span
            state[param] += 0 if is_same else _bytes(param, span)
            kept = old.state.get(param, ()) if is_same else ()
            for held in new.state.get(param, ()):
                if held not in kept:
                    state[param] += moments * _bytes(param, held)
                    gradients[param] += _bytes(param, held)
        return cls(state, gradients)

    @property
    def total(self) -> int:
        """Sum over all parameters."""
        return sum(self.state.values()) + sum(self.gradients.values())


def held_twice(old: HeldState, new: HeldState, moments: int) -> int:
    """Bytes that one rank holds for both layouts: the lesser of released and received state.

    A range that stays the same is held once; a net gain of state is not extra memory.
    """
    released, received = (ReceivedBytes.of(*pair, moments) for pair in ((new, old), (old, new)))
    return min(released.total, received.total)


def _bytes(param: Param, span: Range) -> int:
    return (span[1] - span[0]) * param.row_numel * STATE_DTYPE.itemsize


@dataclass(frozen=True)
class Spill:
    """Parameters whose state (with moments), and whose gradients, are held in files."""

    state: Collection[Param] = ()
    gradients: Collection[Param] = ()


def to_spill(sizes: ReceivedBytes, excess: int) -> Spill:
    """At least `excess` bytes, large tensors first, so that files are few.

    Gradients are received in the pause and therefore spilled last.
    """
    state = _largest(sizes.state, excess)
    left = excess - sum(sizes.state[param] for param in state)
    return Spill(state, _largest(sizes.gradients, left))


def _largest(sizes: Mapping[Param, int], least: int) -> frozenset[Param]:
    """The largest parameters that together have at least `least` bytes, or all."""
    chosen: list[Param] = []
    for param in sorted(sizes, key=lambda param: (-sizes[param], param.key)):
        if least <= 0:
            break
        chosen.append(param)
        least -= sizes[param]
    return frozenset(chosen)


@dataclass(frozen=True)
class ShardAllocator:
    """Allocates memory for a new shard, with all pages touched; for `spilled` tensors, in files.

    Touching pages costs more than filling them and is therefore done ahead of the transfer.

    folder      of the files
    is_forced   without a file, allocate memory beyond the limit
    """

    spilled: Spill = field(default_factory=Spill)
    folder: Path | None = None
    is_forced: bool = False
    _files: dict[int, torch.Tensor] = field(default_factory=dict)
    _gradients: list[torch.Tensor] = field(default_factory=list)

    def allot(self, param: Param, like: torch.Tensor) -> torch.Tensor:
        """Zeros of the shape of `like`, for `param` or one of its moments.

        Raises `OSError` if the disk is full, unless `is_forced`.
        """
        if param not in self.spilled.state:
            return torch.zeros_like(like)
        private, shared = self._mapped(like)
        if shared is private:
            return private
        self._files[private.untyped_storage().data_ptr()] = shared
        return private

    def gradient(self, param: Param, like: torch.Tensor) -> torch.Tensor:
        """The same for a gradient, which is released before the next step."""
        if param not in self.spilled.gradients:
            return torch.zeros_like(like)
        _, gradient = self._mapped(like)
        self._gradients.append(gradient)
        return gradient

    def destination(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return where the values of a tensor are written: in its file, if it has one."""
        shared = self._files.get(tensor.untyped_storage().data_ptr())
        if shared is None:
            return tensor
        return shared.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    @property
    def spilled_bytes(self) -> int:
        """Size of the files."""
        return sum(tensor.nbytes for tensor in (*self._files.values(), *self._gradients))

    def _mapped(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeros in a file, mapped privately and shared; both in memory if there is no file."""
        if like.numel():
            try:
                return self._in_file(like)
            except OSError as error:
                if not self.is_forced:
                    raise
                _log.warning("%d bytes more than allowed stay in memory: %s", like.nbytes, error)
        zeros = torch.zeros_like(like)
        return zeros, zeros

    def _in_file(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        descriptor, name = tempfile.mkstemp(prefix="resihp-spill-", dir=self.folder)
        try:
            # Without space on the disk, a write through a mapping would kill the process.
            os.posix_fallocate(descriptor, 0, like.nbytes)
            private, shared = (
                torch.from_file(name, shared=shared, size=like.numel(), dtype=like.dtype)
                for shared in (False, True)
            )
            shared.zero_()
            return private.view_as(like), shared.view_as(like)
        finally:
            os.close(descriptor)
            os.unlink(name)  # the file exists until its last tensor is freed


@dataclass(frozen=True)
class PendingShard:
    """A shard whose values are still to be received; `state` is the destination of its values.

    gradients  destination of the gradients of slices that it does not share with the old shard
    """

    shard: Shard
    allocator: ShardAllocator = field(default_factory=ShardAllocator)
    gradients: SummedGradients = field(default_factory=dict)

    @property
    def state_ranges(self) -> StateRanges:
        """Ranges of each parameter whose optimizer state is held."""
        return self.shard.state_ranges

    def state(self, held: StateRange) -> tuple[torch.Tensor, ...]:
        """Rows of a parameter and their moments."""
        return tuple(map(self.allocator.destination, self.shard.state(held)))

    def update(self, parameters: Parameters, some: Collection[Param], step: int) -> None:
        """Make the update of a step in what was received of `some` parameters.

        The `gradients` are clipped. The optimizer's scalars count the update where they are
        tensors, and not where they are numbers.
        """
        settings, state = self.shard.settings, self.shard.optimizer.state
        received = {held: self.state(held) for held in self.gradients if held[0] in some}
        tensors = {held: nn.Parameter(tensor) for held, (tensor, *_) in received.items()}
        if not tensors:
            return
        optimizer = settings.build(
            parameters, [(param, one) for (param, _), one in tensors.items()]
        )
        for held, tensor in tensors.items():
            before = dict(zip(settings.form.moments, received[held][1:], strict=True))
            optimizer.state[tensor] = state[self.shard.slices[held]] | before
            tensor.grad = self.gradients[held]
        settings.set_rate(optimizer, step)
        optimizer.step()
        for held, tensor in tensors.items():
            moments = (optimizer.state[tensor][name] for name in settings.form.moments)
            for target, made in zip(received[held], (tensor.data, *moments), strict=True):
                if made.data_ptr() != target.data_ptr():  # made anew, not in place
                    target.copy_(made)


def unshared(shard: Shard, old: Shard | None) -> Mapping[StateRange, torch.Tensor]:
    """The slices of a new shard that are not those of the old one."""
    kept = old.slices if old is not None else {}
    return {held: tensor for held, tensor in shard.slices.items() if kept.get(held) is not tensor}


def held_apart(old: Shard | None, new: PendingShard | None) -> Iterator[tuple[Param, Range, Range]]:
    """Parameters of both in slices that are not shared, with the rows in each of them."""
    if old is not None and new is not None:
        before = old.state_ranges
        for param, due in unshared(new.shard, old):
            for held in before.get(param, ()):
                if max(held[0], due[0]) < min(held[1], due[1]):
                    yield param, held, due
