"""Killed at any moment: what was said to be on disk is there, whole; the job goes on from it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from resihp.checkpoint import LocalDisk, SharedStorage
from tests.checkpoint.helpers import assert_stamped, back_from


def kill_after(folder: Path, start: int, said: int, nap_s: float) -> list[int]:
    """Run the loop until it has said `said` steps, kill it a little later; the steps it said."""
    command = [sys.executable, "-m", "tests.checkpoint.killed", str(folder), str(start)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        steps = [process.stdout.readline().strip() for _ in range(said)]
        time.sleep(nap_s)
        process.kill()
        steps += process.stdout.read().split()
    return [int(step) for step in steps if step.isdecimal()]


def campaign(folder: Path, kills: int, seed: int) -> None:
    chosen, start = random.Random(seed), 0
    for _ in range(kills):
        said = kill_after(folder, start, chosen.randint(1, 4), chosen.uniform(0, 0.03))
        assert said, "the loop died by itself"
        restored, into = back_from(LocalDisk(folder / "disk"))
        assert restored.step >= max(said)
        assert_stamped(into, restored.step)
        assert restored.extra == {"step": restored.step}
        assert not restored.skipped
        shared = SharedStorage(f"file://{folder}/shared")
        for step in shared.steps():
            _, into = back_from(shared, step=step)
            assert_stamped(into, step)
        start = restored.step + 1


def test_a_few_kills(tmp_path: Path) -> None:
    campaign(tmp_path, kills=3, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_two_hundred_kills(tmp_path: Path) -> None:
    campaign(tmp_path, kills=200, seed=int(os.environ.get("SEED", "7")))
