"""Signals to a rank and to what it has started."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

_PROCESSES = Path("/proc")
_TRACKER = b".resource_tracker import main"
"""In the command line of multiprocessing's tracker of resources, and of joblib's."""


def signal_group(leader: int, number: int) -> None:
    """Signal a child that has not been reaped, and what it has started."""
    try:
        if number == signal.SIGKILL:
            kill_group(leader)
        else:
            os.killpg(leader, number)
    except ProcessLookupError:  # it was forked a moment ago and has no group yet
        with suppress(ProcessLookupError):
            os.kill(leader, number)


def kill_group(leader: int) -> None:
    """Kill the processes of a group. Raises `ProcessLookupError` if there are none.

    Trackers of resources are left: each deletes the shared memory that the others have left
    behind, and ends once they have. A killed process forks no more, so that the last look finds
    nothing new.
    """
    if not _PROCESSES.is_dir():
        os.killpg(leader, signal.SIGKILL)
        return
    killed: set[int] = set()
    while found := _members(leader) - killed:
        for process in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        killed |= found
    if not killed:
        raise ProcessLookupError


def _members(leader: int) -> set[int]:
    """Processes of a group, but for trackers of resources."""
    found = set()
    for name in os.listdir(_PROCESSES):
        with suppress(ValueError, OSError):  # no process, or one that has ended
            if os.getpgid(int(name)) == leader and not _is_tracker(name):
                found.add(int(name))
    return found


def _is_tracker(name: str) -> bool:
    return _TRACKER in (_PROCESSES / name / "cmdline").read_bytes()
