"""Waiting in passes that are timed by events of a stream, with a scripted device."""

from __future__ import annotations

import pytest
import torch

import resihp
from resihp.contracts import Op
from resihp.hooks import CudaClock
from tests.hooks.conftest import Sidecar
from tests.hooks.test_cuda import Stream


class Device(Stream):
    """A device whose current stream has a handle."""

    handle = 7

    @property
    def cuda_stream(self):
        return self.handle


class Work(torch.distributed.Work):
    """A collective that takes `ms` of the device's time."""

    def __init__(self, device: Device, ms: float) -> None:
        super().__init__()
        self._device, self._ms = device, ms


@pytest.fixture
def device() -> Device:
    return Device()


def train(device: Device, monkeypatch, wait_in_stream: int) -> Sidecar:
    """Run one step whose passes take 4 ms and wait for 10 ms in a stream."""

    def wait(work: torch.distributed.Work) -> None:
        device.now_ms += 10

    monkeypatch.setattr(torch.distributed.Work, "wait", wait)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x):
            device.now_ms += 4
            device.handle = wait_in_stream
            Work(device, 10).wait()
            device.handle = 7
            return x * self.weight

    model, sidecar = Model(), Sidecar()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = resihp.instrument(
        model, optimizer, job="j", client=sidecar, rank=0, clock=CudaClock(device)
    )
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    device.done_ms = device.now_ms
    monitor.close(300.0)
    monitor.remove()
    assert monitor.stats.failures == 0
    return sidecar


def test_waiting_of_the_streams_own(device, monkeypatch):
    records = train(device, monkeypatch, 7).records
    assert records.op.tolist() == [int(op) for op in (Op.FORWARD, Op.BACKWARD, Op.OPTIMIZER)]
    assert records.compute_ms.tolist() == [4, 0, 0]
    assert records.wait_ms.tolist() == [10, 0, 0]


def test_waiting_of_other_streams_is_beside_the_pass(device, monkeypatch):
    records = train(device, monkeypatch, 8).records
    assert records.wait_ms.tolist() == [0, 0, 0]
