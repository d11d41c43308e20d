"""How much a change of layout may hold twice, and what is done about more."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from resihp.contracts import ContractError, Layout
from resihp.layout import Param, Parameters, Range, holdings

Held = Mapping[Param, Range]
"""The range of each parameter that a rank holds."""


def default_spill() -> Path | None:
    """A folder for temporary files on a disk, if this machine has one."""
    for folder in (Path("/var/tmp"), Path(tempfile.gettempdir())):
        if folder.is_dir() and not _is_in_memory(folder):
            return folder
    return None


@dataclass(frozen=True)
class Memory:
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
    memory: Memory, old: Layout, new: Layout, parameters: Parameters, copies: int
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
