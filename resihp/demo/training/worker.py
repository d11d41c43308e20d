"""The process of one rank: calibrate the pace, train, report, and fail as scripted."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from resihp.client import Client
from resihp.contracts import Op, Plan, to_json
from resihp.elastic.planning.sources import NoPlans, ServicePlans
from resihp.elastic.rendezvous.membership import Rendezvous
from resihp.elastic.rendezvous.store import Timeouts, connect
from resihp.elastic.state.events import Callbacks, LayoutChange
from resihp.elastic.step import ReducedStep, Setup
from resihp.elastic.step.pacing import Pacer
from resihp.elastic.step.setup import Recorder
from resihp.elastic.trainer import Trainer
from resihp.hooks import Monitor

from .pacing import CALIBRATION_STEPS, LoadTable, MeasuredPacer
from .settings import DemoSettings
from .trace_log import RecordLog


def run_rank(
    rank: int, host: str, port: int, settings: DemoSettings, url: str, folder: Path
) -> None:
    """Train, report to the sidecar, and write what happened to `folder/events-RANK.jsonl`."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    torch.set_num_threads(1)
    timeouts = Timeouts()

    def rendezvous(job: str) -> Rendezvous:
        ranks = settings.layout.ranks
        return Rendezvous(lambda: connect(host, port, job, timeouts), rank, ranks, timeouts)

    settings = _calibrated(rank, rendezvous("calibration"), settings, folder)
    job = settings.job()
    if rank == 0:
        Client(url).register(job)
    events = EventLog(folder / f"events-{rank}.jsonl", settings.flops_per_ms)
    # The pace is emulated: a probe would time the machine that all ranks share.
    with Monitor(job=job.name, url=url, rank=rank, probes=False) as monitor:
        death, log = DeathScript(settings, rank), RecordLog(folder, rank)
        pacer = _pacer(settings, rank, folder)
        setup = Setup(
            settings.model(),
            settings.optimizer,
            settings.data(),
            death.recorder(log.recorder(monitor.record, lambda: monitor.plan_version)),
            pacer,
        )

        def on_layout_change(switch: LayoutChange) -> None:
            monitor.plan_version = switch.plan.version
            death.plan_version, death.since_step = switch.plan.version, switch.step
            events.switch(switch)

        def on_step(reduced: ReducedStep, step_ms: float, plan: Plan) -> None:
            events.step(reduced, step_ms, plan, pacer.flops_per_ms if pacer else None)
            if rank == 0:
                time.sleep(settings.wait_s(reduced.step, plan.version))

        trainer = Trainer(
            setup,
            Plan(version=0, layout=job.layout, quotas=job.quotas),
            rendezvous(job.name),
            ServicePlans(Client(url), job, patience=timedelta(seconds=8)),
            callbacks=Callbacks(on_step=on_step, on_layout_change=on_layout_change),
        )
        trainer.run(settings.steps)
        log.close()


def _calibrated(
    rank: int, rendezvous: Rendezvous, settings: DemoSettings, folder: Path
) -> DemoSettings:
    """The settings with a pace that this machine can hold, measured on some steps of the job.

    Called on all ranks, which compute side by side as in the run and find the same pace.
    """
    if settings.flops_per_ms is None:
        return settings
    job = settings.job()
    table = LoadTable.calibration(folder, job.layout)
    Trainer(
        Setup(
            settings.model(),
            settings.optimizer,
            settings.data(),
            pacer=MeasuredPacer(settings.flops_per_ms, table=table, rank=rank, fixed=True),
        ),
        Plan(version=0, layout=job.layout, quotas=job.quotas),
        rendezvous,
        NoPlans(),
    ).run(CALIBRATION_STEPS)
    return settings.at(table.calibrated(settings.flops_per_ms))


class EventLog:
    """The events of one rank as JSON lines, for the process that displays them.

    pace  of the devices at the start, in FLOP per ms; None where they are not paced
    """

    def __init__(self, path: Path, pace: float | None = None) -> None:
        self._file = path.open("a", buffering=1)
        self._pace = pace

    def step(
        self, reduced: ReducedStep, step_ms: float, plan: Plan, pace: float | None = None
    ) -> None:
        """Log a completed step, which ran at `pace`."""
        self._write(
            kind="step",
            step=reduced.step,
            loss=reduced.loss,
            step_ms=step_ms,
            plan_version=plan.version,
            pace=pace / self._pace if pace and self._pace else 1.0,
        )

    def switch(self, switch: LayoutChange) -> None:
        """Log a change of layout."""
        self._write(
            kind="switch",
            step=switch.step,
            pause_ms=switch.pause_ms,
            received_bytes=switch.received_bytes,
            lost=switch.lost,
            plan=to_json(switch.plan),
        )

    def _write(self, **event: Any) -> None:
        self._file.write(json.dumps(event) + "\n")


class DeathScript:
    """Kills this process with SIGKILL in the middle of the step that the settings say.

    plan_version, since_step  of the plan in effect
    """

    def __init__(self, settings: DemoSettings, rank: int) -> None:
        self._settings, self._rank = settings, rank
        self.plan_version = self.since_step = 0

    def recorder(self, record: Recorder) -> Recorder:
        """`record`, but the process dies at its first backward pass of the scripted step."""
        if self._rank != self._settings.dead_rank:
            return record

        def record_or_die(**fields: Any) -> None:
            record(**fields)
            now = self._settings.dies(
                self._rank, fields["step"], self.plan_version, self.since_step
            )
            if fields["op"] is Op.BACKWARD and now:
                os.kill(os.getpid(), signal.SIGKILL)

        return record_or_die


def _pacer(settings: DemoSettings, rank: int, folder: Path) -> Pacer | None:
    if settings.flops_per_ms is None:
        return None

    def speed(step: int) -> float:
        slow = rank == settings.slow_rank and step >= settings.slow_at
        return 1.0 / settings.slow_factor if slow else 1.0

    table = LoadTable.training(folder, settings.layout, settings.steps)
    return MeasuredPacer(settings.flops_per_ms, speed, table=table, rank=rank)


def undisturbed(settings: DemoSettings) -> DemoSettings:
    """The same training on one rank, without faults and without pacing."""
    return replace(settings, dp=1, pp=1, tp=1, slow_rank=None, dead_rank=None, flops_per_ms=None)
