"""Trainers under `resihp run`: lost ranks cost a restart, and change nothing that is trained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RANKS, TIMEOUT_S = 3, 600.0

pytestmark = [pytest.mark.integrations, pytest.mark.soak]


def launched(script: str, folder: Path, *events: str) -> subprocess.CompletedProcess[str]:
    """A training under our launcher, once it has ended."""
    folder.mkdir()
    options = ("--nproc-per-node", str(RANKS), "--max-restarts", "5")
    launcher = (sys.executable, "-m", "resihp.launch", *options)
    return subprocess.run(
        [*launcher, str(Path(__file__).with_name(script)), str(folder), *events],
        env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip


def last_of(folder: Path, what: str) -> dict[tuple[int, int], list[Any]]:
    """What was noted, by rank and step, in the last attempt that made the step.

    Files are named `WHAT-ATTEMPT-RANK`, and have lines of step and note.
    """
    found: dict[tuple[int, int], list[Any]] = {}
    for path in sorted(folder.glob(f"{what}-*")):
        of_attempt: dict[tuple[int, int], list[Any]] = defaultdict(list)
        rank = int(path.name.rpartition("-")[2])
        for line in path.read_text().splitlines():
            step, noted = json.loads(line)
            of_attempt[rank, step].append(noted)
        found |= of_attempt
    return found


def test_each_rank_of_a_transformers_trainer_is_killed_in_turn(tmp_path: Path) -> None:
    script, alone, killed = "restarted_trainer.py", tmp_path / "alone", tmp_path / "killed"
    done = launched(script, alone)
    assert done.returncode == 0, done.stderr
    assert ": restart" not in done.stderr, done.stderr
    done = launched(script, killed, "0:1:3", "1:0:5", "2:2:9")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(": restart") == 3, done.stderr
    assert len(list(killed.glob("taken-*"))) == 4 * RANKS
    expected = json.loads((alone / "losses").read_text())
    assert json.loads((killed / "losses").read_text()) == pytest.approx(expected, abs=1e-4)
    assert last_of(killed, "taken") == last_of(alone, "taken")


def test_an_error_of_the_users_ends_it_after_two_tries(tmp_path: Path) -> None:
    done = launched("restarted_trainer.py", tmp_path / "job", "any:1:7")
    assert done.returncode == 1, done.stderr
    assert "ValueError: no sample after step 7" in done.stderr.split("failed with status 1:")[-1]
    assert len(list((tmp_path / "job").glob("taken-*"))) == 2 * RANKS


def test_each_rank_of_torchtitan_is_killed_in_turn(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan")
    script, alone, killed = "restarted_torchtitan.py", tmp_path / "alone", tmp_path / "killed"
    done = launched(script, alone)
    assert done.returncode == 0, done.stderr
    assert ": restart" not in done.stderr, done.stderr
    done = launched(script, killed, "0:1:3", "1:0:4", "2:2:7")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(": restart") == 3, done.stderr
    expected, found = last_of(alone, "losses"), last_of(killed, "losses")
    assert len(list(killed.glob("losses-*"))) == 4 * RANKS
    assert {place: pytest.approx(losses, rel=1e-4) for place, losses in expected.items()} == found
