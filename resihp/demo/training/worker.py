"""What one rank's process does in the demo."""

from __future__ import annotations

import json
import logging
import os
import signal
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from resihp.client import Client
from resihp.contracts import Op, Plan, to_json
from resihp.elastic.planning.sources import ServicePlans
from resihp.elastic.rendezvous.membership import Rendezvous
from resihp.elastic.rendezvous.store import Timeouts, connect
from resihp.elastic.state.events import Callbacks, LayoutChange
from resihp.elastic.step import ReducedStep, Setup
from resihp.elastic.step.pacing import Pacer
from resihp.elastic.trainer import Trainer
from resihp.hooks import Monitor

from .settings import DemoSettings
from .trace_log import RecordLog


def run_rank(
    rank: int, host: str, port: int, settings: DemoSettings, url: str, folder: Path
) -> None:
    """Train, report to the sidecar, and write what happened to `folder/events-RANK.jsonl`."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    torch.set_num_threads(1)
    job, timeouts = settings.job(), Timeouts()
    events = EventLog(folder / f"events-{rank}.jsonl")
    # The pace is emulated: a probe would time the machine that all ranks share.
    with Monitor(job=job.name, url=url, rank=rank, probes=False) as monitor:
        fault, log = DeathScript(settings, rank), RecordLog(folder, rank)
        setup = Setup(
            settings.model(),
            settings.optimizer,
            settings.data(),
            fault.recorder(log.recorder(monitor.record, lambda: monitor.plan_version)),
            _pacer(settings, rank),
        )

        def on_layout_change(switch: LayoutChange) -> None:
            monitor.plan_version = switch.plan.version
            events.switch(switch)

        trainer = Trainer(
            setup,
            Plan(version=0, layout=job.layout, quotas=job.quotas),
            Rendezvous(
                lambda: connect(host, port, job.name, timeouts), rank, job.layout.ranks, timeouts
            ),
            ServicePlans(Client(url), job, patience=timedelta(seconds=8)),
            callbacks=Callbacks(on_step=events.step, on_layout_change=on_layout_change),
        )
        trainer.run(settings.steps)
        log.close()


class EventLog:
    """One rank's story as JSON lines, for the process that shows it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def step(self, reduced: ReducedStep, step_ms: float, plan: Plan) -> None:
        """A step was completed."""
        self._write(
            kind="step",
            step=reduced.step,
            loss=reduced.loss,
            step_ms=step_ms,
            plan_version=plan.version,
        )

    def switch(self, switch: LayoutChange) -> None:
        """A plan was taken on."""
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
    """Kills this process with SIGKILL in the middle of a scripted step."""

    def __init__(self, settings: DemoSettings, rank: int) -> None:
        self._step = settings.dead_at if rank == settings.dead_rank else None

    def recorder(self, record: Any) -> Any:
        """`record`, but the process dies at its first backward pass of the scripted step."""
        if self._step is None:
            return record

        def record_or_die(**fields: Any) -> None:
            record(**fields)
            if fields["op"] is Op.BACKWARD and fields["step"] == self._step:
                os.kill(os.getpid(), signal.SIGKILL)

        return record_or_die


def _pacer(settings: DemoSettings, rank: int) -> Pacer | None:
    if settings.flops_per_ms is None:
        return None

    def speed(step: int) -> float:
        slow = rank == settings.slow_rank and step >= settings.slow_at
        return 1.0 / settings.slow_factor if slow else 1.0

    return Pacer(settings.flops_per_ms, speed)


def undisturbed(settings: DemoSettings) -> DemoSettings:
    """The same training on one rank, without faults and without pacing."""
    return replace(settings, dp=1, pp=1, tp=1, slow_rank=None, dead_rank=None, flops_per_ms=None)
