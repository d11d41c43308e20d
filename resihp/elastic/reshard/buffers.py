"""How much a change of layout may hold twice, and what is done about more."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from resihp.contracts import ContractError, Layout
from resihp.layout import Param, Parameters, Range, holdings

from ..step.gradient_accumulation import Gradients
from ..step.shard import Shard

Held = Mapping[Param, Range]
"""The range of each parameter that a rank holds."""


def default_spill() -> Path | None:
    """A folder for temporary files on a disk, if this machine has one."""
    for folder in (Path("/var/tmp"), Path(tempfile.gettempdir())):
        if folder.is_dir() and not _is_in_memory(folder):
            return folder
    return None


@dataclass(frozen=True)
class ReshardBudget:
    """What a change of layout may take beside what the old or the new layout needs anyway.

    limit_bytes  of each rank: buffers, and what it holds of both layouts until all ranks have
                 taken on the new one
    spill        folder for what is beyond that; on a disk, not in memory. None: a plan that needs
                 more is refused; after a loss, when there is no choice, it is taken on all the same
    attach       ranks of one host read what they lack from each other's memory, where the system
                 lets them; else it travels through sockets, as between hosts
    """

    limit_bytes: int = 256 << 20
    spill: Path | None = field(default_factory=default_spill)
    attach: bool = True

    def __post_init__(self) -> None:
        if self.limit_bytes <= 0:
            raise ContractError("limit_bytes", f"must be above 0, not {self.limit_bytes}")
        if self.spill is not None and not self.spill.is_dir():
            raise ContractError("spill", f"{self.spill} is no folder")

    @property
    def buffer_bytes(self) -> int:
        """Of the limit, what the buffers of the exchange may take."""
        return min(16 << 20, self.limit_bytes // 4)

    def excess(self, held_twice: int) -> int:
        """How much of `held_twice` bytes is beyond the limit."""
        return max(0, held_twice - (self.limit_bytes - self.buffer_bytes))


def held_twice(old: Held, new: Held, copies: int) -> int:
    """Bytes of one rank that stand for both layouts at once: the lesser of what goes and comes.

    What stays in its range is held once, and what a rank gains for good is nothing extra.
    `copies` tensors of each parameter: itself, its moments, its gradient.
    """
    going = sum(_bytes(param, span) for param, span in old.items() if new.get(param) != span)
    return copies * min(going, sum(coming(old, new).values()))


def coming(old: Held, new: Held) -> dict[Param, int]:
    """Bytes of each parameter that a rank gets in another range than it has, one copy."""
    return {p: _bytes(p, span) for p, span in new.items() if old.get(p) != span}


@dataclass(frozen=True)
class Spill:
    """What goes to files: parameters with their moments, and gradients."""

    state: Collection[Param] = ()
    gradients: Collection[Param] = ()


def to_spill(sizes: Mapping[Param, int], excess: int, copies: int) -> Spill:
    """At least `excess` bytes, large tensors first, so that files are few.

    `copies` tensors of each parameter are state, filled beside a step; gradients are filled in the
    pause, so that they go to files only where there is nothing else left.
    """
    state = _largest(sizes, -(-excess // copies))
    left = excess - copies * sum(sizes[param] for param in state)
    return Spill(state, _largest(sizes, left))


def refusal(
    memory: ReshardBudget, old: Layout, new: Layout, parameters: Parameters, copies: int
) -> str | None:
    """Why the change from `old` to `new` is more than `memory` allows, if it is."""
    before, after = holdings(old, parameters), holdings(new, parameters)
    needs = {rank: held_twice(before.get(rank, {}), after[rank], copies) for rank in after}
    rank = max(needs, key=lambda rank: needs[rank])
    if memory.spill is not None or not memory.excess(needs[rank]):
        return None
    return (
        f"rank {rank} would hold {needs[rank] / 2**20:.0f} MiB twice beside its buffers; "
        f"the limit is {memory.limit_bytes / 2**20:.0f} MiB and there is no folder to spill to"
    )


def _largest(sizes: Mapping[Param, int], least: int) -> frozenset[Param]:
    """Parameters of at least so many bytes together, if there are."""
    chosen: list[Param] = []
    for param in sorted(sizes, key=lambda param: (-sizes[param], param.key)):
        if least <= 0:
            break
        chosen.append(param)
        least -= sizes[param]
    return frozenset(chosen)


def _bytes(param: Param, span: Range) -> int:
    return (span[1] - span[0]) * param.row_numel * 4


def _is_in_memory(folder: Path) -> bool:
    """Whether files of `folder` take memory, as far as the system tells."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return False
    kinds = {Path(where): kind for _, where, kind, *_ in mounts}
    above: Collection[Path] = (folder.resolve(), *folder.resolve().parents)
    return next((kinds[path] for path in above if path in kinds), "") in ("tmpfs", "ramfs")


