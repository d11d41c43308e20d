"""What every level does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from resihp.contracts import ContractError

from ..format.index import FileIndex
from ..history import StoredCheckpoint
from ..staging.in_flight import InFlightCheckpoint


class CheckpointReader(Protocol):
    """One complete checkpoint, ready to be read."""

    @property
    def indexes(self) -> Mapping[int, FileIndex]:
        """The index of every rank's file."""

    def read(self, rank: int, start: int, into: memoryview) -> None:
        """Bytes of a rank's file from `start` on; may be called by several threads at once."""

    def close(self) -> None:
        """Let go of what is open."""


class Level(Protocol):
    """A place for checkpoints. `put` runs in a thread that belongs to the level alone.

    name          says in messages which level it is
    after_disk    takes checkpoints from the disk level before it, where there is one, so that
                  it holds no host buffer
    patience      how many checkpoints may wait while one is being put; one more is skipped
    """

    name: str
    after_disk: bool
    patience: int

    def put(self, checkpoint: InFlightCheckpoint) -> None:
        """Store a checkpoint and make it visible as a whole. Raises `OSError` or what ended it.

        Says with `checkpoint.done_with` which chunks it needs no more.
        """

    def found(self) -> list[StoredCheckpoint]:
        """The complete checkpoints that this level holds, of each step one at most."""

    def steps(self) -> list[int]:
        """Their steps, ascending."""

    def open(self, step: int) -> CheckpointReader:
        """Raises `OSError` or `CheckpointError` where it cannot be read."""

    def close(self) -> None:
        """Let go of threads and sockets; what is stored stays."""


def valid_keep(keep: int) -> int:
    """How many checkpoints stay. Raises `ContractError` for none."""
    if not isinstance(keep, int) or keep < 1:
        raise ContractError("keep", f"at least one checkpoint must stay, not {keep!r}")
    return keep
