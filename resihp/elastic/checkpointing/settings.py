"""Where and when a job writes its state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .protocol import StateManager

if TYPE_CHECKING:
    from resihp.checkpoint import Level, SavePolicy

    from ..rendezvous.membership import Rendezvous
    from ..step import Setup


@dataclass(frozen=True)
class Checkpoints:
    """Checkpoints that an elastic job writes and, where state is lost, goes back to.

    `Checkpoints(lambda: [LocalDisk("/shared/run7", keep=3)], Every(50))`

    levels  makes the levels, anew for each layout. What one rank writes must be there for the
            others to read: shared storage, or a disk if all ranks are on one machine
    policy  at which steps; asked on one rank, whose answer holds for all
    in_memory  so many of each rank stay in its own memory and in a peer's, on another host where
            there is one; 0: none. With 2 a rank that is lost while the newest is on its way leaves
            the one before whole

    A job that starts where there are checkpoints goes on from the newest that is usable. Needs
    `resihp[checkpoint]`.
    """

    levels: Callable[[], Sequence[Level]]
    policy: SavePolicy
    in_memory: int = 0

    def keeper(self, setup: Setup, rendezvous: Rendezvous) -> StateManager:
        """What writes and reads them for one rank."""
        from .manager import CheckpointManager  # an extra that jobs without checkpoints do without

        store = rendezvous.stores.store
        return CheckpointManager(self, setup, rendezvous.rank, store, host=rendezvous.host)
