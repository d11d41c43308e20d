"""What the trainer asks of whoever keeps the job's state."""

from __future__ import annotations

from typing import Protocol

from resihp.contracts import Plan

from ..process_groups.abortable import AbortableProcessGroup
from ..step.shard import Shard


class StateManager(Protocol):
    """Keeps the state of one rank's job outside of its ranks. The training thread calls it.

    can_restore  whether there is anything to hope for when state has been lost
    """

    can_restore: bool

    def prepare(self, plan: Plan, generation: int, shard: Shard) -> None:
        """Make ready to save `shard`, in the background; called before every step."""
        ...

    def is_due(self, step: int) -> bool:
        """Whether the state after `step` is to be saved; one rank asks and tells the others."""
        ...

    def save(self, step: int, shard: Shard) -> None:
        """Begin to save the state after `step`; all ranks of the layout do. Never raises."""
        ...

    def fence(self) -> None:
        """Wait until the state may change: right before it does. Never raises."""
        ...

    def restore(self, group: AbortableProcessGroup, shard: Shard | None) -> int:
        """Bring `shard` (None: no place) to the newest state; collective. Steps completed there.

        Raises `CheckpointError` on all ranks where none is usable, and `PeerLostError`.
        """
        ...

    def resume(self, group: AbortableProcessGroup, shard: Shard) -> int:
        """As `restore`, at the start of a job; 0 where nothing has ever been saved."""
        ...

    def close(self, *, is_done: bool) -> None:
        """End all threads; if the job `is_done`, when everything that was begun is safe."""
        ...


class NoCheckpoints:
    """For a job without checkpoints."""

    can_restore = False

    def prepare(self, plan: Plan, generation: int, shard: Shard) -> None:
        """Nothing."""

    def is_due(self, step: int) -> bool:
        """Never."""
        return False

    def save(self, step: int, shard: Shard) -> None:
        """Nothing."""

    def fence(self) -> None:
        """Nothing."""

    def restore(self, group: AbortableProcessGroup, shard: Shard | None) -> int:
        """Nobody asks."""
        raise NotImplementedError

    def resume(self, group: AbortableProcessGroup, shard: Shard) -> int:
        """From the beginning."""
        return 0

    def close(self, *, is_done: bool) -> None:
        """Nothing."""
