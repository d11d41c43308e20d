"""Zero-copy transport between two processes of one host: reads the memory of the other process.

`process_vm_readv(2)`, called cross-memory attach by MPI and UCX: one copy, made by the kernel,
without a socket. Linux only; permitted to a process that may trace the other one (same user, unless
Yama or a seccomp filter forbids it).
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from resihp.contracts import PeerLostError
from resihp.layout import Move

from ..process_groups.abortable import AbortableProcessGroup
from ..process_groups.transport import ProcessGroupTransport, Transfer, Transport
from ..step.shard import STATE_DTYPE

_log = logging.getLogger("resihp.elastic")

IoVectors = npt.NDArray[np.int64]
"""Contiguous ranges of memory, [count, 2]: address and bytes (the kernel's `iovec`)."""

IOV_MAX = 1024
"""Most ranges that the kernel takes in one call."""

MIN_RUN_BYTES = 256
"""Shorter rows that are not adjacent are packed and sent: reading costs about 0.3 us per row."""

SLICE_BYTES = 4 << 20
"""Bytes read in one call; between two calls a reader checks whether the generation is aborted."""


@dataclass(frozen=True)
class TensorAddress:
    """Address and strides, in bytes, of a tensor in the memory of its process."""

    address: int
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorAddress:
        """Address of a tensor of this process."""
        size = tensor.element_size()
        return cls(tensor.data_ptr(), tuple(stride * size for stride in tensor.stride()))


def is_supported() -> bool:
    """Return whether this system has `process_vm_readv`."""
    return _process_vm_readv() is not None


def read(process: int, there: IoVectors, here: IoVectors) -> int:
    """Fill the ranges `here` of this process from `there` in `process`; as many bytes in both.

    Returns the number of bytes. Raises `OSError` if `process` has ended, may not be read or lacks
    some of the memory; the contents of `here` are then undefined.
    """
    call = _process_vm_readv()
    if call is None:
        raise OSError("this system cannot read another process's memory")
    due = int(here[:, 1].sum())
    done = call(process, here.ctypes.data, len(here), there.ctypes.data, len(there), 0)
    if done < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    if done < due:
        raise OSError(f"read {done} of {due} bytes")
    return done


def slices(
    target: torch.Tensor, source: TensorAddress, max_bytes: int
) -> Iterator[tuple[IoVectors, IoVectors]]:
    """Arguments `there` and `here` of the calls of `read` that fill `target` from `source`.

    Both tensors have the same shape and dtype. Each call reads at most `max_bytes`.
    """
    there, here, length = _runs(target, source)
    if length > max_bytes:
        starts = np.arange(0, length, max_bytes)
        there, here = ((first[:, None] + starts).ravel() for first in (there, here))
        lengths = np.resize(np.minimum(max_bytes, length - starts), len(here))
    else:
        lengths = np.full(len(here), length)
    count = min(IOV_MAX, max(1, max_bytes // max(1, length)))
    for first in range(0, len(here), count):
        part = slice(first, first + count)
        yield _joined(there[part], lengths[part]), _joined(here[part], lengths[part])


def _runs(target: torch.Tensor, source: TensorAddress) -> tuple[IoVectors, IoVectors, int]:
    """Addresses, there and here, of the runs that are contiguous in both, and their length."""
    place, length, inner = TensorAddress.of(target), target.element_size(), target.dim()
    if target.numel() == 0:
        return np.empty(0, np.int64), np.empty(0, np.int64), 0
    while inner and (
        target.shape[inner - 1] == 1
        or place.strides[inner - 1] == source.strides[inner - 1] == length
    ):
        inner -= 1
        length *= target.shape[inner]
    outer = target.shape[:inner]
    return _row_addresses(source, outer), _row_addresses(place, outer), length


def _row_addresses(place: TensorAddress, outer: Sequence[int]) -> IoVectors:
    found = np.array([place.address], np.int64)
    for size, stride in zip(outer, place.strides, strict=False):
        found = (found[:, None] + np.arange(size, dtype=np.int64) * stride).ravel()
    return found


def _joined(addresses: IoVectors, lengths: IoVectors) -> IoVectors:
    """The same ranges with adjacent ones merged."""
    is_new = np.append(True, addresses[1:] != addresses[:-1] + lengths[:-1])
    (first,) = np.nonzero(is_new)
    return np.stack((addresses[first], np.add.reduceat(lengths, first)), axis=1)


@functools.cache
def _process_vm_readv() -> Callable[..., int] | None:
    call = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if call is not None:
        vector = (ctypes.c_void_p, ctypes.c_ulong)
        call.argtypes = (ctypes.c_int, *vector, *vector, ctypes.c_ulong)
        call.restype = ctypes.c_ssize_t
    return call


@dataclass(frozen=True)
class PeerProcess:
    """The process of `rank`, identified by a random `token` at `address` of its memory."""

    rank: int
    process: int
    address: int
    token: tuple[int, ...]

    def check(self) -> None:
        """Raises `OSError` if the process has ended or its id belongs to another one."""
        found = torch.zeros(len(self.token), dtype=torch.int64)
        for there, here in slices(found, TensorAddress(self.address, (8,)), found.nbytes):
            read(self.process, there, here)
        if tuple(found.tolist()) != self.token:
            raise OSError("another process has its id")


class SharedMemoryTransport:
    """Reads tensors from the memory of the source's process.

    `send` tells the peer the addresses, over `group`; `recv` reads in slices of `slice_bytes`.

    process  of the source; None on the source itself
    token    of the source, kept in place while the peer may read it
    """

    is_zero_copy = True

    def __init__(
        self,
        group: AbortableProcessGroup,
        source: int,
        process: PeerProcess | None,
        token: torch.Tensor,
        slice_bytes: int = SLICE_BYTES,
    ) -> None:
        self.source = source
        self._group, self._process = group, process
        self._token, self._slice_bytes = token, slice_bytes

    def send(self, tensors: Sequence[torch.Tensor]) -> Transfer:
        """Start to tell the addresses of `tensors`."""
        table = address_table(tensors)
        return self._told(self._group.start_broadcast(table, self.source))

    def recv(self, tensors: Sequence[torch.Tensor]) -> Transfer:
        """Start to learn the addresses of the source's tensors, and read them."""
        table = _empty_table(tensors)
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
            for target, (address, *strides) in zip(targets, table.tolist(), strict=True):
                source = TensorAddress(address, tuple(strides[: target.dim()]))
                for there, here in slices(target, source, self._slice_bytes):
                    self._group.check_aborted()
                    yield read(self._process.process, there, here)
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

    attach  whether this rank reads and lets itself be read; False for tensors on an accelerator
    """
    attach = attach and is_supported()
    token = torch.frombuffer(bytearray(os.urandom(16)), dtype=torch.int64)
    card = [attach, os.getpid(), token.data_ptr(), *token.tolist()]
    index = 1 - group.ranks.index(rank)
    cards = group.all_gather(torch.tensor(card, device=group.device))
    wants, process, address, *theirs = cards[index].tolist()
    peer = PeerProcess(group.ranks[index], process, address, tuple(theirs))
    refusal = None if attach and wants else "disabled or unsupported on one of the two"
    try:
        if refusal is None:
            peer.check()
    except OSError as error:
        refusal = str(error)
    if refusal is not None:
        _log.debug("rank %d does not read rank %d's memory: %s", rank, peer.rank, refusal)
    answers = group.all_gather(torch.tensor([refusal is None], device=group.device))
    is_read = bool(answers[index])
    memory = {}
    if is_read:
        memory[rank] = SharedMemoryTransport(group, rank, None, token, slice_bytes)
    if refusal is None:
        memory[peer.rank] = SharedMemoryTransport(group, peer.rank, peer, token, slice_bytes)
    return PeerLink(group, memory)


def is_readable(move: Move) -> bool:
    """Return whether the contiguous runs of a move are long enough to be read one by one."""
    param = move.param
    row_numel = math.prod(param.shape[(param.dim or 0) + 1 :])
    run_bytes = (move.stop - move.start) * row_numel * STATE_DTYPE.itemsize
    return not param.dim or run_bytes >= MIN_RUN_BYTES


def address_table(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Address and strides of each tensor, [tensors, 1 + dimensions], int64."""
    table = _empty_table(tensors)
    for row, tensor in zip(table, tensors, strict=True):
        place = TensorAddress.of(tensor)
        row[: 1 + tensor.dim()] = torch.tensor([place.address, *place.strides])
    return table


def _empty_table(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    dims = max(tensor.dim() for tensor in tensors)
    return torch.zeros(len(tensors), 1 + dims, dtype=torch.int64)
