"""Copies rows out of another process's memory: one copy, made by the kernel, no socket.

`process_vm_readv(2)`, which MPI and UCX call cross-memory attach. Linux alone has it, and allows it
to whoever may trace the other process: the same user, unless Yama or a seccomp filter forbids it.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from resihp.contracts import PeerLostError
from resihp.layout import Move

from ..process_groups.abortable import AbortableProcessGroup

Vector = npt.NDArray[np.int64]
"""Stretches of memory, [count, 2]: address and bytes; what the kernel calls an iovec."""

IOV_MAX = 1024
"""Stretches that the kernel takes in one call."""


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in the memory of its process; strides in bytes."""

    address: int
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Place:
        """That of a tensor in this process."""
        size = tensor.element_size()
        return cls(tensor.data_ptr(), tuple(stride * size for stride in tensor.stride()))


def can_attach() -> bool:
    """Whether this system has the call."""
    return _process_vm_readv() is not None


def read(process: int, there: Vector, here: Vector) -> int:
    """Fill the stretches `here` of this process with those `there`, which hold as many bytes.

    Returns their number. Raises `OSError` if `process` is gone, may not be read, or has not all
    of it; what `here` then holds is undefined.
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


def slices(target: torch.Tensor, source: Place, most_bytes: int) -> Iterator[tuple[Vector, Vector]]:
    """What to read, and where to, so that `target` is filled with what `source` holds.

    Both have the same shape and type. Each slice is one call, of at most `most_bytes`.
    """
    there, here, length = _runs(target, source)
    if length > most_bytes:
        starts = np.arange(0, length, most_bytes)
        there, here = ((first[:, None] + starts).ravel() for first in (there, here))
        lengths = np.resize(np.minimum(most_bytes, length - starts), len(here))
    else:
        lengths = np.full(len(here), length)
    count = min(IOV_MAX, max(1, most_bytes // max(1, length)))
    for first in range(0, len(here), count):
        part = slice(first, first + count)
        yield _joined(there[part], lengths[part]), _joined(here[part], lengths[part])


def _runs(target: torch.Tensor, source: Place) -> tuple[Vector, Vector, int]:
    """The addresses, there and here, of what is contiguous in both, and its bytes."""
    place, length, inner = Place.of(target), target.element_size(), target.dim()
    if target.numel() == 0:
        return np.empty(0, np.int64), np.empty(0, np.int64), 0
    while inner and (
        target.shape[inner - 1] == 1
        or place.strides[inner - 1] == source.strides[inner - 1] == length
    ):
        inner -= 1
        length *= target.shape[inner]
    outer = target.shape[:inner]
    return _addresses(source, outer), _addresses(place, outer), length


def _addresses(place: Place, outer: Sequence[int]) -> Vector:
    """Those of all rows, in order."""
    found = np.array([place.address], np.int64)
    for size, stride in zip(outer, place.strides, strict=False):
        found = (found[:, None] + np.arange(size, dtype=np.int64) * stride).ravel()
    return found


def _joined(addresses: Vector, lengths: Vector) -> Vector:
    """The same stretches, in as few as possible."""
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


LEAST_RUN_BYTES = 256
"""Rows that lie apart and are shorter than this are packed and sent: each costs about 0.3 us."""

_log = logging.getLogger("resihp.elastic")


@dataclass(frozen=True)
class Source:
    """The memory of the process of `rank`, where `token` lies at `address`."""

    rank: int
    process: int
    address: int
    token: tuple[int, ...]

    def check(self) -> None:
        """Raises `OSError` if the process is not there any more, or another one."""
        found = torch.zeros(len(self.token), dtype=torch.int64)
        for there, here in slices(found, Place(self.address, (8,)), found.nbytes):
            read(self.process, there, here)
        if tuple(found.tolist()) != self.token:
            raise OSError("another process has its number")


@dataclass(frozen=True)
class LocalPeer:
    """Another rank with which this one exchanges.

    group    of the two
    source   the other's memory; None if this rank does not read it
    is_read  the other reads this rank's memory
    token    what the other looks at
    """

    group: AbortableProcessGroup
    source: Source | None
    is_read: bool
    token: torch.Tensor

    def read(
        self,
        targets: Sequence[torch.Tensor],
        table: torch.Tensor,
        most_bytes: int,
        on_slice: Callable[[], None],
    ) -> Iterator[int]:
        """Fill `targets` from where the other's `table` says; yields the bytes of each slice.

        Between two slices it looks whether the generation has been given up. Raises `PeerLostError`
        if so, and if the other is lost.
        """
        assert self.source is not None
        try:
            for target, (address, *strides) in zip(targets, table.tolist(), strict=True):
                place = Place(address, tuple(strides[: target.dim()]))
                for there, here in slices(target, place, most_bytes):
                    self.group.check_aborted()
                    on_slice()
                    yield read(self.source.process, there, here)
            self.source.check()
        except OSError as error:
            raise PeerLostError(f"lost rank {self.source.rank} in mid-read: {error}") from error


def probe_peer_memory(group: AbortableProcessGroup, rank: int, *, attach: bool) -> LocalPeer:
    """Find out whether the two ranks of `group` read each other's memory; both call it.

    `attach` says whether this rank reads, and is read; not if what moves is no host memory.
    """
    attach = attach and can_attach()
    token = torch.frombuffer(bytearray(os.urandom(16)), dtype=torch.int64)
    card = torch.tensor([attach, os.getpid(), token.data_ptr(), *token.tolist()])
    place = 1 - group.ranks.index(rank)
    wants, process, address, *theirs = group.all_gather(card)[place].tolist()
    source = Source(group.ranks[place], process, address, tuple(theirs))
    why_not = _refusal(source) if attach and wants else "one of them does not want it, or cannot"
    if why_not is not None:
        _log.debug("rank %d does not read rank %d's memory: %s", rank, source.rank, why_not)
    told = group.all_gather(torch.tensor([why_not is None]))
    return LocalPeer(group, None if why_not else source, bool(told[place]), token)


def _refusal(source: Source) -> str | None:
    """Why it cannot be read, if it cannot."""
    try:
        source.check()
    except OSError as error:
        return str(error)
    return None


def is_readable(move: Move) -> bool:
    """Whether its rows are long enough where they lie apart."""
    param = move.param
    row_numel = 1
    for size in param.shape[(param.dim or 0) + 1 :]:
        row_numel *= size
    return not param.dim or (move.stop - move.start) * row_numel * 4 >= LEAST_RUN_BYTES


def table_of(views: Sequence[torch.Tensor]) -> torch.Tensor:
    """Where `views` lie, for a neighbour: [views, 1 + dimensions], address and strides."""
    table = empty_table(len(views), max(view.dim() for view in views))
    for row, view in zip(table, views, strict=True):
        place = Place.of(view)
        row[: 1 + view.dim()] = torch.tensor([place.address, *place.strides])
    return table


def empty_table(views: int, dims: int) -> torch.Tensor:
    """Room for the table of another rank."""
    return torch.zeros(views, 1 + dims, dtype=torch.int64)
