"""Memory of this node, in a folder that outlives the ranks: `resihp run` keeps it for restarts."""

from __future__ import annotations

import os

from resihp.contracts import ContractError

from .local_disk import LocalDisk

VARIABLE = "RESIHP_NODE_MEMORY"
"""Environment variable with the folder, in tmpfs; the launcher sets it and deletes the folder."""


class NodeMemory(LocalDisk):
    """Checkpoints in the memory of this node, in the files of `LocalDisk`.

    A restart by `resihp run` reads them at the speed of memory, in any layout. They end with the
    launcher: a level on disk protects from the loss of the node. Takes the memory of `keep` + 1
    states, within the limit of /dev/shm.

    Raises `ContractError` under another launcher; see `is_available`.
    """

    def __init__(self, *, keep: int = 1) -> None:
        folder = os.environ.get(VARIABLE)
        if not folder:
            raise ContractError(VARIABLE, "is not set: NodeMemory needs the launcher `resihp run`")
        super().__init__(folder, keep=keep, ranks=_ranks_of_this_node())

    @staticmethod
    def is_available() -> bool:
        """True if `resihp run` has started this process, on a system with tmpfs."""
        return bool(os.environ.get(VARIABLE))


def _ranks_of_this_node() -> range | None:
    """Ranks that write into the folder, from the launcher's variables; None: all of the job."""
    try:
        first = int(os.environ["RANK"]) - int(os.environ["LOCAL_RANK"])
        return range(first, first + int(os.environ["LOCAL_WORLD_SIZE"]))
    except (KeyError, ValueError):
        return None
