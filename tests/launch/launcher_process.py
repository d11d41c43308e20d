"""Launchers forked from a process that has imported their modules, which takes seconds each time.

Run as a script this is the launcher itself, in the folder that a variable names.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import IO

from resihp.launch.fork_server import ForkServer, Started
from resihp.launch.options import Command

ROOT = Path(__file__).parents[2]
_FOLDER = "LAUNCHER_FOLDER"


class LauncherProcess:
    """`python -m resihp.launch ARGUMENTS` in a session of its own."""

    def __init__(
        self, folder: Path, *arguments: str, out: IO[bytes], err: IO[bytes], **variables: str
    ) -> None:
        self._key = uuid.uuid4().hex
        command = Command(__file__, "script", arguments)
        given = {**variables, _FOLDER: str(folder)}
        _Forks.here().server.start(self._key, command, given, (out.fileno(), err.fileno()))
        self.pid: int = _Forks.here().until(lambda forks: forks.pids.get(self._key))

    def poll(self) -> int | None:
        """Exit status, minus the signal that killed it; None while it runs."""
        forks = _Forks.here()
        forks.read(0.0)
        return forks.statuses.get(self._key)

    def wait(self, limit_s: float) -> int:
        """Exit status, after a bounded time. Raises `subprocess.TimeoutExpired`."""
        return _Forks.here().until(lambda forks: forks.statuses.get(self._key), limit_s)

    def send_signal(self, number: int) -> None:
        """Signal the launcher alone."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the launcher, and wait for its end."""
        self.send_signal(signal.SIGKILL)
        self.wait(60.0)


class _Forks:
    """The process that forks launchers, and what it has told of each one."""

    def __init__(self) -> None:
        self.server = ForkServer({**os.environ, "PYTHONPATH": str(ROOT)})
        self.server.preload(Command(__file__, "script"))
        self.pids: dict[str, int] = {}
        self.statuses: dict[str, int] = {}

    @staticmethod
    @cache
    def here() -> _Forks:
        """The one of this process, which ends with it."""
        return _Forks()

    def until(self, found: Callable[[_Forks], int | None], limit_s: float = 300.0) -> int:
        deadline = time.monotonic() + limit_s
        while (value := found(self)) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(["resihp.launch"], limit_s)
            self.read(0.1)
        return value

    def read(self, seconds: float) -> None:
        select.select([self.server], [], [], seconds)
        for event in self.server.events():
            if isinstance(event, Started):
                self.pids[event.key] = event.pid
            else:
                self.statuses[event.key] = event.status


if __name__ == "__main__":
    from resihp.launch.supervisor import main

    os.chdir(os.environ.pop(_FOLDER))
    sys.exit(main())
