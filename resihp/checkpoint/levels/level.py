"""Interfaces of a level, the storage of checkpoints, and of a reader of one checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from resihp.contracts import ContractError

from ..format.index import FileIndex
from ..history import StoredCheckpoint
from ..staging.in_flight import InFlightCheckpoint


class CheckpointReader(ABC):
    """Reads one complete checkpoint.

    indexes  index of every rank's file, by rank
    """

    indexes: Mapping[int, FileIndex]

    @abstractmethod
    def read(self, rank: int, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes of a rank's file from offset `start`; thread-safe."""

    def close(self) -> None:  # noqa: B027 - most readers hold nothing open
        """Close files and connections."""


class Level(ABC):
    """Stores checkpoints.

    name          names the level in messages and counters
    after_disk    takes checkpoints from the disk level's file, if there is a disk level, so that
                  it needs no host memory
    patience      number of checkpoints that may wait while one is being put

    `put` is called in a thread that belongs to the level alone.
    """

    name: str
    after_disk = False
    patience = 1

    @abstractmethod
    def put(self, checkpoint: InFlightCheckpoint) -> None:
        """Store a checkpoint and make it visible as a whole.

        Releases chunks with `checkpoint.done_with`. Raises `OSError` or the problem that ended the
        checkpoint.
        """

    @abstractmethod
    def checkpoints(self) -> list[StoredCheckpoint]:
        """List the complete checkpoints, at most one per step."""

    @abstractmethod
    def open(self, step: int) -> CheckpointReader:
        """Open a checkpoint. Raises `OSError` or `CheckpointError` if it cannot be read."""

    def steps(self) -> list[int]:
        """List the steps of the complete checkpoints, ascending."""
        return sorted(one.step for one in self.checkpoints())

    def close(self) -> None:  # noqa: B027 - most levels hold nothing open
        """End threads and close sockets; stored checkpoints stay."""


def valid_keep(keep: int) -> int:
    """Return the number of checkpoints to keep. Raises `ContractError` unless it is positive."""
    if not isinstance(keep, int) or keep < 1:
        raise ContractError("keep", f"at least one checkpoint must stay, not {keep!r}")
    return keep
