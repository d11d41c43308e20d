"""Settings of an elastic job's checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from resihp.checkpoint import Level, SavePolicy


@dataclass(frozen=True)
class Checkpoints:
    """Checkpoints that an elastic job saves, and restores when state is lost.

    `Checkpoints(lambda: [LocalDisk("/shared/run7", keep=3)], Every(50))`

    levels  makes the levels, anew for each layout. What one rank writes must be there for the
            others to read: shared storage, or a disk if all ranks are on one machine
    policy  steps to save; evaluated on one rank for all
    in_memory  checkpoints of each rank kept in its own memory and in a peer's, on another host
            where there is one; 0: none. With 2, the previous one is whole when a rank is lost
            during the transfer of the newest
    host_cache_bytes  host memory of each rank for copies on their way to the levels, at least
            32 MiB; see `resihp.checkpoint.Checkpointer`

    A job that finds checkpoints at its start continues from the newest usable one. Needs
    `resihp[checkpoint]`.
    """

    levels: Callable[[], Sequence[Level]]
    policy: SavePolicy
    in_memory: int = 0
    host_cache_bytes: int | None = None
