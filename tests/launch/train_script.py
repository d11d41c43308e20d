"""A training script as a user writes it; the tests start it with launchers."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from resihp.checkpoint import Every, LocalDisk
from resihp.contracts import Job, Layout, Plan
from resihp.elastic.checkpointing import Checkpoints
from resihp.elastic.models import Llama
from resihp.elastic.optim import Optimizer
from resihp.elastic.state.events import Callbacks
from resihp.elastic.step import Setup
from resihp.elastic.training import train
from resihp.hooks import Monitor
from tests.elastic.engine_job import SHAPE, batch


def job_of(degree: int) -> Job:
    """The job that the script trains, with tensor parallelism of this degree."""
    layout = Layout.grid(dp=2, pp=1, tp=degree, layers=4, units=4)
    return Job(name="script", layout=layout, microbatches=6, model=SHAPE)


def main() -> None:
    """Two replicas, watched by a sidecar if there is one; the rank named kills itself.

    Checkpoints are written to the folder that stands in CHECKPOINTS, far too rarely.
    """
    torch.set_num_threads(1)
    steps, doomed = int(sys.argv[1]), int(sys.argv[2])
    rank = int(os.environ["RANK"])
    degree = int(os.environ["WORLD_SIZE"]) // 2
    job = job_of(degree)

    def on_step(reduced: Any, ms: float, plan: Plan) -> None:
        if rank == doomed and reduced.step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if folder is not None:
            (folder / f"begun-{rank}").touch()

    setup = Setup(Llama(SHAPE), Optimizer(torch.optim.AdamW, lr=1e-2), batch)
    monitor = Monitor(job=job, probes=False) if "RESIHP_URL" in os.environ else None
    folder = Path(os.environ["CHECKPOINTS"]) if "CHECKPOINTS" in os.environ else None
    saved = Checkpoints(lambda: [LocalDisk(folder)], Every(10**6)) if folder else None
    trainer = train(
        setup, job, steps, monitor=monitor, callbacks=Callbacks(on_step=on_step), checkpoints=saved
    )
    told = f"rank {rank} completed {trainer.completed} in {trainer.plan.layout.dp} replicas"
    sys.stdout.write(told + "\n")


if __name__ == "__main__":
    main()
