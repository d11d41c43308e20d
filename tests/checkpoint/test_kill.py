"""Killed at any moment: what was said to be on disk is there, whole; the job goes on from it."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from resihp.checkpoint import Checkpointer, LocalDisk, SharedStorage
from resihp.testing.local_ranks import LocalRanks
from tests.checkpoint.helpers import assert_stamped, back_from, stamp, stamped

PATIENCE_S = 100


def loop(rank: int, host: str, port: int, folder: Path, start: int) -> None:
    """Train and checkpoint for ever; say each step that is on disk, once it is."""
    torch.set_num_threads(1)
    state, disk = stamped(start), LocalDisk(folder / "disk")
    with Checkpointer([disk, SharedStorage(f"file://{folder}/shared")]) as saver:
        said = None
        for step in range(start, 1 << 30):
            saver.fence()
            stamp(state, step)
            saver.save(step, state, extra={"step": step})
            if said != (said := saver.counters.levels[disk.name].newest_step):
                sys.stdout.write(f"on disk: {said}\n")
                sys.stdout.flush()


def kill_after(ranks: LocalRanks, number: int, folder: Path, start: int, chance: random.Random):
    """Run the loop until it has said a few steps, kill it a little later; the steps it said."""
    ranks.start((number,), loop, folder, start)
    wanted, deadline = chance.randint(1, 4), time.monotonic() + PATIENCE_S
    while len(_problems(ranks, number)) < wanted:
        assert number not in ranks.exit_codes, ranks.log(number).read_text()
        assert time.monotonic() < deadline, ranks.log(number).read_text()
        ranks.poll(0.005)
    time.sleep(chance.uniform(0, 0.03))
    ranks.kill(number)
    while number not in ranks.exit_codes:
        ranks.poll(1.0)
    assert ranks.exit_codes[number] == -signal.SIGKILL
    return _problems(ranks, number)


def _problems(ranks: LocalRanks, number: int) -> list[int]:
    lines = ranks.log(number).read_text().splitlines() if ranks.log(number).exists() else []
    return [int(line.split(": ")[1]) for line in lines if line.startswith("on disk: ")]


def campaign(folder: Path, kills: int, seed: int) -> None:
    chance, start = random.Random(seed), 0
    disk, shared = LocalDisk(folder / "disk"), SharedStorage(f"file://{folder}/shared")
    with LocalRanks("kill", folder / "logs") as ranks:
        for number in range(kills):
            said = kill_after(ranks, number, folder, start, chance)
            restored, into = back_from(disk)
            assert restored.step >= max(said)
            assert_stamped(into, restored.step)
            assert restored.extra == {"step": restored.step}
            assert not restored.skipped
            for step in shared.steps():
                _, into = back_from(shared, step=step)
                assert_stamped(into, step)
            start = restored.step + 1


def test_a_few_kills(tmp_path: Path) -> None:
    campaign(tmp_path, kills=5, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_two_hundred_kills(tmp_path: Path) -> None:
    campaign(tmp_path, kills=200, seed=int(os.environ.get("SEED", "7")))
