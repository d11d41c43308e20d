"""Ends of a demo before its time, where no process stays behind, and demos that do not begin."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from typer.testing import CliRunner

from resihp.cli import _demo  # noqa: F401 adds the command
from resihp.cli._app import app

RANKS = """
import sys, time
from pathlib import Path
from resihp.testing.local_ranks import LocalRanks

def main(rank, host, port):
    print("started", flush=True)
    time.sleep(600)

if __name__ == "__main__":
    with LocalRanks("job", Path(sys.argv[1])) as ranks:
        ranks.start(range(2), main)
        ranks.wait(600)
"""


def run_until(command: list[str], started: list[Path], number: int) -> subprocess.Popen[bytes]:
    """Run a command in a process group of its own until these files have content, then signal
    it."""
    process = subprocess.Popen([sys.executable, *command], start_new_session=True)
    deadline = time.monotonic() + 300
    while not all(path.exists() and path.stat().st_size for path in started):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(number)
    return process


def assert_group_ends(process: subprocess.Popen[bytes], status: int) -> None:
    """Assert that all processes of the group end, and the first one with this status."""
    try:
        assert process.wait(timeout=120) == status
        deadline = time.monotonic() + 120
        while group_lives(process.pid):
            assert time.monotonic() < deadline, "processes stayed behind"
            time.sleep(0.1)
    finally:
        if group_lives(process.pid):
            os.killpg(process.pid, signal.SIGKILL)


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_demo_that_is_told_to_end_takes_ranks_and_sidecar_along(tmp_path: Path) -> None:
    command = ["-m", "resihp.cli", "demo", "--out", str(tmp_path)]
    measured = tmp_path / "calibration-loads.f64"  # by ranks, beside the sidecar
    process = run_until(command, [measured], signal.SIGTERM)
    assert_group_ends(process, 143)


def test_ranks_end_with_a_process_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    logs = [tmp_path / f"rank-{rank}.log" for rank in range(2)]
    process = run_until([str(script), str(tmp_path)], logs, signal.SIGKILL)
    assert_group_ends(process, -signal.SIGKILL)


def test_a_rank_that_the_demo_does_not_have_is_refused(tmp_path: Path) -> None:
    for option in ("--slow-rank", "--dead-rank"):
        command = ["demo", option, "8", "--out", str(tmp_path / "demo")]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 2
        assert "8 ranks" in result.output
    assert not (tmp_path / "demo").exists()
