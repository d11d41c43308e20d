"""Peer memory: copies of a rank's newest checkpoints in the memory of another rank."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from threading import Lock

import torch.distributed as dist

from resihp.contracts import CheckpointError, ContractError

from ..format.index import FileIndex, read_index
from ..history import StoredCheckpoint, best_first, merged_lineage
from ..staging.in_flight import InFlightCheckpoint
from .host_memory import HostMemory, ImageStore
from .level import CheckpointReader, Level
from .peer_server import Address, Connection, PeerServer

Holder = tuple[FileIndex, Address]
"""Index of an image, and the address of the server that holds it."""


@dataclass(frozen=True)
class Inventory:
    """Images in the memory of several processes."""

    held: Sequence[Holder]

    @classmethod
    def ask(
        cls, addresses: Iterable[Address], connect: Callable[[Address], Connection]
    ) -> Inventory:
        """Ask every server; one that does not answer as it should holds nothing."""
        held: list[Holder] = []
        for address in addresses:
            with (
                contextlib.suppress(OSError, CheckpointError, LookupError, TypeError),
                contextlib.closing(connect(address)) as connection,
            ):
                connection.send(do="list")
                for text in connection.receive()["indexes"]:
                    with contextlib.suppress(CheckpointError):
                        held.append((read_index(text, f"memory at {address}"), address))
        return cls(held)

    def at(self, step: int) -> Inventory:
        """Leave out the images of other steps."""
        return Inventory([holder for holder in self.held if holder[0].step == step])

    def complete(self) -> list[StoredCheckpoint]:
        """List the checkpoints with the file of every rank that any of their indexes names.

        Files of different runs never mix.
        """
        parts: dict[tuple[int, str], list[FileIndex]] = {}
        for index, _ in self.held:
            parts.setdefault((index.step, index.run), []).append(index)
        return [
            StoredCheckpoint(step, merged_lineage(index.lineage for index in indexes))
            for (step, _), indexes in parts.items()
            if {rank for index in indexes for rank in index.ranks} <= {i.rank for i in indexes}
        ]

    def checkpoints(self) -> list[StoredCheckpoint]:
        """List the best complete checkpoint of each step, in the order of steps."""
        newest = {one.step: one for one in reversed(best_first(self.complete()))}
        return [newest[step] for step in sorted(newest)]

    def holders(self, checkpoint: StoredCheckpoint) -> dict[int, list[Holder]]:
        """Return for each rank the images of its file."""
        found: dict[int, list[Holder]] = {}
        for index, address in self.at(checkpoint.step).held:
            if index.run == checkpoint.lineage.run:
                found.setdefault(index.rank, []).append((index, address))
        return found


class PeerMemory(Level):
    """Sends each checkpoint of this rank to a peer, and stores those of the ranks that send here.

    own      this process's own level; its checkpoints are served as well
    listen   address to listen on, by which all ranks reach this one; port 0: any free one. Clients
             must know `token`, by default a random one.
    keep     number of checkpoints stored for each sender; they take memory for one more
    server   an existing server that outlives this level, in place of the three above
    timeout  of every wait for a peer

    `connect` sets the addresses of all ranks; `connect_group` exchanges them in a process group.
    The peer of a rank is the one `distance` after it: with as many ranks on each node, a rank of
    another node.
    """

    name = "peer memory"
    patience = 0

    def __init__(
        self,
        own: HostMemory,
        *,
        listen: Address = ("127.0.0.1", 0),
        token: str = "",
        keep: int = 1,
        server: PeerServer | None = None,
        timeout: timedelta = timedelta(seconds=30),
    ) -> None:
        if not isinstance(own, HostMemory):
            raise ContractError("own", f"this process's HostMemory, not {type(own).__name__}")
        self._timeout_s = timeout.total_seconds()
        self._owns_server = server is None
        self._server = server or PeerServer(
            ImageStore(keep),
            own.store,
            listen,
            token or secrets.token_hex(16),
            1000 * self._timeout_s,
        )
        self._addresses: Mapping[int, Address] = {}
        self._target: Address | None = None
        self._connection: Connection | None = None

    @property
    def address(self) -> Address:
        """Address of this rank's server."""
        return self._server.address

    @property
    def token(self) -> str:
        """Shared secret of the ranks."""
        return self._server.token

    def connect(self, rank: int, addresses: Mapping[int, Address], *, distance: int = 1) -> None:
        """Set the addresses of all ranks, this one included. No rank is its own peer.

        Raises `ContractError` if two ranks have the same address: a rank would send to itself.
        """
        if rank not in addresses:
            raise ContractError("addresses", f"rank {rank}, this one, is not among {[*addresses]}")
        first: dict[Address, int] = {}
        for each, address in addresses.items():
            if (other := first.setdefault(address, each)) != each:
                reason = f"ranks {other} and {each} both have {address}, which reaches one of them"
                raise ContractError("addresses", f"{reason}: listen on one that names the node")
        self._disconnect()
        ranks = sorted(addresses)
        peer = ranks[(ranks.index(rank) + distance) % len(ranks)]
        self._addresses = dict(addresses)
        self._target = addresses[peer] if peer != rank else None

    def connect_group(self, group: dist.ProcessGroup | None = None, *, distance: int = 1) -> None:
        """Exchange the addresses in a group and connect; a collective call of its CPU backend."""
        gathered: list[tuple[int, Address, str]] = [(0, ("", 0), "")] * dist.get_world_size(group)
        dist.all_gather_object(gathered, (dist.get_rank(), self.address, self.token), group=group)
        self._server.token = gathered[0][2]
        addresses = {rank: (host, port) for rank, (host, port), _ in gathered}
        self.connect(dist.get_rank(), addresses, distance=distance)

    def put(self, checkpoint: InFlightCheckpoint) -> None:
        """Send each chunk once it is copied; the peer verifies the image."""
        if self._target is None:
            raise CheckpointError("no peer to send to")
        try:
            if self._connection is None:
                self._connection = self._connect(self._target)
            self._send(checkpoint, self._connection)
        except BaseException:
            self._disconnect()
            raise

    def _send(self, checkpoint: InFlightCheckpoint, connection: Connection) -> None:
        checkpoint.take(0 if checkpoint.count else -1)
        connection.send(do="put", tensor_bytes=checkpoint.file.nbytes)
        for number in range(checkpoint.count):
            checkpoint.take(number)
            connection.send_bytes(checkpoint.chunk(number))
            checkpoint.checksum(number)
            checkpoint.done_with(self.name, number + 1)
        checkpoint.await_agreement(self.name)
        connection.send(index=checkpoint.index().to_json())
        connection.send_bytes(memoryview(checkpoint.section))
        connection.receive()

    def checkpoints(self) -> list[StoredCheckpoint]:
        """List the checkpoints of which the reachable ranks together hold every file."""
        return self._inventory().checkpoints()

    def open(self, step: int) -> PeerReader:
        """Open a checkpoint. Raises `CheckpointError` if no reachable rank holds any of it."""
        inventory = self._inventory().at(step)
        best = best_first(inventory.complete()) or best_first(
            StoredCheckpoint(step, index.lineage) for index, _ in inventory.held
        )
        if not best:
            raise CheckpointError(f"no reachable rank holds step {step}")
        return PeerReader(inventory.holders(best[0]), self._connect)

    def close(self) -> None:
        """Stop sending; also end the server unless it was passed in."""
        self._disconnect()
        if self._owns_server:
            self._server.close()

    def _connect(self, address: Address) -> Connection:
        return Connection.to(address, self.token, self._timeout_s)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _inventory(self) -> Inventory:
        return Inventory.ask(self._addresses.values(), self._connect)


