"""Reading of device memory of another process on the same host, by CUDA IPC.

The source exports the allocation in which a tensor lies (`cuIpcGetMemHandle`), the reader maps it
(`cuIpcOpenMemHandle`) and has the device copy: within one device, or from another one over NVLink
or PCIe. Neither the processor nor its memory takes part. The driver refuses where there is no way
between two devices, in another IPC namespace, and for memory that was not allocated by `cudaMalloc`
(torch's `expandable_segments`).

torch's own sharing of storages counts readers in a file, and keeps the memory of a storage for good
when a reader is killed; here nothing is counted, and the vote at the end of a transfer tells the
source that its memory has been read. The tests hold the order of the calls against a stand-in;
`benchmarks.gpu` runs them on a device.
"""

from __future__ import annotations

import ctypes
import functools
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import numpy as np
import torch

from .host_memory import Addresses, TensorAddress, runs

HANDLE_BYTES = 64
MAX_PITCH = (1 << 31) - 1
"""Largest distance between two rows of one copy, in bytes."""

POLL_S = 100e-6


class DeviceDriver(Protocol):
    """Mappings and copies of a device."""

    def export(self, address: int) -> tuple[bytes, int]:
        """Handle of the allocation that holds `address`, and the offset in it."""
        ...

    def open(self, handle: bytes) -> int:
        """Map an allocation of another process; returns its address."""
        ...

    def close(self, address: int) -> None:
        """Undo `open`."""
        ...

    def follow(self) -> None:
        """Have the copies wait for what the caller's stream has been told so far."""
        ...

    def copy(self, rows: StridedCopy, target: torch.Tensor) -> None:
        """Start to copy rows into `target`, whose memory is not reused before."""
        ...

    def mark(self) -> Any:
        """Event after the copies so far; its `query` tells whether they have ended."""
        ...

    def synchronize(self) -> None:
        """Wait for the copies."""
        ...


class StridedCopy:
    """StridedCopy of `width` bytes at equal distances, or one: what a device copies at once."""

    def __init__(self, there: Addresses, here: Addresses, width: int) -> None:
        self.source, self.target, self.width, self.height = (
            int(there[0]), int(here[0]), width, len(here),
        )  # fmt: skip
        self.source_pitch, self.target_pitch = (
            int(one[1] - one[0]) if len(one) > 1 else width for one in (there, here)
        )


class CudaIpc:
    """Tensors in the memory of a device; the copies have a stream of their own.

    Allocations stay mapped until this object is freed.
    """

    words = HANDLE_BYTES // 8 + 1

    def __init__(self, device: torch.device, driver: DeviceDriver | None = None) -> None:
        self.device = device
        self._driver = driver if driver is not None else CudaDriver(device)
        self._opened: dict[bytes, int] = {}
        weakref.finalize(self, _close, self._driver, self._opened).atexit = False

    def place(self, tensor: torch.Tensor) -> list[int]:
        """Handle, offset and strides of a tensor of this process. Raises `OSError`."""
        where = TensorAddress.of(tensor)
        handle, offset = bytes(HANDLE_BYTES), 0
        if tensor.numel():
            handle, offset = self._driver.export(where.address)
        return [*np.frombuffer(handle, np.int64).tolist(), offset, *where.strides]

    def read(
        self, targets: Sequence[torch.Tensor], places: Sequence[Sequence[int]]
    ) -> Iterator[int]:
        """Fill `targets` from the tensors at `places`.

        Yields 0 while the copies are under way, then their bytes. Raises `OSError` if memory cannot
        be mapped.
        """
        self._driver.follow()
        for target, place in zip(targets, places, strict=True):
            if target.numel():
                for rows in _rows(target, self._source(target, place)):
                    self._driver.copy(rows, target)
        ended = self._driver.mark()
        while not ended.query():
            yield 0
            time.sleep(POLL_S)
        yield sum(target.nbytes for target in targets)

    def _source(self, target: torch.Tensor, place: Sequence[int]) -> TensorAddress:
        handle = np.array(place[: self.words - 1], np.int64).tobytes()
        if handle not in self._opened:
            self._opened[handle] = self._driver.open(handle)
        offset, strides = place[self.words - 1], place[self.words :]
        return TensorAddress(self._opened[handle] + offset, tuple(strides[: target.dim()]))


def _close(driver: DeviceDriver, opened: dict[bytes, int]) -> None:
    if opened:
        driver.synchronize()
    for address in opened.values():
        driver.close(address)


