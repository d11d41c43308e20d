"""The same training undisturbed: one rank, no faults, no pacing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from resihp.contracts import Plan
from resihp.elastic.planning.sources import NoPlans
from resihp.elastic.rendezvous.membership import Rendezvous
from resihp.elastic.rendezvous.store import Timeouts, connect
from resihp.elastic.state.events import Callbacks
from resihp.elastic.step import Setup
from resihp.elastic.trainer import Trainer
from resihp.testing.local_ranks import LocalRanks

from .settings import DemoSettings
from .worker import EventLog, undisturbed

_LIMIT_S = 600.0


def run_reference(
    settings: DemoSettings, folder: Path, progress: Callable[[int, int], None]
) -> tuple[float, ...]:
    """Loss of each step of the undisturbed run."""
    path = folder / "reference.jsonl"
    losses: list[float] = []
    with LocalRanks("reference", folder / "logs" / "reference") as ranks:
        ranks.start([0], run_alone, undisturbed(settings), path)
        waited = 0.0
        while ranks.poll(0.25):
            waited += 0.25
            losses = _losses(path)
            progress(len(losses), settings.steps)
            if waited > _LIMIT_S:
                raise TimeoutError(f"the reference did not end\n{ranks.logs()}")
        losses = _losses(path)
        if len(losses) < settings.steps:
            raise RuntimeError(f"the reference ended early\n{ranks.logs()}")
    return tuple(losses)


def run_alone(rank: int, host: str, port: int, settings: DemoSettings, path: Path) -> None:
    """The process of the one rank."""
    torch.set_num_threads(1)
    job, timeouts, events = settings.job(), Timeouts(), EventLog(path)
    Trainer(
        Setup(settings.model(), settings.optimizer, settings.data()),
        Plan(version=0, layout=job.layout, quotas=job.quotas),
        Rendezvous(lambda: connect(host, port, "reference", timeouts), rank, [rank], timeouts),
        NoPlans(),
        callbacks=Callbacks(on_step=events.step),
    ).run(settings.steps)


def _losses(path: Path) -> list[float]:
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line)["loss"] for line in lines if line.endswith("\n")]
