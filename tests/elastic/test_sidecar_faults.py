"""The sidecar's process dies or hangs while a plan is announced or taken on; training goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from resihp.client import Client
from resihp.contracts import Job, to_json
from resihp.elastic.planning.sources import ServicePlans
from resihp.elastic.rendezvous.store import Timeouts
from resihp.elastic.state.phases import Phase
from tests.elastic.engine_job import (
    ALONE,
    GRID,
    MICROBATCHES,
    SHAPE,
    SHIFTED,
    Case,
    Fault,
    Outcome,
    plan,
    run,
)

STEPS = 12
PATIENCE = timedelta(seconds=1)
TIMEOUTS = Timeouts(heartbeat=timedelta(seconds=20), poll=timedelta(milliseconds=50), plan=PATIENCE)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The undisturbed single-process run."""
    return run(Case(ALONE, STEPS), tmp_path_factory.mktemp("alone"))


def from_sidecar(folder: Path) -> ServicePlans:
    """Plans of the stand-in."""
    job = Job(name="job", layout=GRID, microbatches=MICROBATCHES, model=SHAPE)
    return ServicePlans(Client((folder / "url").read_text()), job, patience=PATIENCE)


@contextmanager
def sidecar(folder: Path, how: str) -> Iterator[subprocess.Popen[bytes]]:
    """The stand-in, with one plan to offer."""
    offered = folder / "plan.json"
    offered.write_text(json.dumps(to_json(plan(1, SHIFTED, quotas=(4, 2)))))
    arguments = [sys.executable, "-m", "tests.elastic.sidecar", str(folder), str(offered), how]
    process = subprocess.Popen(arguments, cwd=Path(__file__).parents[2])
    try:
        deadline = time.monotonic() + 300
        while not (folder / "url").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        yield process
    finally:
        process.kill()
        process.wait()


def case(*faults: Fault) -> Case:
    """Steps that leave the agent time to ask; a rank dies near the end, so that a plan is due."""
    last = Fault(5, Phase.ACCUMULATING, 9)
    return Case(
        GRID, STEPS, faults=(*faults, last), source=from_sidecar, step_s=0.3, timeouts=TIMEOUTS
    )


def assert_went_on(outcome: Outcome, alone: Outcome) -> None:
    assert {r for r, code in outcome.exit_codes.items() if code != 0} == {5}, outcome.logs
    assert sorted(outcome.losses) == list(range(STEPS)), outcome.logs
    for step, loss in outcome.losses.items():
        assert loss == pytest.approx(alone.losses[step], abs=5e-5), outcome.logs
    assert "planning without the sidecar" in outcome.logs


@pytest.mark.parametrize(
    ("phase", "with_signal"),
    [
        pytest.param(Phase.VOTING, signal.SIGSTOP, marks=pytest.mark.soak),
        pytest.param(Phase.STREAMING, signal.SIGKILL, marks=pytest.mark.soak),
        pytest.param(Phase.STREAMING, signal.SIGSTOP, marks=pytest.mark.soak),
        pytest.param(Phase.VOTING, signal.SIGKILL, marks=pytest.mark.soak),
    ],
)
def test_lost_while_its_plan_is_taken_on(
    phase: Phase, with_signal: int, alone: Outcome, tmp_path: Path
) -> None:
    """Killed, or silent from now on; all ranks switch, and the next loss is planned in-process."""
    faults = (Fault(3, phase, step, with_signal, victim="sidecar") for step in range(9))
    with sidecar(tmp_path, "whole"):
        outcome = run(case(*faults), tmp_path, timeout_s=300)
    assert_went_on(outcome, alone)
    assert {event["version"] for event in outcome.switches if not event["lost"]} == {1}


def test_killed_in_the_middle_of_the_announcement(alone: Outcome, tmp_path: Path) -> None:
    """Half a plan is no plan."""
    with sidecar(tmp_path, "torn") as process:
        outcome = run(case(), tmp_path, timeout_s=300)
        assert process.poll() == -signal.SIGKILL
    assert_went_on(outcome, alone)
    assert all(event["lost"] for event in outcome.switches), "the plan was not taken on"
