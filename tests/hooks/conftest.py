"""Doubles for what surrounds a monitor: a sidecar that fails by script, and a clock set by hand."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from resihp.contracts import Heartbeat, Job, ServiceError, TelemetryBatch
from resihp.contracts.codec import decode
from resihp.hooks import HostClock, Monitor


class Sidecar:
    """Takes telemetry; fails as often, and as badly, as `script` says (a status, or an error)."""

    def __init__(self) -> None:
        self.script: list[int | Exception | None] = []
        self.jobs: list[Job] = []
        self.batches: list[TelemetryBatch] = []
        self.heartbeats: list[Heartbeat] = []
        self.heard_s: list[float] = []
        self.asks_for_stacks = False
        self.keys: list[str] = []
        self.open = threading.Event()
        self.open.set()

    def register(self, job):
        self.jobs.append(job)

    def send_telemetry(self, job, message, form, key=None):
        self.keys.append(key)
        assert self.open.wait(300)
        script = self.script  # which the test may replace meanwhile
        if script:
            fault = script.pop(0)
            if isinstance(fault, Exception):
                raise fault
            raise ServiceError("scripted", status=fault)
        self.batches.append(decode(message, form))

    def send_heartbeat(self, job, heartbeat):
        self.heard_s.append(time.monotonic())
        self.heartbeats.append(heartbeat)
        return {"accepted": 1, "stack": True} if self.asks_for_stacks else {"accepted": 1}

    @property
    def records(self) -> TelemetryBatch:
        """All records that were taken, of one plan version."""
        return TelemetryBatch.concat(self.batches)


class Hands:
    """A clock in milliseconds that moves only when told."""

    def __init__(self) -> None:
        self.ns = 10**12

    def pass_ms(self, ms: float) -> None:
        self.ns += round(ms * 1e6)

    @property
    def clock(self) -> HostClock:
        return HostClock(lambda: self.ns)


def until(condition, timeout_s: float = 300.0) -> None:
    """Wait for `condition`, for a bounded time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch) -> None:
    """A monitor that is closed without a time-out has time to send, however busy this machine is:
    what is asserted of it is what it sends, not how fast."""
    monkeypatch.setattr("resihp.hooks.monitor._CLOSE_TIMEOUT_S", 300.0)
    monkeypatch.setattr(Monitor.close, "__defaults__", (300.0,))


@pytest.fixture
def sidecar() -> Sidecar:
    return Sidecar()


@pytest.fixture
def hands() -> Hands:
    return Hands()


@pytest.fixture
def wait_until():
    return until


@pytest.fixture
def make_monitor(sidecar, hands) -> Iterator:
    """Monitors on the doubles, closed at the end."""
    made = []

    def make(**options) -> Monitor:
        given = {"job": "j", "rank": 3, "client": sidecar, "interval_s": 0.01, **options}
        given.setdefault("clock", hands.clock)
        made.append(Monitor(**given))
        return made[-1]

    yield make
    sidecar.open.set()
    for monitor in made:
        monitor.close(2.0)


@pytest.fixture
def monitor(make_monitor) -> Monitor:
    return make_monitor()
