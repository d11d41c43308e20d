"""NCCL communicators, aborted together and built anew, for torch 2.11 to 2.13.

The tests hold the order of the calls against a stand-in; `benchmarks.gpu` runs them on a device.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import ceil
from typing import Any, cast

import torch
import torch.distributed as dist

from resihp._devices import side_stream

from .communicators import Communicators, Member, at_once

_REFUSED: dict[tuple[int, ...], str] = {
    (2, 25, 1): "hangs in abort; 2.26.2 does not",
    **{(2, 28, patch): "crashes in abort" for patch in range(3, 9)},
}
"""Versions of NCCL that cannot abort a communicator."""
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_MONITORING = "TORCH_NCCL_ENABLE_MONITORING"
_DUMP_WAIT = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"
_NONBLOCKING_TIMEOUT = "TORCH_NCCL_NONBLOCKING_TIMEOUT"


class NcclCommunicators(Communicators):
    """Communicators of `ProcessGroupNCCL`.

    A loss aborts all of them at the same time, each in a thread: an abort frees memory, which waits
    for the kernels of those that are not aborted yet. (A group of NCCL calls does not reach torch's
    abort, which runs in a thread of its own.) No communicator is shrunk (`shrink_group` with an
    abort hangs on NCCL 2.31), and none is destroyed: a destructor waits for all peers.
    Communicators are built without blocking, so that one whose peer dies meanwhile can be aborted;
    torch waits for them for the time-out of the first build (`TORCH_NCCL_NONBLOCKING_TIMEOUT`).
    torch's watchdog would end the process when a peer is lost; it is switched off
    (`TORCH_NCCL_ASYNC_ERROR_HANDLING=0`), as is the monitor of the watchdog, in this process. The
    watchdog of a communicator that has failed also sleeps for a minute, to have other ranks dump
    their records, and its destructor waits for that: not here
    (`TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC=0`). All these variables are set where they are unset.
    """

    name = "nccl"

    @classmethod
    def refusal(cls, device: torch.device) -> str | None:
        """Reason for which this torch cannot exchange tensors of `device` by NCCL, or None."""
        return nccl_refusal(device) or environment_refusal(os.environ)

    def is_done(self, work: dist.Work) -> bool:
        """Wait one slice; True once `work` has ended. Raises `RuntimeError` if it has failed."""
        return self._poll_slice(work)

    def _create(self, member: Member, threads: int) -> dist.ProcessGroup:
        """Make a communicator; `_join` connects it. NCCL has no threads for collectives."""
        for name in (_ERROR_HANDLING, _MONITORING, _DUMP_WAIT):
            os.environ.setdefault(name, "0")
        connect_s = ceil(self._connect_timeout.total_seconds())
        os.environ.setdefault(_NONBLOCKING_TIMEOUT, str(connect_s))
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = self._timeout
        options.config.blocking = 0
        return cast(dist.ProcessGroup, nccl(member.store, member.index, member.size, options))

    def _join(
        self, communicator: dist.ProcessGroup, member: Member, check: Callable[[], None]
    ) -> None:
        """Connect and sum once, on a side stream, beside the work of other communicators."""
        end = time.monotonic() + self._connect_timeout.total_seconds()
        with current_device(self.device), _connecting_stream(self.device):
            communicator.eager_connect_single_device(self.device)  # type: ignore[attr-defined]
            work = communicator.allreduce([torch.zeros(1, device=self.device)])
            while not self.is_done(work):
                check()
                self._check_aborted()
                if time.monotonic() > end:
                    raise RuntimeError(f"not all of {member.size} members have connected")

    def _abort(self, communicators: Sequence[dist.ProcessGroup]) -> None:
        at_once([communicator.abort for communicator in communicators], self.device)

    def _close(self, communicator: dist.ProcessGroup) -> None:
        self._abort([communicator])


def nccl_refusal(device: torch.device) -> str | None:
    """Reason for which this torch's NCCL cannot serve `device`, or None."""
    if device.type != "cuda":
        return f"NCCL exchanges tensors of CUDA devices, not those of {device}"
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return "there is no CUDA device, or this torch is built without NCCL"
    return version_refusal(cast(tuple[int, ...], torch.cuda.nccl.version()))


def version_refusal(version: tuple[int, ...]) -> str | None:
    """Reason for which a version of NCCL cannot abort a communicator, or None.

    >>> version_refusal((2, 28, 5))
    'NCCL 2.28.5 crashes in abort'
    >>> version_refusal((2, 27, 7))
    """
    why = _REFUSED.get(version[:3])
    return f"NCCL {'.'.join(map(str, version[:3]))} {why}" if why else None


def environment_refusal(environment: Mapping[str, str]) -> str | None:
    """Reason for which torch would end this process at a loss, or None.

    >>> environment_refusal({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"})
    'TORCH_NCCL_ASYNC_ERROR_HANDLING is 3: torch would end the process at a loss; unset it'
    """
    value = environment.get(_ERROR_HANDLING, "0")
    if value == "0":
        return None
    return f"{_ERROR_HANDLING} is {value}: torch would end the process at a loss; unset it"


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the current one of this thread; nothing to do for the CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _connecting_stream(device: torch.device) -> AbstractContextManager[object]:
    """Enqueue on the stream of connections, which never waits for a peer; nothing for the CPU."""
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(side_stream(device, "connect"))
