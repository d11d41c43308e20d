"""A job and a real sidecar, whatever becomes of either: both know where the job stands."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import urllib3

from resihp.client import Client
from resihp.contracts import Job, Plan
from resihp.elastic.planning.sources import ServicePlans
from resihp.elastic.rendezvous.store import Timeouts
from resihp.testing.local_ranks import LocalRanks
from service import Sidecar
from tests.elastic.engine_job import ALONE, GRID, MICROBATCHES, SHAPE, Case, run, run_rank
from tests.elastic.records import events, switches
from tests.service.forked_sidecar import ForkedSidecar

JOB = Job(name="job", layout=GRID, microbatches=MICROBATCHES, model=SHAPE)
PATIENCE = timedelta(seconds=10)
TIMEOUTS = Timeouts(heartbeat=timedelta(seconds=20), poll=timedelta(milliseconds=50), plan=PATIENCE)


def from_sidecar(folder: Path) -> ServicePlans:
    """Plans of the sidecar whose address stands in the folder."""
    patience = timedelta(seconds=float((folder / "patience").read_text()))
    return ServicePlans(Client((folder / "url").read_text()), JOB, patience=patience)


def children(pid: int | None) -> list[int]:
    """Processes of a sidecar: Redis, worker and API."""
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(child) for child in listed.split()]


class Running:
    """A job that trains until the end of the test, and its sidecar."""

    def __init__(self, ranks: LocalRanks, sidecar: Sidecar, folder: Path) -> None:
        self.ranks, self.sidecar, self.folder = ranks, sidecar, folder
        self.case = Case(GRID, 1_000_000, source=from_sidecar, timeouts=TIMEOUTS, step_s=0.5)
        self.client = Client(sidecar.url, timeout=60.0)

    def start(self, *ranks: int, joining: bool = False) -> None:
        """Start ranks of the layout, or such as join."""
        case = replace(self.case, joiners=ranks) if joining else self.case
        self.ranks.start(ranks, run_rank, case, self.folder)

    def until(self, check: Callable[[], Any]) -> Any:
        """The first true value of `check`."""
        deadline = time.monotonic() + 300
        while not (value := check()):
            self.ranks.poll(0.05)
            assert time.monotonic() < deadline, self.ranks.logs() + self.sidecar.tail()
        return value

    def step(self) -> int:
        """The newest step of rank 0."""
        return max((e["step"] for e in events(self.folder, 0) if "loss" in e), default=-1)

    def train_on(self) -> None:
        """Until three more steps are made."""
        goal = self.step() + 3
        self.until(lambda: self.step() >= goal)

    def switched(self, number: int, rank: int = 0) -> dict[str, Any]:
        """A rank's change of layout number `number`, once it has come."""
        self.until(lambda: len(switches(self.folder, rank)) >= number)
        return switches(self.folder, rank)[number - 1]

    def said(self) -> dict[str, Any]:
        """What the sidecar says of the job."""
        answer = urllib3.request(
            "GET", f"{self.sidecar.url}/v1/jobs/job", retries=False, timeout=60.0
        )
        document: dict[str, Any] = answer.json()
        return document

    def agree(self) -> Plan:
        """The plan of job and sidecar, once they have the same."""

        def same() -> Plan | None:
            rollout, plan = self.said()["rollout"] or {}, self.client.plan("job")
            held = switches(self.folder, 0)[-1]["digest"]
            is_same = plan and rollout.get("active") == plan.version and plan.digest == held
            return plan if is_same else None

        plan: Plan = self.until(same)
        return plan


@contextmanager
def running(folder: Path, *, patience_s: float = 30.0) -> Iterator[Running]:
    """Eight ranks and a sidecar that knows them; at the end, that nothing changed the training."""
    with ForkedSidecar(folder / "data") as sidecar, LocalRanks("test", folder) as ranks:
        (folder / "url").write_text(sidecar.url)
        (folder / "patience").write_text(str(patience_s))
        job = Running(ranks, sidecar, folder)
        job.client.register(JOB)
        job.start(*GRID.ranks)
        job.train_on()
        yield job
    losses = {e["step"]: e["loss"] for e in events(folder, 0) if "loss" in e}
    alone = run(Case(ALONE, max(losses) + 1), folder / "alone", timeout_s=300)
    for step, loss in losses.items():
        assert loss == pytest.approx(alone.losses[step], abs=2e-4), step


def test_a_standby_comes_in_by_the_plan_of_the_sidecar(tmp_path: Path) -> None:
    """It waits from the beginning, is of no use, and gets the place of a rank that dies."""
    with running(tmp_path) as job:
        job.start(8, joining=True)
        job.until(lambda: job.said()["planning"]["state"] != "idle")
        job.ranks.kill(5)
        assert job.switched(1)["lost"] == [5]
        assert job.switched(1, rank=8)
        job.train_on()
        assert 8 in job.agree().layout.ranks
        assert "without the sidecar" not in job.ranks.logs()


def test_killed_and_started_again_it_learns_what_it_has_missed(tmp_path: Path) -> None:
    with running(tmp_path) as job:
        job.sidecar.kill()
        job.ranks.kill(5)
        assert job.switched(1)["lost"] == [5]
        assert "planning without the sidecar" in job.ranks.logs()
        job.sidecar.start()
        assert 5 not in job.agree().layout.ranks
        dead = {v.rank: v.status.value for v in job.client.verdicts("job")}
        assert dead[5] == "fail_stop"
        job.start(5, joining=True)
        assert job.switched(2)
        job.train_on()
        assert 5 in job.agree().layout.ranks


@pytest.mark.soak
def test_too_slow_it_gives_up_the_plan_that_it_made_too_late(tmp_path: Path) -> None:
    """Two plans have the version 1; the one by which the job works holds."""
    with running(tmp_path, patience_s=1.0) as job:
        pids = children(job.sidecar.pid)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        job.ranks.kill(5)
        job.switched(1)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        plan = job.agree()
        assert plan.version == 1
        assert "made by the job itself" in plan.reason[-1]
