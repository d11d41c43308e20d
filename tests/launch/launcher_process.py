"""Launchers forked from a process that has imported their modules, which takes seconds each time.

Run as a script this is the launcher itself, in the folder that a variable names.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from math import inf
from pathlib import Path
from typing import IO, Any

from resihp.launch import fork_server
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
        """Signal the launcher alone, which may have ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the launcher, and wait for its end."""
        self.send_signal(signal.SIGKILL)
        self.wait(60.0)


def launched(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A launcher in a folder that has ended, within a bounded time."""
    logs = folder / "launcher.out", folder / "launcher.err"
    with logs[0].open("wb") as out, logs[1].open("wb") as err:
        process = LauncherProcess(folder, *arguments, out=out, err=err, **variables)
    try:
        status = process.wait(300.0)
    finally:
        process.kill()
    return subprocess.CompletedProcess(arguments, status, *(log.read_text() for log in logs))


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


class _ForkedServer:
    """The process that forks a launcher's ranks, made from the launcher before it has threads.

    It has torch at once; a started Python would import it for seconds. It waits for what that one
    is given: its end of the socket, and its environment.
    """

    def __init__(self) -> None:
        self._start = fork_server.start_python
        self._gift, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.fork()
        self._status: int | None = None
        if self._pid:
            theirs.close()
            return
        self._gift.close()
        os.setsid()
        data, descriptors, _, _ = socket.recv_fds(theirs, 1 << 17, 1)
        theirs.close()
        if not data:
            os._exit(0)
        os.environ.clear()
        os.environ.update(json.loads(data))
        fork_server.serve(descriptors[0])
        sys.exit()  # a rank, whose script has ended

    def start(self, control: int, environment: Mapping[str, str]) -> Any:
        """Stand for `start_python`; a launcher whose process that forks was lost starts Python."""
        if self._gift.fileno() == -1:
            return self._start(control, environment)
        with self._gift:
            socket.send_fds(self._gift, [json.dumps(dict(environment)).encode()], [control])
        return self

    # As `subprocess.Popen` does.

    def poll(self) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def wait(self, timeout: float = inf) -> int:
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("fork server", timeout)
            time.sleep(0.01)
        return status

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)


if __name__ == "__main__":
    from resihp.launch.supervisor import main

    # As in a terminal; what the tests were started from, such as nohup, may ignore them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.chdir(os.environ.pop(_FOLDER))
    fork_server.start_python = _ForkedServer().start
    sys.exit(main())
