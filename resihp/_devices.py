"""CUDA devices: the one that a rank uses, in all of its threads."""

from __future__ import annotations

import functools
from typing import Any

import torch

from resihp._stream_captures import ignore_captures
from resihp.contracts import ContractError


def with_index(device: torch.device) -> torch.device:
    """Return the current CUDA device for one without index, any other device as it is.

    Threads of a process start with device 0 as the current one. Raises `ContractError` where there
    is no CUDA device.
    """
    if device != torch.device("cuda"):
        return device
    if not torch.cuda.is_available():
        raise ContractError("device", "is 'cuda', and this process has no CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


def use_device(device: torch.device) -> None:
    """Make a CUDA device the current one of this background thread, for good, and let it use the
    device while training captures a graph.

    Without it the first use of a stream or an event would create a context on device 0, which takes
    about 0.5 GiB there for each other rank of the node.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        ignore_captures()


@functools.cache
def side_stream(device: torch.device, purpose: str) -> Any:
    """Return the stream of a CUDA device for a purpose; one is made and kept by the process.

    torch has 32 streams for each device and priority and hands them out in turn; NCCL's
    communicators take theirs from those of normal priority. A stream for each use would soon be
    that of training's collectives as well. These are few and of high priority, so that work of a
    purpose waits for earlier work of the same purpose alone. Work that may wait for a peer needs a
    purpose of its own.
    """
    return torch.cuda.Stream(device, priority=-1)


def record_awaited(stream: Any) -> Any:
    """Record an event for which the host will wait asleep; on torch's default ones it spins."""
    return stream.record_event(torch.cuda.Event(blocking=True))


def record_own_work(device: torch.device) -> Any:
    """Record an event that comes once a CUDA device has done what this thread has given it so far.

    None for other devices, which are done when a call returns.
    """
    if device.type != "cuda":
        return None
    return torch.cuda.current_stream(device).record_event()


def finish_own_work(device: torch.device) -> None:
    """Wait until a CUDA device has done what this thread has given it so far."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
