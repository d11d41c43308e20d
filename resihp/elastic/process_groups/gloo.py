"""Gloo communicators of CPU tensors, for any torch; aborted by waiting no longer.

`abort()` of a gloo group does not unblock its ranks, and a stopped (not killed) peer breaks no
connection. Therefore a rank never blocks inside gloo: it waits for asynchronous work in short
slices, and leaves aborted work to itself. It ends when a peer dies or closes its own end, at the
latest at its time-out.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, cast

import torch
import torch.distributed as dist

from .communicators import Communicators, Member, wait_slice


class GlooCommunicators(Communicators):
    """Communicators of gloo. `connect` cannot be interrupted once it has begun."""

    name = "gloo"

    @classmethod
    def refusal(cls, device: torch.device) -> str | None:
        """Reason for which gloo cannot exchange tensors of `device`, or None."""
        return gloo_refusal(device)

    def is_done(self, work: dist.Work) -> bool:
        """Wait one slice; True once `work` has ended. Raises `RuntimeError` if it has failed."""
        return wait_slice(work)

    def _create(self, member: Member, threads: int) -> dist.ProcessGroup:
        options = gloo_options(self._interface, threads)
        options._timeout = self._connect_timeout
        backend = gloo_backend(member, options)
        backend._set_default_timeout(self._timeout)  # type: ignore[attr-defined]
        return backend

    @cached_property
    def _interface(self) -> Any:
        return gloo_interface(self._host)


def gloo_refusal(device: torch.device) -> str | None:
    """Reason for which this torch's gloo cannot exchange tensors of `device`, or None."""
    if not dist.is_gloo_available():
        return "this torch is built without gloo"
    return None if device.type == "cpu" else f"gloo exchanges CPU tensors, not those of {device}"


def gloo_interface(host: str) -> Any:
    """Listen at the address `host`; one thread serves all backends of the interface."""
    return dist.ProcessGroupGloo.create_device(hostname=host)


def gloo_options(interface: Any, threads: int) -> Any:
    """Options of a gloo backend with `threads` for its collectives."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._threads = threads
    options._devices = [interface]
    return options


def gloo_backend(member: Member, options: Any) -> dist.ProcessGroup:
    """Make a gloo backend; it has the methods of a process group, which torch's stubs ignore."""
    backend = dist.ProcessGroupGloo(member.store, member.index, member.size, options)
    return cast(dist.ProcessGroup, backend)
