"""Interface between the trainer and checkpoints."""

from __future__ import annotations

from resihp.contracts import Plan

from ..process_groups.abortable import AbortableProcessGroup
from ..step.shard import Shard


class StateManager:
    """Checkpoints of a job as one rank uses them, from the training thread.

    This one keeps none; `CheckpointManager` does.
    """

    def prepare(self, plan: Plan, generation: int, shard: Shard) -> None:
        """Prepare to save `shard`, in the background; called before every step."""

    def is_due(self, step: int) -> bool:
        """Return whether to save the state after `step`; asked on one rank for all."""
        return False

    def save(self, step: int, shard: Shard) -> None:
        """Begin to save the state after `step`; all ranks of the layout do. Never raises."""

    def fence(self) -> None:
        """Wait until the state may change; called right before an update. Never raises."""

    def restore(self, group: AbortableProcessGroup, shard: Shard | None) -> int:
        """Restore `shard` (None: idle rank) to the newest state; return the completed steps.

        Collective. Raises `CheckpointError` on all ranks where none is usable, `ContractError` for
        one of another model, optimizer or kind of data, and `PeerLostError`.
        """
        raise NotImplementedError

    def resume(self, group: AbortableProcessGroup, shard: Shard) -> int:
        """Restore at the start of a job; return 0 where nothing was saved."""
        return 0

    def close(self, *, is_done: bool) -> None:
        """End all threads; if the job `is_done`, after all started saves are durable."""
