"""Memory of a reshard: its budget, spill files, and the shard under construction."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from resihp.contracts import ContractError, Layout
from resihp.layout import Param, Parameters, Range, holdings

from ..step.gradient_accumulation import Gradients
from ..step.shard import STATE_DTYPE, Shard

_log = logging.getLogger("resihp.elastic")

WINDOW = 4
"""Transfers through buffers that one rank has in progress at once."""

Held = Mapping[Param, Range]
"""The range of each parameter that a rank holds."""


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

    def refusal(self, old: Layout, new: Layout, parameters: Parameters, copies: int) -> str | None:
        """Reason to refuse a change from `old` to `new`; None if it is within the budget."""
        before, after = holdings(old, parameters), holdings(new, parameters)
        needs = {rank: held_twice(before.get(rank, {}), after[rank], copies) for rank in after}
        rank = max(needs, key=lambda rank: needs[rank])
        if self.spill is not None or not self.excess(needs[rank]):
            return None
        return (
            f"rank {rank} would hold {needs[rank] / 2**20:.0f} MiB twice besides its buffers; "
            f"the limit is {self.limit_bytes / 2**20:.0f} MiB and there is no folder to spill to"
        )


def held_twice(old: Held, new: Held, copies: int) -> int:
    """Bytes that one rank holds for both layouts: the lesser of released and received state.

    A range that stays the same is held once; a net gain of state is not extra memory.

    copies  tensors of each parameter: itself, its moments, its gradient
    """
    released = sum(_bytes(param, span) for param, span in old.items() if new.get(param) != span)
    return copies * min(released, sum(received_bytes(old, new).values()))


def received_bytes(old: Held, new: Held) -> dict[Param, int]:
    """Bytes of each parameter that a rank receives in another range than it has, one copy."""
    return {p: _bytes(p, span) for p, span in new.items() if old.get(p) != span}


def _bytes(param: Param, span: Range) -> int:
    return (span[1] - span[0]) * param.row_numel * STATE_DTYPE.itemsize


@dataclass(frozen=True)
class Spill:
    """Parameters whose state (with moments), and whose gradients, are held in files."""

    state: Collection[Param] = ()
    gradients: Collection[Param] = ()


def to_spill(sizes: Mapping[Param, int], excess: int, copies: int) -> Spill:
    """At least `excess` bytes, large tensors first, so that files are few.

    `copies` tensors of each parameter are state, received during a step; gradients are received in
    the pause and therefore spilled last.
    """
    state = _largest(sizes, -(-excess // copies))
    left = excess - copies * sum(sizes[param] for param in state)
    return Spill(state, _largest(sizes, left))


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
    files: dict[Param, list[torch.Tensor]] = field(default_factory=dict)
    _gradients: list[torch.Tensor] = field(default_factory=list)

    def allot(self, param: Param, like: torch.Tensor) -> torch.Tensor:
        """Zeros of the shape of `like`, for `param` or one of its moments.

        Raises `OSError` if the disk is full, unless `is_forced`.
        """
        if param not in self.spilled.state:
            return torch.zeros_like(like)
        private, shared = self._mapped(like)
        self.files.setdefault(param, []).append(shared)
        return private

    def gradient(self, param: Param, like: torch.Tensor) -> torch.Tensor:
        """The same for a gradient, which is released before the next step."""
        if param not in self.spilled.gradients:
            return torch.zeros_like(like)
        _, gradient = self._mapped(like)
        self._gradients.append(gradient)
        return gradient

    @property
    def spilled_bytes(self) -> int:
        """Size of the files."""
        copies = [tensor for tensors in self.files.values() for tensor in tensors]
        return sum(tensor.nbytes for tensor in (*copies, *self._gradients))

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

    gradients  destination of the gradients of tensors that it does not share with the old shard
    """

    shard: Shard
    allocator: ShardAllocator = field(default_factory=ShardAllocator)
    gradients: Gradients = field(default_factory=dict)

    @property
    def ranges(self) -> Mapping[Param, Range]:
        """Range of each parameter held."""
        return self.shard.ranges

    def state(self, param: Param) -> tuple[torch.Tensor, ...]:
        """The parameter and its moments."""
        files = self.allocator.files.get(param)
        return self.shard.state(param) if files is None else tuple(files)


def unshared(shard: Shard, old: Shard | None) -> Mapping[Param, torch.Tensor]:
    """The tensors of a new shard that are not those of the old one."""
    held = old.tensors if old is not None else {}
    return {p: tensor for p, tensor in shard.tensors.items() if held.get(p) is not tensor}
