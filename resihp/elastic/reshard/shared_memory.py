"""Zero-copy transport between two processes of one host: reads the memory of the other process.

On the host by `host_memory`, on a device by `device_memory`. Whether a rank can read another one is
found out by reading a random number; where it cannot, a process group carries the tensors.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from resihp.contracts import PeerLostError
from resihp.layout import Move

from ..process_groups.abortable import AbortableProcessGroup
from ..process_groups.transport import ProcessGroupTransport, Transfer, Transport
from ..step.shard import STATE_DTYPE
from .device_memory import CudaIpc
from .host_memory import SLICE_BYTES, CrossMemoryAttach, is_supported

_log = logging.getLogger("resihp.elastic")

MIN_RUN_BYTES = 256
"""Shorter rows that are not adjacent are packed and sent: reading costs about 0.3 us per row."""

_REFUSALS = (OSError, RuntimeError, BufferError, AttributeError)
"""What a system, a driver or a torch may raise that cannot do this; found out by the first read."""


class MemoryAccess(Protocol):
    """A way to read the memory of another process.

    device  of the tensors
    words   numbers that tell where a tensor lies, besides its strides
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def words(self) -> int: ...

    def place(self, tensor: torch.Tensor) -> list[int]:
        """Tell where a tensor of this process lies: `words` numbers and its strides in bytes."""
        ...

    def read(
        self, targets: Sequence[torch.Tensor], places: Sequence[Sequence[int]]
    ) -> Iterator[int]:
        """Fill `targets` from the tensors at `places`; yields bytes read. Raises `OSError`."""
        ...


def memory_of(device: torch.device, slice_bytes: int = SLICE_BYTES) -> MemoryAccess:
    """The way to read tensors of `device`. Raises `OSError` if there is none."""
    if device.type == "cuda":
        return CudaIpc(device)
    if not is_supported():
        raise OSError("this system cannot read another process's memory")
    return CrossMemoryAttach(slice_bytes)


@dataclass(frozen=True)
class PeerProcess:
    """The process of `rank`, identified by a random `token` at a `place` of its memory."""

    rank: int
    memory: MemoryAccess
    place: tuple[int, ...]
    token: tuple[int, ...]

    def check(self) -> None:
        """Raises `OSError` if the process has ended or its memory is that of another one."""
        found = torch.zeros(len(self.token), dtype=torch.int64, device=self.memory.device)
        sum(self.memory.read([found], [self.place]))
        if tuple(found.tolist()) != self.token:
            raise OSError("another process has its id")


class SharedMemoryTransport:
    """Reads tensors from the memory of the source's process.

    `send` tells the peer the places, over `group`, and `recv` reads them. On a device the table of
    places travels behind the work of the stream, so that the tensors have their values when it
    arrives.

    process  of the source; None on the source itself
    token    of the source, kept in place while the peer may read it
    """

    is_zero_copy = True

    def __init__(
        self,
        group: AbortableProcessGroup,
        source: int,
        memory: MemoryAccess,
        process: PeerProcess | None,
        token: torch.Tensor,
    ) -> None:
        self.source = source
        self._group, self._memory = group, memory
        self._process, self._token = process, token

    def send(self, tensors: Sequence[torch.Tensor]) -> Transfer:
        """Start to tell the places of `tensors`. Raises `PeerLostError` if they have none."""
        try:
            table = place_table(self._memory, tensors)
        except OSError as error:
            raise PeerLostError(f"no peer can read this rank's memory: {error}") from error
        return self._told(self._group.start_broadcast(table, self.source))

    def recv(self, tensors: Sequence[torch.Tensor]) -> Transfer:
        """Start to learn the places of the source's tensors, and read them."""
        shape = (len(tensors), _width(self._memory, tensors))
        table = torch.zeros(shape, dtype=torch.int64, device=self._memory.device)
        return self._read(tensors, table, self._group.start_broadcast(table, self.source))

    def _told(self, work: dist.Work) -> Transfer:
        self._group.wait(work)
        yield from ()

    def _read(
        self, targets: Sequence[torch.Tensor], table: torch.Tensor, work: dist.Work
    ) -> Transfer:
        assert self._process is not None
        self._group.wait(work)
        try:
            for read_bytes in self._memory.read(targets, table.tolist()):
                yield read_bytes
                self._group.check_aborted()
            self._process.check()
        except OSError as error:
            raise PeerLostError(f"lost rank {self._process.rank} in mid-read: {error}") from error


