"""What the tests of checkpoints share: states whose values tell their step, and slow levels."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from resihp.checkpoint import IndependentRank, LocalDisk, Restored
from resihp.checkpoint.format.index import CHUNK_BYTES
from resihp.checkpoint.levels import Level
from resihp.checkpoint.restore import restore
from resihp.checkpoint.staging.in_flight import InFlightCheckpoint
from resihp.testing.local_ranks import LocalRanks, RankMain

SIZES = ((3,), (700, 401), (1,), (), (1025, 1030), (0, 4), (2, 3, 5))
"""More than one chunk in all, with tensors that end inside a chunk and some that are tiny."""


def room_for(images: int) -> int:
    """Size of a host cache, in bytes, that holds so many images of a `stamped` state."""
    return (4 + 2 * images) * CHUNK_BYTES


def stamped(step: int) -> dict[str, Tensor]:
    """A state in which every element is the step."""
    return {f"t{i}": torch.full(size, float(step)) for i, size in enumerate(SIZES)}


def stamp(state: Mapping[str, Tensor], step: int) -> None:
    """What an optimizer does: overwrite everything."""
    for tensor in state.values():
        tensor.fill_(float(step))


def assert_stamped(state: Mapping[str, Tensor], step: int) -> None:
    """Every element is of the step."""
    for key, tensor in state.items():
        assert torch.equal(tensor, torch.full_like(tensor, float(step))), key


def back_from(*levels: Level, step: int | None = None) -> tuple[Restored, dict[str, Tensor]]:
    """The newest state that the levels give."""
    into = stamped(-1)
    return restore(levels, into, IndependentRank(), step=step), into


class SlowDisk(LocalDisk):
    """Takes at least `delay_s` for each checkpoint, before it reads the first chunk of it."""

    def __init__(self, folder: Path, delay_s: float, keep: int = 2) -> None:
        super().__init__(folder, keep=keep)
        self.delay_s = delay_s

    def put(self, checkpoint: InFlightCheckpoint) -> None:
        """Sleep, then write."""
        time.sleep(self.delay_s)
        super().put(checkpoint)


class GatedDisk(LocalDisk):
    """Writes no checkpoint before `gate` is set."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        super().__init__(folder, keep=keep)
        self.gate = threading.Event()

    def put(self, checkpoint: InFlightCheckpoint) -> None:
        """Wait for the gate, then write."""
        assert self.gate.wait(300)
        super().put(checkpoint)


def load_by_torch(folder: Path, state: dict[str, Any]) -> None:
    """Fill the tensors of `state` by torch's own reader, in this process alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder))


def run_python(script: str, *arguments: object) -> str:
    """What a new process prints that runs a script; it imports only what the script does."""
    command = [sys.executable, "-W", "ignore", "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_until_killed(target: RankMain, *arguments: object) -> None:
    """Run a function of a module, as a rank, in a process that kills itself."""
    with tempfile.TemporaryDirectory() as folder, LocalRanks("killed", Path(folder)) as ranks:
        ranks.start([0], target, *arguments)
        assert ranks.wait(300) == {0: -signal.SIGKILL}, ranks.logs()