class PeerReader(CheckpointReader):
    """Reads a checkpoint from the memory of several processes.

    holders  for each rank, its index and every server with an image of its file
    connect  connects to a server
    """

    def __init__(
        self, holders: Mapping[int, Sequence[Holder]], connect: Callable[[Address], Connection]
    ) -> None:
        self.indexes = {rank: each[0][0] for rank, each in holders.items()}
        self._holders, self._connect = holders, connect
        self._idle: dict[Address, list[Connection]] = {}
        self._lock = Lock()

    def read(self, rank: int, start: int, into: memoryview) -> None:
        """Fill `into` from the first image of a rank that is reachable and, for chunks, intact."""
        problem: Exception | None = None
        for index, address in self._holders[rank]:
            try:
                self._read_from(address, index, start, into)
            except (OSError, CheckpointError) as raised:
                problem = raised
                continue
            problem = None
            if may_be_intact(index, start, into):
                return
        if problem is not None:
            raise problem

    def close(self) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.close()

    def _read_from(self, address: Address, index: FileIndex, start: int, into: memoryview) -> None:
        """Read over a connection that no other thread uses at the same time."""
        with self._lock:
            idle = self._idle.setdefault(address, [])
            connection = idle.pop() if idle else None
        connection = connection or self._connect(address)
        try:
            connection.send(
                do="get", rank=index.rank, step=index.step, start=start, count=len(into)
            )
            connection.receive()
            connection.receive_into(into)
        except BaseException:
            connection.close()
            raise
        with self._lock:
            idle.append(connection)


def may_be_intact(index: FileIndex, start: int, part: memoryview) -> bool:
    """Return False if a part of a file is one of its chunks and has another checksum."""
    span = (start, start + len(part))
    return span not in index.chunks or index.is_intact(index.chunks.index(span), part)