@dataclass(frozen=True)
class PeerLink:
    """Transports between this rank and one peer; the only place that chooses between them.

    group   of the two ranks
    memory  by source rank, where the other rank can read its memory
    """

    group: AbortableProcessGroup
    memory: Mapping[int, SharedMemoryTransport]

    def transport(self, move: Move) -> Transport:
        """The transport for one move; both ends of it choose the same."""
        direct = self.memory.get(move.source)
        if direct is not None and is_readable(move):
            return direct
        return ProcessGroupTransport(self.group, move.source)


def probe_peer_memory(
    group: AbortableProcessGroup, rank: int, *, attach: bool, slice_bytes: int = SLICE_BYTES
) -> PeerLink:
    """Find out whether the two ranks of `group` can read each other's memory; both call it.

    attach  whether this rank reads and lets itself be read
    """
    device, index = group.device, 1 - group.ranks.index(rank)
    peer_rank, token = group.ranks[index], _token().to(device)
    memory, place, refusal = None, list[int](), "disabled on one of the two"
    try:
        if attach:
            memory = memory_of(device, slice_bytes)
            place = memory.place(token)
    except _REFUSALS as error:
        memory, refusal = None, str(error)
    card = torch.zeros(16, dtype=torch.int64, device="cpu")
    own = [memory is not None, *token.tolist(), *place]
    card[: len(own)] = torch.tensor(own, device="cpu")
    wants, *said = group.all_gather(card.to(device))[index].tolist()
    peer = None
    if memory is not None and wants:
        theirs, where = said[: len(token)], said[len(token) :][: memory.words + 1]
        peer = PeerProcess(peer_rank, memory, tuple(where), tuple(theirs))
        try:
            peer.check()
        except _REFUSALS as error:
            peer, refusal = None, str(error)
    if peer is None:
        _log.debug("rank %d does not read rank %d's memory: %s", rank, peer_rank, refusal)
    answers = group.all_gather(torch.tensor([peer is not None], device=device))
    transports = {}
    if memory is not None and bool(answers[index]):
        transports[rank] = SharedMemoryTransport(group, rank, memory, None, token)
    if memory is not None and peer is not None:
        transports[peer_rank] = SharedMemoryTransport(group, peer_rank, memory, peer, token)
    return PeerLink(group, transports)


def _token() -> torch.Tensor:
    return torch.frombuffer(bytearray(os.urandom(16)), dtype=torch.int64)


def is_readable(move: Move) -> bool:
    """Return whether the contiguous runs of a move are long enough to be read one by one."""
    param = move.param
    row_numel = math.prod(param.shape[(param.dim or 0) + 1 :])
    run_bytes = (move.stop - move.start) * row_numel * STATE_DTYPE.itemsize
    return not param.dim or run_bytes >= MIN_RUN_BYTES


def place_table(memory: MemoryAccess, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Place and strides of each tensor, [tensors, words + dimensions], int64, on their device."""
    width = _width(memory, tensors)
    places = [memory.place(tensor) for tensor in tensors]
    rows = [place + [0] * (width - len(place)) for place in places]
    table = torch.tensor(rows, device="cpu")
    if memory.device.type == "cpu":
        return table
    return table.pin_memory().to(memory.device, non_blocking=True)


def _width(memory: MemoryAccess, tensors: Sequence[torch.Tensor]) -> int:
    return memory.words + max(tensor.dim() for tensor in tensors)
