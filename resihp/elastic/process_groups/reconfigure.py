"""Communicators of torch's reconfigure API: gloo on the CPU, "nccl2" on CUDA devices.

The API (torch 2.14) makes a communicator without peers, whose members exchange handles and then
connect with `dist._reconfigure` under a number of their own, within a time-out. A running one could
change its members in place. Here each communicator is connected once, because those of the next
generation are built beside those in use; torch connects anew in either case, unless
`TORCH_NCCL2_RECONFIGURE_SHRINK_GROW=1`. What is gained are waits for peers that can be interrupted
and, on devices, an abort that frees a rank and never ends the process.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, cast

import torch
import torch.distributed as dist

from .communicators import SLICE, Communicators, Member, wait_slice
from .gloo import gloo_backend, gloo_interface, gloo_options, gloo_refusal
from .nccl import current_device, nccl_refusal


class ReconfigurableCommunicators(Communicators):
    """Communicators that torch connects with `dist._reconfigure`."""

    name = "reconfigure"

    @classmethod
    def refusal(cls, device: torch.device) -> str | None:
        """Reason for which this torch has no reconfigurable communicators for `device`, or None."""
        if not hasattr(dist, "_reconfigure"):
            return f"torch {torch.__version__} has no torch.distributed._reconfigure; 2.14 has it"
        if device.type == "cpu":
            return gloo_refusal(device)
        if not hasattr(dist, "ProcessGroupNCCL2"):
            return f"torch {torch.__version__} has no backend nccl2"
        return nccl_refusal(device)

    def is_done(self, work: dist.Work) -> bool:
        """Wait one slice; True once `work` has ended. Raises `RuntimeError` if it has failed."""
        return wait_slice(work) if self.device.type == "cpu" else self._poll_slice(work)

    def _create(self, member: Member, threads: int) -> dist.ProcessGroup:
        """Make a communicator without peers, of one backend: torch configures no other."""
        if self.device.type == "cpu":
            options = self._configurable(gloo_options(self._interface, threads))
            return gloo_backend(member, options)
        distributed: Any = dist
        options = self._configurable(distributed.ProcessGroupNCCL.Options())
        nccl2 = distributed.ProcessGroupNCCL2(member.store, member.index, member.size, options)
        return cast(dist.ProcessGroup, nccl2)

    def _configurable(self, options: Any) -> Any:
        options.enable_reconfigure = True
        options._timeout = self._timeout
        return options

    def _join(
        self, communicator: dist.ProcessGroup, member: Member, check: Callable[[], None]
    ) -> None:
        """Exchange handles, and connect with all of them in the order of the members."""
        distributed: Any = dist
        keys = [f"handle/{index}" for index in range(member.size)]
        member.store.set(keys[member.index], distributed._get_reconfigure_handle(communicator))
        self._await_keys(member.store, keys, check)
        handles = [member.store.get(key).decode() for key in keys]
        with current_device(self.device):
            distributed._reconfigure(
                _number(member.path), handles, communicator, timeout=self._connect_timeout
            ).wait()

    def _await_keys(
        self, store: dist.Store, keys: Sequence[str], check: Callable[[], None]
    ) -> None:
        """Wait in slices until all members have set their keys."""
        end = time.monotonic() + self._connect_timeout.total_seconds()
        while True:
            try:
                store.wait(list(keys), SLICE)
                return
            except dist.DistStoreError:  # the slice is over
                if time.monotonic() > end:
                    raise
            check()
            self._check_aborted()

    def _abort(self, communicators: Sequence[dist.ProcessGroup]) -> None:
        for communicator in communicators:
            communicator.abort()

    def _close(self, communicator: dist.ProcessGroup) -> None:
        """Abort on devices, where destructor and `shutdown` wait for all peers."""
        if self.device.type != "cpu":
            communicator.abort()

    @cached_property
    def _interface(self) -> Any:
        return gloo_interface(self._host)


def _number(path: str) -> int:
    """Return the number of a communicator: fresh, and the same at all members (63 bits)."""
    return int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest()) >> 1
