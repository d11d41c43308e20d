"""Ordinary training loops recorded by the profiler of PyTorch, one file for each rank.

The loops mark nothing by themselves. The devices are emulated: a layer's time is that of an
autograd function that sleeps, which the profiler shows as an operator of the host, or on CUDA as a
kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from .local_ranks import LocalRanks
from .ordinary_loops import OrdinaryLoop, RankLoop

SKIPPED_STEPS = 2
"""First steps, which prepare much that later ones find: not recorded."""
_PATIENCE_S = 240.0
_ACTIVITIES = {
    "cpu": [ProfilerActivity.CPU],
    "cuda": [ProfilerActivity.CPU, ProfilerActivity.CUDA],
}


@dataclass(frozen=True)
class ProfilerChoice:
    """Choices of a user of the profiler.

    marks_steps   calls `step()`, with a schedule that leaves out the first steps
    shapes        `record_shapes`
    """

    marks_steps: bool = True
    shapes: bool = True


def run_profiled(
    rank: int, host: str, port: int, loop: OrdinaryLoop, folder: Path, choice: ProfilerChoice
) -> None:
    """Train as one of `loop.ranks` ranks and write `rankN.json.gz`.

    For `resihp.testing.local_ranks`.
    """
    own = RankLoop.join(rank, host, port, loop)
    plan = schedule(wait=SKIPPED_STEPS - 1, warmup=1, active=loop.steps - SKIPPED_STEPS, repeat=1)
    steps = own.train()
    if not choice.marks_steps:
        for _ in range(SKIPPED_STEPS):
            next(steps)
    dist.barrier()
    with profile(
        activities=_ACTIVITIES[loop.device],
        schedule=plan if choice.marks_steps else None,
        on_trace_ready=lambda done: done.export_chrome_trace(str(folder / f"rank{rank}.json.gz")),
        record_shapes=choice.shapes,
    ) as profiler:
        for _ in steps:
            if choice.marks_steps:
                profiler.step()
    dist.barrier()


def record_loop(
    loop: OrdinaryLoop, folder: Path, choice: ProfilerChoice = ProfilerChoice()
) -> None:
    """Run a loop and leave one file for each rank in `folder`; the ranks' logs go to
    `folder/logs`. Raises `RuntimeError` with the logs if a rank fails."""
    folder.mkdir(parents=True, exist_ok=True)
    with LocalRanks(loop.job, folder / "logs") as ranks:
        ranks.start(range(loop.ranks), run_profiled, loop, folder, choice)
        if any(ranks.wait(_PATIENCE_S).values()):
            raise RuntimeError(f"a rank failed\n{ranks.logs()}")
