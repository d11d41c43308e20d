"""The checkpoints of a job in tests: one of every step, there before the next step begins."""

from __future__ import annotations

import os
import time
from pathlib import Path

from resihp.checkpoint import EveryStep, LocalDisk
from resihp.checkpoint.format.metadata import data_name
from resihp.checkpoint.levels.folder import step_name, steps_in
from resihp.elastic.checkpoints import Checkpoints


def kept_in(folder: Path | None) -> Checkpoints | None:
    """Checkpoints of each step in a folder; None where there is none."""
    return folder and Checkpoints(lambda: [LocalDisk(folder, keep=3)], EveryStep())


def await_kept(folder: Path, step: int) -> None:
    """Until the checkpoint of `step` is there, so that runs are alike."""
    deadline = time.monotonic() + 20
    while step not in steps_in(folder) and time.monotonic() < deadline:
        time.sleep(0.005)


def tear(folder: Path, step: int, rank: int) -> None:
    """Damage a rank's file of a checkpoint."""
    damaged = folder / step_name(step) / data_name(rank)
    os.truncate(damaged, damaged.stat().st_size // 2)
