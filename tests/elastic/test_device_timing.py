"""A rank's time is its own until its device has computed, and waiting from then on."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from resihp.contracts import Layout, Op, Plan, Schedule
from resihp.elastic.models import Llama
from resihp.elastic.optim import Optimizer
from resihp.elastic.process_groups import abortable
from resihp.elastic.process_groups.abortable import (
    AbortableProcessGroup,
    ProcessGroupFactory,
    WaitClock,
)
from resihp.elastic.step import Setup, telemetry
from resihp.elastic.step.pacing import Pacer
from resihp.elastic.step.telemetry import PassRecorder
from tests.elastic.engine_job import SHAPE, batch
from tests.elastic.threads import train

OWN_S, PEERS_S, TAIL_S = 5.0, 2.0, 3.0
DEVICE = torch.device("cuda", 1)


class Clock:
    """A device and its peers, for which the host's clock moves on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        time = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(abortable, "time", time)
        monkeypatch.setattr(telemetry, "time", time)
        kernels = SimpleNamespace(synchronize=lambda: self.passes(OWN_S))
        monkeypatch.setattr(abortable, "record_own_work", lambda device: kernels)
        monkeypatch.setattr(telemetry, "finish_own_work", lambda device: self.passes(TAIL_S))

    def passes(self, seconds: float) -> bool:
        self.now += seconds
        return True


def group_of(clock: Clock, waited: WaitClock) -> AbortableProcessGroup:
    """A group of two ranks, whose peer always comes late."""
    communicators = SimpleNamespace(is_done=lambda work: clock.passes(PEERS_S))
    maker: Any = partial(lambda made, *_, **__: made, communicators)
    factory = ProcessGroupFactory(
        dist.HashStore(),
        0,
        broken=lambda ranks, seconds: None,
        timeout=timedelta(seconds=60),
        waited=waited,
        device=DEVICE,
        maker=maker,
    )
    backend: Any = SimpleNamespace(
        allreduce=lambda tensors: SimpleNamespace(is_completed=lambda: False)
    )
    return AbortableProcessGroup(factory, (0, 1), backend)


def test_kernels_before_a_collective_and_after_it_are_own_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, waited, records = Clock(monkeypatch), WaitClock(), []
    group = group_of(clock, waited)
    recorder = PassRecorder(lambda **record: records.append(record), waited, DEVICE)
    timing = recorder.start()
    group.all_reduce(torch.zeros(1))
    recorder.record(Op.COLLECTIVE, 0, timing)
    (record,) = records
    assert record["compute_ms"] == 1e3 * (OWN_S + TAIL_S)
    assert record["wait_ms"] == 1e3 * PEERS_S


def test_a_work_that_is_waited_for_later_has_the_kernels_before_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, waited = Clock(monkeypatch), WaitClock()
    group = group_of(clock, waited)
    started = [group.start_all_reduce(torch.zeros(1)) for _ in range(2)]
    assert clock.now == 0.0, "starting waits for nothing"
    for work in started:
        group.wait(work)
    assert waited.seconds == 2 * PEERS_S
    assert clock.now == 2 * (OWN_S + PEERS_S)


@pytest.mark.parametrize(
    ("schedule", "parts"), [(Schedule.ONE_F_ONE_B, 1), (Schedule.ZERO_BUBBLE, 2)]
)
def test_a_pass_takes_what_the_clock_of_an_emulated_device_says(
    schedule: Schedule, parts: int
) -> None:
    class Device(Pacer):
        """Takes five seconds by its clock, and no time by that of the machine."""

        def hold(self, flops: float, step: int, spent_s: float) -> float:
            return OWN_S

    records: list[dict[str, Any]] = []
    setup = Setup(
        Llama(SHAPE),
        Optimizer(torch.optim.SGD, lr=0.1),
        batch,
        lambda **record: records.append(record),
        Device(1.0),
    )
    layout = Layout.grid(dp=1, pp=2, tp=1, layers=SHAPE.layers)
    train(setup, Plan(version=0, layout=layout, quotas=(2,), schedule=schedule), 1)
    for op, passes in ((Op.FORWARD, 1), (Op.BACKWARD, parts)):
        spent = [record["compute_ms"] for record in records if record["op"] is op]
        assert spent == [1e3 * OWN_S * passes] * 4
