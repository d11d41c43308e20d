"""Streams of a device beside that of training: few, however often groups are built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from resihp._devices import side_stream
from resihp.elastic.process_groups import nccl
from resihp.elastic.process_groups.communicators import Member, check_nothing
from resihp.elastic.process_groups.nccl import NcclCommunicators
from resihp.elastic.process_groups.staged import DeviceCopies
from resihp.elastic.reshard import device_memory
from resihp.elastic.reshard.device_memory import CudaDriver

DEVICE = torch.device("cuda", 3)
POOL = 32
PATIENCE = timedelta(seconds=60)


class Stream:
    """Notes that it was made."""

    made: list[Stream] = []  # noqa: RUF012 - of the test

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        assert (device, priority) == (DEVICE, -1), "NCCL takes streams of priority 0"
        self.made.append(self)

    def record_event(self) -> Any:
        return SimpleNamespace(query=lambda: True)


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Stream]]:
    side_stream.cache_clear()
    monkeypatch.setattr(Stream, "made", [])
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    yield Stream.made
    side_stream.cache_clear()


def connected() -> NcclCommunicators:
    """Those of a generation, one of which has been connected."""
    work = SimpleNamespace(is_completed=lambda: True, synchronize=lambda: None)
    communicator: Any = SimpleNamespace(
        eager_connect_single_device=lambda device: None, allreduce=lambda tensors: work
    )
    store = dist.HashStore()
    communicators = NcclCommunicators(store, DEVICE, timeout=PATIENCE, connect=PATIENCE)
    communicators._join(communicator, Member("path", store, 0, 2), check_nothing)
    return communicators


def test_no_stream_is_made_for_a_connection(
    streams: list[Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "current_device", nullcontext)
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device: torch.empty(sizes))
    ends = [connected()._ends for _ in range(2 * POOL)]
    assert len(streams) < POOL // 4
    assert all(ends[i] is not ends[i + 1] for i in range(POOL)), "a failed work holds its own only"
    assert len({*map(id, streams)} - {*map(id, ends)}) == 1


def test_no_stream_is_made_for_a_group_or_a_link(
    streams: list[Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "_primary_context", lambda index: index)
    groups = [DeviceCopies(DEVICE) for _ in range(POOL)]
    links = [CudaDriver(DEVICE) for _ in range(POOL)]
    assert len(streams) == 3
    assert groups[0]._out is not groups[0]._into is not links[0]._stream
