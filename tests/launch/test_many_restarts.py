"""A hundred restarts of one job leave nothing behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.launcher_process import LauncherProcess
from tests.launch.test_restarts import SCRIPT

FIRST, RESTARTS, LIMIT_S = 10, 100, 3000.0
GROWTH_BYTES = 8 << 20
"""What an interpreter's arenas may add in ninety restarts, which is less than any of them."""


def resources(launcher: int) -> dict[int, tuple[int, int]]:
    """Open descriptors and resident bytes of a launcher and of the process that forks its ranks."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    found = {}
    for pid in (launcher, *map(int, children)):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        found[pid] = len(list(Path(f"/proc/{pid}/fd").iterdir())), pages * 4096
    return found


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_restarts_leave_nothing_behind(tmp_path: Path) -> None:
    """Each attempt makes one more step, then a rank is killed; the last one completes the job."""
    kills = [f"{attempt}:{attempt % 2}:{attempt + 1}:kill" for attempt in range(RESTARTS)]
    events = [*kills, f"{FIRST}:0:{FIRST + 1}:hold"]  # before the kill of that attempt
    events.sort(key=lambda event: "hold" not in event)
    arguments = ("--nproc-per-node", "2", str(SCRIPT), ".", str(RESTARTS + 2), *events)
    last = f"{RESTARTS}:0:{RESTARTS + 1}:hold"
    log = tmp_path / "launcher.err"
    with log.open("wb") as err:
        process = LauncherProcess(tmp_path, *arguments, last, out=err, err=err)
    deadline = time.monotonic() + LIMIT_S

    def until(check: Callable[[], bool]) -> None:
        while not check():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)

    def at(attempt: int) -> tuple[dict[int, tuple[int, int]], int]:
        """Resources, and files in the node's memory, while an attempt holds."""
        until((tmp_path / f"hold-{attempt}").exists)
        memory = Path((tmp_path / "memory").read_text())
        return resources(process.pid), len(list(memory.rglob("*")))

    try:
        before, files_before = at(FIRST)
        (tmp_path / "go").touch()
        until(lambda: f"attempt {FIRST + 1} begins" in log.read_text())
        (tmp_path / "go").unlink()
        after, files_after = at(RESTARTS)
        (tmp_path / "go").touch()
        assert process.wait(LIMIT_S) == 0, log.read_text()
    finally:
        process.kill()
    assert log.read_text().count(": restart") == RESTARTS
    assert after.keys() == before.keys(), "the same two processes"
    for pid, (descriptors, resident) in after.items():
        assert descriptors <= before[pid][0]
        assert resident <= before[pid][1] + GROWTH_BYTES
    assert files_after == files_before
    assert not list(Path("/dev/shm").glob(Path((tmp_path / "memory").read_text()).name))
