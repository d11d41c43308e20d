"""ResiHP's side of `benchmarks.recovery`: a user's loop, as documented, and one that rolls back."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch

from benchmarks._recovery_job import MICROBATCHES, REPLICAS, STEPS, Diary, build_model
from benchmarks._recovery_job import build_optimizer as optimizer_of
from resihp.elastic.ddp.replicas import Replicas
from resihp.elastic.ddp.step import Step
from resihp.elastic.rendezvous.consensus import SurvivorReport
from resihp.elastic.rendezvous.environment import Environment
from resihp.elastic.rendezvous.store import Timeouts
from resihp.testing.local_ranks import LocalRanks

TIMEOUTS = Timeouts(poll=timedelta(milliseconds=50))


class RollsBack(Replicas):
    """Keeps nothing of a step that has lost a replica, as most systems do."""

    def _report(self, step: Step) -> SurvivorReport:
        report = super()._report(step)
        nothing = (replace(held, finished=(), summed=False) for held in report.holdings)
        return replace(report, holdings=tuple(nothing))


def play(folder: Path, *, rolls_back: bool) -> None:
    """Run the job; every process writes its diary into `folder`."""
    with LocalRanks("recovery", folder) as processes:
        processes.start(range(REPLICAS), run_rank, folder, rolls_back)
        processes.wait(600)


def run_rank(rank: int, host: str, port: int, folder: Path, rolls_back: bool) -> None:
    """One replica."""
    torch.set_num_threads(1)
    model, diary = build_model(), Diary(rank, folder / f"diary-{rank}.jsonl")
    optimizer = optimizer_of(model)
    kind = RollsBack if rolls_back else Replicas
    replicas = kind(
        model,
        optimizer,
        microbatches=MICROBATCHES,
        timeouts=TIMEOUTS,
        environment=Environment(rank, REPLICAS, host, port, "recovery", False, False),
    )
    diary.tell("ready", 0)
    for step in replicas.steps(STEPS):
        for done, index in enumerate(step):
            share = MICROBATCHES // len(replicas.alive)
            diary.compute(model, step.number, index, done, share)
        optimizer.step()
        diary.tell("step", step.number)