def _rows(target: torch.Tensor, source: TensorAddress) -> Iterator[StridedCopy]:
    """Copies that fill `target`; one for ranges along any single dimension."""
    there, here, width = runs(target, source)
    steps = np.concatenate([np.diff(one) for one in (there, here)])
    uneven = any(len(set(np.diff(one).tolist())) > 1 for one in (there, here))
    if uneven or (steps < width).any() or (steps > MAX_PITCH).any():
        yield from (
            StridedCopy(*one, width) for one in zip(there[:, None], here[:, None], strict=True)
        )
    else:
        yield StridedCopy(there, here, width)


class CudaDriver:
    """`DeviceDriver` by CUDA's driver, and a stream of torch's. Its errors are `OSError`."""

    def __init__(self, device: torch.device) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        self._device, self._context = device, _primary_context(index)
        self._stream: Any = torch.cuda.Stream(device)

    def export(self, address: int) -> tuple[bytes, int]:
        """Handle of the allocation that holds `address`, and the offset in it."""
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        with self._current():
            _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), _u64(address))
            _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return bytes(handle.reserved), address - base.value

    def open(self, handle: bytes) -> int:
        """Map an allocation of another process; returns its address."""
        address = ctypes.c_uint64()
        with self._current():
            _call(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(address),
                _Handle.from_buffer_copy(handle),
                ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS),
            )
        return address.value

    def close(self, address: int) -> None:
        """Undo `open`."""
        with self._current():
            _call("cuIpcCloseMemHandle", _u64(address))

    def follow(self) -> None:
        """Have the copies wait for what the caller's stream has been told so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, rows: StridedCopy, target: torch.Tensor) -> None:
        """Start to copy rows into `target`, whose memory is not reused before."""
        plan = _Copy2D(
            srcMemoryType=_UNIFIED,
            srcDevice=rows.source,
            srcPitch=rows.source_pitch,
            dstMemoryType=_UNIFIED,
            dstDevice=rows.target,
            dstPitch=rows.target_pitch,
            WidthInBytes=rows.width,
            Height=rows.height,
        )
        stream = ctypes.c_void_p(self._stream.cuda_stream)
        with self._current():
            if rows.height == 1:
                ends = _u64(rows.target), _u64(rows.source)
                _call("cuMemcpyAsync", *ends, ctypes.c_size_t(rows.width), stream)
            else:
                _call("cuMemcpy2DAsync_v2", ctypes.byref(plan), stream)
        target.record_stream(self._stream)

    def mark(self) -> Any:
        """Event after the copies so far."""
        return self._stream.record_event()

    def synchronize(self) -> None:
        """Wait for the copies."""
        self._stream.synchronize()

    def _current(self) -> ExitStack:
        """Make torch's context the one of this thread, until the end of a block."""
        _call("cuCtxPushCurrent_v2", self._context)
        stack = ExitStack()
        stack.callback(_call, "cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        return stack


_LAZY_ENABLE_PEER_ACCESS, _UNIFIED = 1, 4
_u64 = ctypes.c_uint64


class _Handle(ctypes.Structure):
    """`CUipcMemHandle`, passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class _Copy2D(ctypes.Structure):
    """`CUDA_MEMCPY2D_v2`."""

    _fields_ = (
        *(
            (f"{end}{name}", kind)
            for end in ("src", "dst")
            for name, kind in (
                ("XInBytes", ctypes.c_size_t),
                ("Y", ctypes.c_size_t),
                ("MemoryType", ctypes.c_uint),
                ("Host", ctypes.c_void_p),
                ("Device", ctypes.c_uint64),
                ("Array", ctypes.c_void_p),
                ("Pitch", ctypes.c_size_t),
            )
        ),
        ("WidthInBytes", ctypes.c_size_t),
        ("Height", ctypes.c_size_t),
    )


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _primary_context(index: int) -> ctypes.c_void_p:
    """The context in which torch uses a device; kept until the process ends."""
    torch.cuda.init()
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return context


def _call(name: str, *arguments: Any) -> None:
    """Call CUDA's driver. Raises `OSError` with the name of its error."""
    code = getattr(_library(), name)(*arguments)
    if code:
        said = ctypes.c_char_p()
        _library().cuGetErrorName(code, ctypes.byref(said))
        raise OSError(f"{name}: {(said.value or b'?').decode()} ({code})")
