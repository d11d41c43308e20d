"""Every schedule and kind of action through one session, with the real detector and planner."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, product
from typing import Any

import numpy as np
import pytest

from resihp.contracts import Action, ContractError, Job, Layout, Plan, Schedule, Status
from resihp.contracts.codec import encode
from resihp.testing.scenarios import Fault, steps_of
from service.settings import Settings
from service.store.documents import JobMessage, MessageKind
from service.worker.adapters import Adapters, InlineExecutor, load_adapters
from service.worker.planning import Planner
from service.worker.session import JobSession

LENGTHS = np.full(100, 512)
SLOW, SLOW_AT, STEPS = 3, 6, 16


def jobs() -> Iterator[Job]:
    for schedule, chunks, actions in product(
        Schedule, (1, 2), ([Action.NOTIFY], [Action.QUOTAS], [Action.RESTART], [Action.LAYOUT])
    ):
        layout = Layout.grid(dp=2, pp=2, tp=1, layers=8, units=8, chunks=chunks)
        name = f"{schedule}-{chunks}-{actions[0]}"
        try:
            yield Job(
                name=name,
                layout=layout,
                microbatches=8,
                schedule=schedule,
                chunks=chunks,
                actions=tuple(actions),
            )
        except ContractError:  # several chunks under a schedule for one
            continue


class Session:
    """A session that is told of a job in which one rank turns slow."""

    def __init__(self, job: Job) -> None:
        self.job, self.first = (
            job,
            Plan(version=0, layout=job.layout, quotas=job.quotas, schedule=job.schedule),
        )
        self.adapters: Adapters = replace(
            load_adapters(Settings()), executor=lambda _: InlineExecutor()
        )
        self.session = self.new()
        self.errors: list[dict[str, Any]] = []
        self._ids = (f"{at}-0" for at in count(1_000, 100))

    def new(self) -> JobSession:
        return JobSession(
            self.job, self.first, self.adapters, Planner(self.adapters, time_limit_s=60.0)
        )

    def send(self, kind: MessageKind, body: bytes) -> None:
        self.session.apply(JobMessage(next(self._ids), kind, body))
        self.session.take_plan()
        self.errors += [told for kind, told in self.session.changes.events if kind == "error"]

    def train(self, plan: Plan, from_step: int, *faults: Fault) -> None:
        layout = plan.layout
        job = replace(
            self.job,
            layout=layout,
            quotas=plan.quotas,
            schedule=plan.schedule,
            chunks=layout.replicas[0].chunks,
        )
        for batch in steps_of(job, LENGTHS, steps=STEPS, seed=1, faults=list(faults)):
            moved = replace(batch, step=batch.step + from_step, plan_version=plan.version)
            self.send(MessageKind.TELEMETRY, encode(moved))
            self.session.tick(0.1, 0.0)


@pytest.mark.parametrize("job", list(jobs()), ids=lambda job: job.name)
def test_a_job_is_followed_from_a_slow_rank_to_a_loss(job: Job) -> None:
    told = Session(job)
    told.train(told.first, 0, Fault(rank=SLOW, factor=1.6, from_step=SLOW_AT))
    session = told.session
    named = [
        verdict.rank
        for verdict in session._detector.verdicts()
        if verdict.status is Status.FAIL_SLOW
    ]
    assert named == [SLOW]
    diagnosis = session.diagnosis()
    assert diagnosis is not None
    assert diagnosis["root_cause"] == "device"

    resumed = told.new()
    resumed.resume(session.save())
    assert resumed.status() == session.status()

    plan = session.planning.newest
    assert (plan.version > 0) >= (Action.LAYOUT in job.actions)
    for rank in plan.layout.ranks if plan.version else ():
        answer = {"rank": rank, "version": plan.version, "state": "applied", "step": STEPS}
        more = {"detail": "", "pause_ms": 1.0, "digest": plan.digest}
        told.send(MessageKind.ACK, json.dumps({**answer, **more}).encode())
    told.train(plan, STEPS)
    assert session.diagnosis() is not None
    lost = {"ranks": [0], "step": 2 * STEPS, "detail": "", "plan_version": plan.version}
    told.send(MessageKind.FAILURE, json.dumps(lost).encode())
    assert session._detector.verdicts()[0].status is Status.FAIL_STOP
    assert not told.errors