_log = logging.getLogger("resihp.elastic")


@dataclass(frozen=True)
class ShardAllocator:
    """Gives out memory for what comes, all of it touched; for what is `spilled`, files of `folder`.

    Touching it costs more than filling it, and so belongs into the preparation. Where a file cannot
    be had, `insists` says that memory has to do.
    """

    spilled: Spill = field(default_factory=Spill)
    folder: Path | None = None
    insists: bool = False
    files: dict[Param, list[torch.Tensor]] = field(default_factory=dict)
    _gradients: list[torch.Tensor] = field(default_factory=list)

    def allot(self, param: Param, like: torch.Tensor) -> torch.Tensor:
        """Zeros of the shape of `like`, for `param` or one of its moments.

        Raises `OSError` if the disk is full, unless it `insists`.
        """
        if param not in self.spilled.state:
            return torch.zeros_like(like)
        seen, written = self._mapped(like, ("private", "shared"))
        self.files.setdefault(param, []).append(written)
        return seen

    def gradient(self, param: Param, like: torch.Tensor) -> torch.Tensor:
        """The same for a gradient, which is let go before memory is short."""
        if param not in self.spilled.gradients:
            return torch.zeros_like(like)
        (gradient,) = self._mapped(like, ("shared",))
        self._gradients.append(gradient)
        return gradient

    @property
    def bytes(self) -> int:
        """What is in files, and would be in memory otherwise."""
        copies = [tensor for tensors in self.files.values() for tensor in tensors]
        return sum(tensor.nbytes for tensor in (*copies, *self._gradients))

    def _mapped(self, like: torch.Tensor, kinds: tuple[str, ...]) -> list[torch.Tensor]:
        if like.numel() == 0:
            return [torch.zeros_like(like) for _ in kinds]
        try:
            return self._in_file(like, kinds)
        except OSError as error:
            if not self.insists:
                raise
            _log.warning("%d bytes more than allowed stay in memory: %s", like.nbytes, error)
            return [torch.zeros_like(like)] * len(kinds)

    def _in_file(self, like: torch.Tensor, kinds: tuple[str, ...]) -> list[torch.Tensor]:
        descriptor, name = tempfile.mkstemp(prefix="resihp-spill-", dir=self.folder)
        try:
            # Without room on the disk a write through a mapping would end the process.
            os.posix_fallocate(descriptor, 0, like.nbytes)
            mapped = {
                kind: torch.from_file(
                    name, shared=kind == "shared", size=like.numel(), dtype=like.dtype
                ).view_as(like)
                for kind in kinds
            }
            mapped["shared"].zero_()
            return [*mapped.values()]
        finally:
            os.close(descriptor)
            os.unlink(name)  # it lives on until the last tensor is let go


@dataclass(frozen=True)
class PendingShard:
    """A shard that is being filled; `state` is where its values are to be written.

    gradients  room for those of a step whose update it makes, where it shares no tensor with the
               old shard
    """

    shard: Shard
    room: ShardAllocator = field(default_factory=ShardAllocator)
    gradients: Gradients = field(default_factory=dict)

    @property
    def ranges(self) -> Mapping[Param, Range]:
        """Range of each parameter held."""
        return self.shard.ranges

    def state(self, param: Param) -> tuple[torch.Tensor, ...]:
        """The parameter and its moments."""
        files = self.room.files.get(param)
        return self.shard.state(param) if files is None else tuple(files)


def unshared(shard: Shard, old: Shard | None) -> Mapping[Param, torch.Tensor]:
    """The tensors of a new shard that are not those of the old one."""
    held = old.tensors if old is not None else {}
    return {p: tensor for p, tensor in shard.tensors.items() if held.get(p) is not tensor}
