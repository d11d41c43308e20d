"""Memory of this node, and of the next one, that outlives the ranks: `resihp run` keeps it.

With several nodes each launcher serves the files of its node, and stores copies of those of the
node before it. The protocol is that of `peer_server`: a copy has its length and its checksums.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence

from resihp.contracts import CheckpointError, ContractError
from resihp.contracts.node_memory import NODE_MEMORY, MemoryServers

from ..format.index import FileIndex
from ..format.metadata import data_name
from ..history import StoredCheckpoint, best_first
from ..staging.in_flight import InFlightCheckpoint
from .checkpoint_folder import FolderReader, part_folder, step_name
from .level import CheckpointReader
from .local_disk import LocalDisk
from .peer_memory import Holder, Inventory, PeerReader, may_be_intact
from .peer_server import Address, Connection

_log = logging.getLogger("resihp.checkpoint")
_KEEP_WITH_COPIES = 2
"""Nodes may be one checkpoint apart: the one before is complete on all until the next one is."""


class NodeMemory(LocalDisk):
    """Checkpoints in the memory of this node, in the files of `LocalDisk`.

    A restart by `resihp run` reads them at the speed of memory, in any layout. They end with the
    launcher: a level on disk protects from the loss of the node, and so does, with several nodes,
    the copy of each file that the next node's launcher stores. Ranks then read from the memory of
    all nodes that are left.

    keep  number of checkpoints that stay, at least 2 where there are copies. Takes the memory of
          `keep` + 1 states of this node, within the limit of /dev/shm, and that of 3 for copies.

    Raises `ContractError` under another launcher; see `is_available`.
    """

    def __init__(self, *, keep: int = 1) -> None:
        folder = os.environ.get(NODE_MEMORY)
        if not folder:
            raise ContractError(NODE_MEMORY, "is not set: the launcher `resihp run` does so")
        self._servers = MemoryServers.of_environment(os.environ)
        if self._servers.target is not None:
            keep = max(keep, _KEEP_WITH_COPIES)
        super().__init__(folder, keep=keep, ranks=_ranks_of_this_node())
        self._connection: Connection | None = None
        self._has_warned = False
        self._writer: int | None = None

    @staticmethod
    def is_available() -> bool:
        """True if `resihp run` has started this process, on a system with tmpfs."""
        return bool(os.environ.get(NODE_MEMORY))

    def put(self, checkpoint: InFlightCheckpoint) -> None:
        """Write this rank's file, then send a copy to the next node.

        If that node cannot be reached, the file stays without a copy, and training goes on.
        """
        self._writer = threading.get_ident()
        super().put(checkpoint)
        if self._servers.target is None:
            return
        try:
            self._copy(checkpoint.index(), self._servers.target)
        except (OSError, CheckpointError, LookupError, ValueError) as problem:
            self._disconnect()
            level = logging.DEBUG if self._has_warned else logging.WARNING
            self._has_warned = True
            _log.log(level, "no copy of step %d: %s", checkpoint.identity.step, problem)

    def checkpoints(self) -> list[StoredCheckpoint]:
        """List the checkpoints that the nodes hold together, at most one per step.

        To the thread that writes, and that retires old ones, those of this node.
        """
        if not self._servers.servers or threading.get_ident() == self._writer:
            return super().checkpoints()
        return self._inventory().checkpoints()

    def open(self, step: int) -> CheckpointReader:
        """Open a checkpoint. Raises `CheckpointError` if it is in no memory."""
        if not self._servers.servers:
            return super().open(step)
        inventory = self._inventory().at(step)
        best = best_first(inventory.complete())
        if not best:
            raise CheckpointError(f"no node holds all of step {step}")
        own: FolderReader | None = None
        with contextlib.suppress(OSError, CheckpointError):
            own = FolderReader(self.folder / step_name(step))
        return _NodesReader(inventory.holders(best[0]), self._connected, own)

    def close(self) -> None:
        """Close the connection to the next node."""
        self._disconnect()

    def _inventory(self) -> Inventory:
        return Inventory.ask(self._servers.servers, self._connected)

    def _copy(self, index: FileIndex, target: Address) -> None:
        """Send this rank's file; over a new connection if the server has closed the one before."""
        if self._connection is not None:
            try:
                self._send(index, self._connection)
                return
            except ConnectionError:
                self._disconnect()
        self._connection = self._connected(target)
        self._send(index, self._connection)

    def _send(self, index: FileIndex, connection: Connection) -> None:
        """Send this rank's file, chunk by chunk; the server verifies it."""
        file = self._open_file(index)
        try:
            connection.send(do="put", tensor_bytes=index.tensor_bytes)
            spans = [span for span in index.chunks if span[1] <= index.tensor_bytes]
            for start, stop in spans:
                connection.send_bytes(memoryview(os.pread(file, stop - start, start)))
            connection.send(index=index.to_json())
            left = index.file_bytes - index.tensor_bytes
            connection.send_bytes(memoryview(os.pread(file, left, index.tensor_bytes)))
            connection.receive()
        finally:
            os.close(file)

    def _open_file(self, index: FileIndex) -> int:
        """Open this rank's file, which other ranks publish meanwhile by renaming its folder."""
        final = self.folder / step_name(index.step)
        part = part_folder(final, index.run)
        for folder in (part, part.with_suffix(".ready.part")):
            with contextlib.suppress(FileNotFoundError):
                return os.open(folder / data_name(index.rank), os.O_RDONLY | os.O_CLOEXEC)
        return os.open(final / data_name(index.rank), os.O_RDONLY | os.O_CLOEXEC)

    def _connected(self, address: Address) -> Connection:
        """A new connection to a launcher's server."""
        return Connection.to(address, self._servers.token, self._servers.timeout_s)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


class _NodesReader(PeerReader):
    """Reads files of this node from its folder, others from the servers of the launchers."""

    def __init__(
        self,
        holders: Mapping[int, Sequence[Holder]],
        connect: Callable[[Address], Connection],
        own: FolderReader | None,
    ) -> None:
        super().__init__(holders, connect)
        self._own = own
        self._is_own = {
            rank
            for rank, index in (own.indexes if own is not None else {}).items()
            if rank in self.indexes and index.run == self.indexes[rank].run
        }

    def read(self, rank: int, start: int, into: memoryview) -> None:
        if self._own is not None and rank in self._is_own:
            with contextlib.suppress(OSError):
                self._own.read(rank, start, into)
                if may_be_intact(self.indexes[rank], start, into):
                    return
        super().read(rank, start, into)

    def close(self) -> None:
        super().close()
        if self._own is not None:
            self._own.close()


def _ranks_of_this_node() -> range | None:
    """Ranks that write into the folder, from the launcher's variables; None: all of the job."""
    try:
        first = int(os.environ["RANK"]) - int(os.environ["LOCAL_RANK"])
        return range(first, first + int(os.environ["LOCAL_WORLD_SIZE"]))
    except (KeyError, ValueError):
        return None
