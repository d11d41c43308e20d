"""Stand-in for a device whose copies run as late as they may.

The tensors are those of the CPU. A copy to the host is made when the host waits for its event, and
one to the device when a stream is told to wait for it: whoever changes a tensor that is still in
use, or reads one without waiting, gets other values than on a device that happens to be fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from resihp.elastic.process_groups.communicators import CPU
from resihp.elastic.process_groups.gloo import GlooCommunicators
from resihp.elastic.process_groups.staged import DeviceCopies, StagedGlooCommunicators
from resihp.elastic.reshard import shared_memory
from resihp.elastic.reshard.device_memory import HANDLE_BYTES, CudaIpc


class Event:
    """Something that has happened once somebody has waited for it."""

    def __init__(self, happen: Callable[[], object]) -> None:
        self._happen, self.has_happened = happen, False

    def synchronize(self) -> None:
        if not self.has_happened:
            self._happen()
            self.has_happened = True


class LateCopies(DeviceCopies):
    """Copies that are made when somebody waits for them."""

    def __init__(self) -> None:
        """Need no stream."""

    def begin(self) -> Event:
        return Event(lambda: None)

    def empty(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory in which nothing that makes sense was before."""
        is_real = tensor.dtype.is_floating_point
        return torch.full(tensor.shape, math.nan if is_real else 77, dtype=tensor.dtype)

    def to_host(self, tensor: torch.Tensor, host: torch.Tensor, after: Event) -> Event:
        return Event(lambda: host.copy_(tensor))

    def to_device(self, host: torch.Tensor, tensor: torch.Tensor, after: Event) -> Event:
        return Event(lambda: tensor.copy_(host))

    def follow(self, event: Event) -> None:
        event.synchronize()


class LateCommunicators(StagedGlooCommunicators):
    """Staged communicators of that device."""

    @classmethod
    def refusal(cls, device: torch.device) -> str | None:
        return GlooCommunicators.refusal(CPU)

    def _copies(self) -> DeviceCopies:
        return LateCopies()


class LateDriver:
    """Device memory of this process; copies are made at the third look at their event.

    An allocation is a page, mapped at its own address.
    """

    def __init__(self) -> None:
        self.opened: dict[int, int] = {}
        self._due: list[tuple[torch.Tensor, torch.Tensor]] = []

    def export(self, address: int) -> tuple[bytes, int]:
        base = address // _PAGE * _PAGE
        return base.to_bytes(8, "little").ljust(HANDLE_BYTES, b"-"), address - base

    def open(self, handle: bytes) -> int:
        address = int.from_bytes(handle[:8], "little")
        self.opened[address] = self.opened.get(address, 0) + 1
        return address

    def close(self, address: int) -> None:
        assert not self._due, "unmapped under a copy"
        self.opened[address] -= 1

    def follow(self) -> None:
        """The CPU is never behind."""

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        assert any(self.opened.values()), "nothing is mapped"
        self._due.append((source, target))

    def mark(self) -> LateMark:
        return LateMark(self)

    def copy_all(self) -> None:
        """Make the copies that are due."""
        for source, target in self._due:
            target.copy_(source)
        self._due.clear()


_PAGE = 4096


class LateMark:
    """Event after the copies of a `LateDriver`."""

    def __init__(self, driver: LateDriver) -> None:
        self._driver, self._looks = driver, 0

    def query(self) -> bool:
        self._looks += 1
        if self._looks < 3:
            return False
        self._driver.copy_all()
        return True


@contextmanager
def late_device_memory() -> Iterator[list[LateDriver]]:
    """Links of ranks of this process are probed for such memory; each link has a driver."""
    drivers: list[LateDriver] = []

    def make(device: torch.device, slice_bytes: int) -> CudaIpc:
        drivers.append(LateDriver())
        return CudaIpc(device, drivers[-1])

    with mock.patch.object(shared_memory, "memory_of", make):
        yield drivers
