"""The checkpoints of a job in tests: one of every step, there before the next step begins."""

from __future__ import annotations

import os
import time
from pathlib import Path

from resihp.checkpoint import LocalDisk, PeerMemory, SavePolicy, SharedStorage
from resihp.checkpoint.format.metadata import data_name
from resihp.checkpoint.levels.checkpoint_folder import step_name
from resihp.elastic.checkpointing import Checkpoints
from resihp.elastic.checkpointing.manager import CheckpointManager
from resihp.elastic.trainer import Trainer


def level_at(where: Path | str) -> LocalDisk | SharedStorage:
    """A folder, or shared storage at a URL."""
    return LocalDisk(where, keep=3) if isinstance(where, Path) else SharedStorage(where, keep=3)


def kept_in(where: Path | str | None, in_memory: int, policy: SavePolicy) -> Checkpoints | None:
    """Checkpoints somewhere, in the ranks' memory, or both; None for neither."""
    if where is None and not in_memory:
        return None
    return Checkpoints(lambda: [level_at(where)] if where else [], policy, in_memory=in_memory)


def await_sent(trainer: Trainer, step: int) -> None:
    """Until a peer holds the checkpoint of `step`; where there is a peer that has not been lost."""
    manager = trainer._checkpoints
    assert isinstance(manager, CheckpointManager)
    assert manager._writer is not None
    counters = manager._writer._saver.counters.levels.get(PeerMemory.name)
    deadline = time.monotonic() + 300
    while counters is not None and counters.newest_step != step and not counters.failed:
        assert time.monotonic() < deadline, f"the checkpoint of step {step} was not sent"
        time.sleep(0.005)


def await_kept(where: Path | str, step: int) -> None:
    """Until the checkpoint of `step` is there, so that runs are alike."""
    level, deadline = level_at(where), time.monotonic() + 300
    while step not in level.steps():
        assert time.monotonic() < deadline, f"the checkpoint of step {step} is not there"
        time.sleep(0.005)


def tear(folder: Path, step: int, rank: int) -> None:
    """Damage a rank's file of a checkpoint."""
    damaged = folder / step_name(step) / data_name(rank)
    os.truncate(damaged, damaged.stat().st_size // 2)
