"""Loops of Ray Train, and its controller's callback."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from resihp.contracts import Heartbeat, Status

from .conftest import InProcessSidecar, Run

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("default")]


def test_a_slow_rank_of_a_run_is_named(run: Run) -> None:
    training = run("ray_train.py", "--name", "example", "--slow-rank", "2", ranks=None)
    training.assert_named(2)  # of what workers print Ray may show less


def test_a_lost_worker_is_said_at_once_and_its_successor_lives(run: Run) -> None:
    training = run(Path(__file__).with_name("lost_ray_worker.py"), ranks=None)
    verdict = training.named[1]
    assert verdict.status is Status.FAIL_STOP
    assert verdict.evidence[0].startswith("its process ended with ActorDiedError"), verdict
    stopped = {v.rank for v in training.named.values() if v.status is Status.FAIL_STOP}
    assert stopped == {1}
    assert set(training.last) == {0, 1}
    assert all(v.status is not Status.FAIL_STOP for v in training.last.values()), training


class LostWorkerError(Exception):
    """What Ray raises for a worker that does not answer."""

    def __init__(self, failure: Exception) -> None:
        super().__init__("a worker failed its health check")
        self.health_check_failure = failure


class DiedError(Exception):
    """What Ray raises for a process that is gone."""

    def __init__(self, text: str, *, preempted: bool = False) -> None:
        super().__init__(text)
        self.preempted = preempted


@pytest.fixture
def reported(
    sidecar: InProcessSidecar, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[str, Heartbeat]]:
    """Job and heartbeat of each report."""
    reports: list[tuple[str, Heartbeat]] = []

    class Recorder:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def send_heartbeat(self, job: str, heartbeat: Heartbeat) -> None:
            reports.append((job, heartbeat))

        def close(self) -> None:
            pass

    monkeypatch.setattr("resihp.integrations.ray.Client", Recorder)
    return reports


RUN = SimpleNamespace(run_config=SimpleNamespace(name="a/run"))


def test_what_ended_each_worker_is_reported(reported: list[tuple[str, Heartbeat]]) -> None:
    from resihp.integrations.ray import ResiHPCallback

    callback = pickle.loads(pickle.dumps(ResiHPCallback()))  # Ray sends it to the controller
    lost = DiedError("The node was taken.\nSee the log.", preempted=True)
    callback.after_exception(
        RUN,
        {
            0: RuntimeError("Connection closed by peer"),
            1: ValueError("bad batch"),
            2: LostWorkerError(lost),
            3: LostWorkerError(lost),
            4: LostWorkerError(DiedError("The actor died.\nSee the log.")),
        },
    )
    assert [(job, beat.ranks, beat.error) for job, beat in reported] == [
        ("a-run", (0,), ""),
        ("a-run", (1,), "ValueError: bad batch"),
        ("a-run", (2, 3), "the preemption of its node"),
        ("a-run", (4,), "DiedError: The actor died."),
    ]
    assert all(heartbeat.left for _, heartbeat in reported)


def test_the_controller_goes_on_without_a_sidecar(caplog: pytest.LogCaptureFixture) -> None:
    from resihp.integrations.ray import ResiHPCallback

    callback = ResiHPCallback(url="http://127.0.0.1:9")
    for _ in range(2):
        callback.after_exception(RUN, {0: ValueError("bad batch")})
    assert caplog.text.count("reporting lost workers failed") == 1
