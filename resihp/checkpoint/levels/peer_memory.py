"""A peer's memory: when a node is lost, its newest state is still in the memory of another."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable, Mapping
from datetime import timedelta
from threading import Lock

import torch.distributed as dist

from resihp.contracts import CheckpointError, ContractError

from ..format.index import FileIndex, read_index
from ..history import StoredCheckpoint, best_first, merged_lineage
from ..staging.in_flight import InFlightCheckpoint
from .host_memory import HostMemory, ImageStore
from .peer_server import Address, Connection, PeerServer


class PeerMemory:
    """Sends each checkpoint of this rank to a peer, and keeps those of the ranks that send here.

    own      this process's own level; its checkpoints are handed out as well
    listen   address to listen on; port 0: any free one. Whoever connects must know `token`,
             by default a random one.
    keep     checkpoints kept for each sender; their memory is one more
    server   what listens and keeps, where it is to outlive this level; instead of the three above
    timeout  of every wait on a peer

    `connect` says where all ranks listen; `connect_group` finds that out by itself. The peer of a
    rank is the one `distance` after it: with as many ranks on each node, a rank of another node.
    """

    name = "peer memory"
    after_disk = False
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
        self._line: Connection | None = None

    @property
    def address(self) -> Address:
        """Where this rank listens."""
        return self._server.address

    @property
    def token(self) -> str:
        """What the ranks know each other by."""
        return self._server.token

    def connect(self, rank: int, addresses: Mapping[int, Address], *, distance: int = 1) -> None:
        """Say where every rank listens (this one included). No rank is its own peer."""
        if rank not in addresses:
            raise ContractError("addresses", f"rank {rank}, this one, is not among {[*addresses]}")
        self._hang_up()
        ranks = sorted(addresses)
        peer = ranks[(ranks.index(rank) + distance) % len(ranks)]
        self._addresses = dict(addresses)
        self._target = addresses[peer] if peer != rank else None

    def connect_group(self, group: dist.ProcessGroup | None = None, *, distance: int = 1) -> None:
        """The same for all ranks of a group at once; a collective call of its CPU backend."""
        told: list[tuple[int, Address, str]] = [(0, ("", 0), "")] * dist.get_world_size(group)
        dist.all_gather_object(told, (dist.get_rank(), self.address, self.token), group=group)
        self._server.token = told[0][2]
        addresses = {rank: (host, port) for rank, (host, port), _ in told}
        self.connect(dist.get_rank(), addresses, distance=distance)

    def put(self, checkpoint: InFlightCheckpoint) -> None:
        """Send each chunk as soon as it is copied; the peer verifies what arrived."""
        if self._target is None:
            raise CheckpointError("no peer to send to")
        try:
            if self._line is None:
                self._line = Connection.to(self._target, self.token, self._timeout_s)
            self._send(checkpoint, self._line)
        except BaseException:
            self._hang_up()
            raise

    def _send(self, checkpoint: InFlightCheckpoint, line: Connection) -> None:
        checkpoint.take(0 if checkpoint.count else -1)
        line.send(do="put", tensor_bytes=checkpoint.file.nbytes)
        for number in range(checkpoint.count):
            checkpoint.take(number)
            line.send_bytes(checkpoint.chunk(number))
            checkpoint.checksum(number)
            checkpoint.done_with(self.name, number + 1)
        line.send(index=checkpoint.index().to_json())
        line.send_bytes(memoryview(checkpoint.section))
        line.receive()

    def found(self) -> list[StoredCheckpoint]:
        """Checkpoints of which the reachable ranks together hold every file."""
        whole = _whole(self._inventory())
        newest = {one.step: one for one in reversed(best_first(whole))}
        return [newest[step] for step in sorted(newest)]

    def steps(self) -> list[int]:
        """Steps of which the reachable ranks together hold every file."""
        return [found.step for found in self.found()]

    def open(self, step: int) -> PeerReader:
        """Raises `CheckpointError` where no reachable rank holds any of it."""
        held = [(i, address) for i, address in self._inventory() if i.step == step]
        best = best_first(_whole(held)) or best_first(
            StoredCheckpoint(step, i.lineage) for i, _ in held
        )
        if not best:
            raise CheckpointError(f"no reachable rank holds step {step}")
        of_run = {i.rank: (i, address) for i, address in held if i.run == best[0].lineage.run}
        return PeerReader(of_run, self.token, self._timeout_s)

    def close(self) -> None:
        """Stop sending, and serving unless the server is another's."""
        self._hang_up()
        if self._owns_server:
            self._server.close()

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line.close()
        self._line = None

    def _inventory(self) -> list[tuple[FileIndex, Address]]:
        found: list[tuple[FileIndex, Address]] = []
        for address in self._addresses.values():
            with (
                contextlib.suppress(OSError, CheckpointError),
                _call(address, self.token, self._timeout_s) as line,
            ):
                line.send(do="list")
                texts = line.receive()["indexes"]
                found += [(read_index(text, f"memory at {address}"), address) for text in texts]
        return found


class PeerReader:
    """A checkpoint in the memory of several processes."""

    def __init__(
        self, held: Mapping[int, tuple[FileIndex, Address]], token: str, timeout_s: float
    ) -> None:
        self.indexes = {rank: index for rank, (index, _) in held.items()}
        self._addresses = {rank: address for rank, (_, address) in held.items()}
        self._token, self._timeout_s = token, timeout_s
        self._idle: dict[Address, list[Connection]] = {}
        self._lock = Lock()

    def read(self, rank: int, start: int, into: memoryview) -> None:
        """Bytes of a rank's file, over a connection that no other thread uses meanwhile."""
        address, step = self._addresses[rank], self.indexes[rank].step
        with self._lock:
            idle = self._idle.setdefault(address, [])
            line = idle.pop() if idle else None
        line = line or Connection.to(address, self._token, self._timeout_s)
        line.send(do="get", rank=rank, step=step, start=start, count=len(into))
        line.receive()
        line.receive_into(into)
        with self._lock:
            idle.append(line)

    def close(self) -> None:
        """Hang up."""
        for lines in self._idle.values():
            for line in lines:
                line.close()


def _whole(inventory: Iterable[tuple[FileIndex, Address]]) -> list[StoredCheckpoint]:
    """The checkpoints of which every rank's file is there; files of different runs never mix."""
    held: dict[tuple[int, str], list[FileIndex]] = {}
    for index, _ in inventory:
        held.setdefault((index.step, index.run), []).append(index)
    return [
        StoredCheckpoint(step, merged_lineage(index.lineage for index in indexes))
        for (step, _), indexes in held.items()
        if {rank for index in indexes for rank in index.ranks} <= {i.rank for i in indexes}
    ]


@contextlib.contextmanager
def _call(address: Address, token: str, timeout_s: float):  # type: ignore[no-untyped-def]
    line = Connection.to(address, token, timeout_s)
    try:
        yield line
    finally:
        line.close()
