"""Stand-in for a device whose copies run as late as they may.

The tensors are those of the CPU. A copy to the host is made when the host waits for its event, and
one to the device when a stream is told to wait for it: whoever changes a tensor that is still in
use, or reads one without waiting, gets other values than on a device that happens to be fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from resihp.elastic.process_groups.communicators import CPU
from resihp.elastic.process_groups.gloo import GlooCommunicators
from resihp.elastic.process_groups.staged import DeviceCopies, StagedGlooCommunicators


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
