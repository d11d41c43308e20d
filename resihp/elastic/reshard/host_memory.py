"""Reading of another process's memory on the same host.

`process_vm_readv(2)`, called cross-memory attach by MPI and UCX: one copy, made by the kernel,
without a socket. Linux only; permitted to a process that may trace the other one (same user, unless
Yama or a seccomp filter forbids it).
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Addresses = npt.NDArray[np.int64]
IoVectors = npt.NDArray[np.int64]
"""Contiguous ranges of memory, [count, 2]: address and bytes (the kernel's `iovec`)."""

IOV_MAX = 1024
"""Most ranges that the kernel takes in one call."""

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


@dataclass(frozen=True)
class CrossMemoryAttach:
    """Tensors in the memory of the host, read in slices of `slice_bytes`."""

    slice_bytes: int = SLICE_BYTES

    device = torch.device("cpu")
    words = 2

    def place(self, tensor: torch.Tensor) -> list[int]:
        """Process, address and strides of a tensor of this process."""
        where = TensorAddress.of(tensor)
        return [os.getpid(), where.address, *where.strides]

    def read(
        self, targets: Sequence[torch.Tensor], places: Sequence[Sequence[int]]
    ) -> Iterator[int]:
        """Fill `targets` from the tensors at `places`; yields the bytes of each slice.

        Raises `OSError` if the process has ended or may not be read.
        """
        for target, (process, address, *strides) in zip(targets, places, strict=True):
            source = TensorAddress(address, tuple(strides[: target.dim()]))
            for there, here in slices(target, source, self.slice_bytes):
                yield read(process, there, here)


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
    place = TensorAddress.of(target)
    outer, length = _outer(target, place, source)
    if not outer:  # one run
        for start in range(0, length, max_bytes):
            size = min(max_bytes, length - start)
            yield _one(source.address + start, size), _one(place.address + start, size)
        return
    there, here = (_row_addresses(one, outer) for one in (source, place))
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


def _outer(
    target: torch.Tensor, place: TensorAddress, source: TensorAddress
) -> tuple[Sequence[int], int]:
    """The dimensions over the runs that are contiguous in both, and the bytes of a run."""
    length, inner = target.element_size(), target.dim()
    while inner and (
        target.shape[inner - 1] == 1
        or place.strides[inner - 1] == source.strides[inner - 1] == length
    ):
        inner -= 1
        length *= target.shape[inner]
    return target.shape[:inner], length


def _one(address: int, size: int) -> IoVectors:
    return np.array(((address, size),), np.int64)


def _row_addresses(place: TensorAddress, outer: Sequence[int]) -> Addresses:
    found = np.array([place.address], np.int64)
    for size, stride in zip(outer, place.strides, strict=False):
        found = (found[:, None] + np.arange(size, dtype=np.int64) * stride).ravel()
    return found


def _joined(addresses: Addresses, lengths: Addresses) -> IoVectors:
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
