"""Reading of device memory of another process on the same host, by CUDA IPC.

The source exports the allocation in which a tensor lies (`cuIpcGetMemHandle`), the reader maps it
(`cuIpcOpenMemHandle`) and its device copies: within one device, or from another one over NVLink or
PCIe. Neither the processor nor its memory takes part. The driver refuses where there is no way
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
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from resihp._devices import side_stream, use_device
from resihp._shutdown import torch_lock

from .host_memory import TensorAddress

HANDLE_BYTES = 64
POLL_S = 100e-6


class CudaIpc:
    """Tensors in the memory of a device; copies from all peers are on one side stream.

    Allocations stay mapped until this object is freed, or a moment longer.
    """

    words = HANDLE_BYTES // 8 + 1

    def __init__(self, device: torch.device, driver: CudaDriver | None = None) -> None:
        self.device = device
        self._driver = driver if driver is not None else CudaDriver(device)
        self._opened: dict[bytes, int] = {}
        weakref.finalize(self, _close, device, self._driver, self._opened).atexit = False

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
                self._driver.copy(self._source(target, place), target)
        ended = self._driver.mark()
        while not ended.query():
            yield 0
            time.sleep(POLL_S)
        yield sum(target.nbytes for target in targets)

    def _source(self, like: torch.Tensor, place: Sequence[int]) -> torch.Tensor:
        handle = np.array(place[: self.words - 1], np.int64).tobytes()
        if handle not in self._opened:
            self._opened[handle] = self._driver.open(handle)
        offset, strides = place[self.words - 1], place[self.words :]
        return tensor_at(self._opened[handle] + offset, strides, like)


def _close(device: torch.device, driver: CudaDriver, opened: dict[bytes, int]) -> None:
    """Unmap in a thread: it waits for the copies, and for the driver."""
    if opened:
        threading.Thread(
            target=_unmap,
            args=(device, driver, [*opened.values()]),
            name="resihp-unmap",
            daemon=True,
        ).start()


def _unmap(device: torch.device, driver: CudaDriver, opened: Sequence[int]) -> None:
    use_device(device)
    ended = driver.mark()
    while not ended.query():
        time.sleep(POLL_S)
    for address in opened:
        with torch_lock():
            driver.close(address)


class CudaDriver:
    """Mappings and copies by CUDA's driver, and a stream of torch's. Its errors are `OSError`."""

    def __init__(self, device: torch.device) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        self._device, self._context = device, _primary_context(index)
        self._stream: Any = side_stream(device, "peer memory")

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

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Start to copy; the memory of `target` is not reused before."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        target.record_stream(self._stream)

    def mark(self) -> Any:
        """Event after the copies so far."""
        return self._stream.record_event()

    def _current(self) -> ExitStack:
        """Make torch's context the one of this thread, until the end of a block."""
        _call("cuCtxPushCurrent_v2", self._context)
        stack = ExitStack()
        stack.callback(_call, "cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        return stack


_LAZY_ENABLE_PEER_ACCESS = 1
_u64 = ctypes.c_uint64


class _Handle(ctypes.Structure):
    """`CUipcMemHandle`, passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


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


def tensor_at(address: int, strides: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Tensor on memory that torch has not allocated, with shape, dtype and device of `like`.

    By DLPack, whose device is the one it is told: CUDA tells another one for memory of a peer.

    strides  in bytes, of the tensor's dimensions; more may follow
    """
    size, dims = like.element_size(), like.dim()
    is_cuda = like.device.type == "cuda"
    managed = _ManagedTensor(
        data=address,
        device_type=_DL_CUDA if is_cuda else _DL_CPU,
        device_id=like.device.index or 0,
        ndim=dims,
        code=_DL_INT,
        bits=8 * size,
        lanes=1,
        shape=(ctypes.c_int64 * dims)(*like.shape),
        strides=(ctypes.c_int64 * dims)(*(stride // size for stride in strides[:dims])),
        deleter=_forget,
    )
    _managed[ctypes.addressof(managed)] = managed
    capsule = _new_capsule(ctypes.byref(managed), b"dltensor", None)
    return from_dlpack(capsule).view(like.dtype)


_DL_CPU, _DL_CUDA, _DL_INT = 1, 2, 0
_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class _ManagedTensor(ctypes.Structure):
    """`DLManagedTensor`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
    )


_managed: dict[int, _ManagedTensor] = {}
"""Those of tensors that live, by address."""


def _pop(address: int) -> None:
    _managed.pop(address, None)


_forget = _Deleter(_pop)
