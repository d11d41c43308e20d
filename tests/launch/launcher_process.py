"""Launchers forked from the tests' fork server, which has imported their modules."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path
from typing import IO, Any, NoReturn

from resihp.launch import fork_server
from resihp.launch.supervisor import main
from tests.forked import ForkedProcess


class LauncherProcess(ForkedProcess):
    """`python -m resihp.launch ARGUMENTS` in a session of its own."""

    def __init__(
        self, folder: Path, *arguments: str, out: IO[bytes], err: IO[bytes], **variables: str
    ) -> None:
        streams = {"out": out.fileno(), "err": err.fileno()}
        super().__init__(_launch, folder, arguments, **streams, **variables)

    def kill(self) -> None:
        """Kill the launcher, and wait for its end."""
        super().kill()
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


def _launch(folder: Path, arguments: tuple[str, ...]) -> None:
    os.setsid()
    # As in a terminal; what the tests were started from, such as nohup, may ignore them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.chdir(folder)
    sys.argv = ["launcher", *arguments]
    fork_server.start_python = _ForkedServer().start
    sys.exit(main())


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
        _end_as_python(lambda: fork_server.serve(descriptors[0]))

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


def _end_as_python(run: Callable[[], None]) -> NoReturn:
    """End this process as Python does when a script has ended, here that of a rank."""
    status = 0
    try:
        run()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:  # noqa: BLE001 - as Python does
        sys.excepthook(*sys.exc_info())
        status = 1
    ctypes.pythonapi.Py_Exit(status)
    raise AssertionError
