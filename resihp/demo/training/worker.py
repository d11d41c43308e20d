"""The process of one rank: calibrate the pace, train, report, and fail as scripted."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any, TextIO

import torch

from resihp.client import Client
from resihp.contracts import Op, Plan, to_json
from resihp.elastic import Callbacks, LayoutChange, Pacer, ReducedStep, Setup, train
from resihp.elastic.rendezvous.environment import store_prefix
from resihp.elastic.step.setup import Recorder, record_nothing
from resihp.hooks import Monitor

from ..record import LayoutChangeRecord, StepRecord
from .pacing import CALIBRATION_STEPS, LoadTable, MeasuredPacer
from .settings import DemoSettings
from .trace_log import log_record

RUN = "demo"
STORE = store_prefix(RUN, "0")
"""Prefix of the job's keys in the store."""


def run_rank(
    rank: int, host: str, port: int, settings: DemoSettings, url: str, folder: Path
) -> None:
    """Train, report to the sidecar, and write what happened to `folder/events-RANK.jsonl`."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    pacer: MeasuredPacer | None = None
    if settings.flops_per_ms is not None:
        # All ranks compute side by side as in the run, and find the same pace.
        table = LoadTable.calibration(folder, settings.layout)
        pacer = MeasuredPacer(settings.flops_per_ms, table=table, rank=rank, fixed=True)
        _train(settings, "calibration", (host, port), CALIBRATION_STEPS, pacer=pacer)
        settings = settings.at(table.calibrated(settings.flops_per_ms))
        pacer = _pacer(settings, rank, folder)
    if rank == 0:
        Client(url).register(settings.job())
    since_step = 0
    with (
        # The pace is emulated: a probe would time the machine that all ranks share.
        Monitor(job=settings.job().name, url=url, rank=rank, probes=False) as monitor,
        (folder / f"records-{rank}.jsonl").open("a", buffering=1) as log,
        (folder / f"events-{rank}.jsonl").open("a", buffering=1) as events,
    ):

        def record(**fields: Any) -> None:
            version = monitor.plan_version
            monitor.record(**fields)
            log_record(log, rank, version, fields)
            dies = settings.dies(rank, fields["step"], version, since_step)
            if fields["op"] is Op.BACKWARD and dies:
                os.kill(os.getpid(), signal.SIGKILL)

        def on_layout_change(change: LayoutChange) -> None:
            nonlocal since_step
            monitor.plan_version, since_step = change.plan.version, change.step
            names = ("step", "pause_ms", "received_bytes", "lost", "plan")
            seen = LayoutChangeRecord(**{name: getattr(change, name) for name in names})
            _log_event(events, seen)

        def on_step(reduced: ReducedStep, step_ms: float, plan: Plan) -> None:
            first = settings.flops_per_ms
            pace = pacer.flops_per_ms / first if pacer and first else 1.0
            _log_step(events, reduced, step_ms, plan, pace)
            if rank == 0:
                time.sleep(settings.wait_s(reduced.step, plan.version))

        callbacks = Callbacks(on_step=on_step, on_layout_change=on_layout_change)
        _train(
            settings, RUN, (host, port), settings.steps, record, pacer, callbacks=callbacks, url=url
        )


def run_reference(rank: int, host: str, port: int, settings: DemoSettings, path: Path) -> None:
    """Train undisturbed on one rank: no faults, no pacing; write the steps to `path`."""
    with path.open("a", buffering=1) as events:
        callbacks = Callbacks(on_step=lambda *step: _log_step(events, *step))
        _train(settings.undisturbed(), RUN, (host, port), settings.steps, callbacks=callbacks)


def _train(
    settings: DemoSettings,
    run: str,
    address: tuple[str, int],
    steps: int,
    record: Recorder = record_nothing,
    pacer: Pacer | None = None,
    *,
    callbacks: Callbacks | None = None,
    url: str | None = None,
) -> None:
    """Train as under a launcher that hosts the store at `address`; the plans come from `url`."""
    torch.set_num_threads(1)
    os.environ.pop("RESIHP_URL", None)  # of another sidecar
    os.environ.update(
        WORLD_SIZE=str(len(settings.layout.ranks)),
        MASTER_ADDR=address[0],
        MASTER_PORT=str(address[1]),
        TORCHELASTIC_USE_AGENT_STORE="1",
        TORCHELASTIC_RUN_ID=run,
    )
    setup = Setup(settings.model(), settings.optimizer, settings.data(), record, pacer)
    train(setup, settings.job(), steps, url=url, callbacks=callbacks)


def _log_step(
    file: TextIO, reduced: ReducedStep, step_ms: float, plan: Plan, pace: float = 1.0
) -> None:
    seen = StepRecord(
        step=reduced.step, loss=reduced.loss, step_ms=step_ms, plan_version=plan.version, pace=pace
    )
    _log_event(file, seen)


def _log_event(file: TextIO, seen: StepRecord | LayoutChangeRecord) -> None:
    file.write(json.dumps(to_json(seen)) + "\n")


def _pacer(settings: DemoSettings, rank: int, folder: Path) -> MeasuredPacer:
    """Pacer of a rank in the run, slow as scripted."""
    assert settings.flops_per_ms is not None

    def speed(step: int) -> float:
        slow = rank == settings.slow_rank and step >= settings.slow_at
        return 1.0 / settings.slow_factor if slow else 1.0

    table = LoadTable.training(folder, settings.layout, settings.steps)
    return MeasuredPacer(
        settings.flops_per_ms, speed, table=table, rank=rank, scatter=settings.scatter
    )
