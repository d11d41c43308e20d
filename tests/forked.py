"""Processes forked from the tests' fork server, which has imported what they need.

A started Python would import it for a second or more of a processor's time.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import process as this_process
from multiprocessing.reduction import DupFd
from typing import Any

from resihp.launch.fork_server import end_with

_CONTEXT = multiprocessing.get_context("forkserver")


class ForkedProcess:
    """A function that runs in a process of its own, with the methods of `subprocess.Popen`.

    Its environment is this process's with further variables, its output goes to open files. It ends
    with the fork server.
    """

    def __init__(
        self,
        function: Callable[..., None],
        *arguments: Any,
        out: int,
        err: int,
        **variables: str,
    ) -> None:
        environment = {**os.environ, **variables}
        given = (environment, _Descriptor(out), _Descriptor(err), function, arguments)
        self._process = _CONTEXT.Process(target=_run, args=given)
        self._process.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Exit status, minus the signal that killed it; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Exit status. Raises `subprocess.TimeoutExpired`."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Signal it, unless it has ended, as it may just now."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)


class _Descriptor:
    """A descriptor of this process that a forked one receives."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return _received, (DupFd(self._number),)


def _received(sent: Any) -> int:
    return int(sent.detach())


def _run(
    environment: Mapping[str, str],
    out: int,
    err: int,
    function: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    end_with(os.getppid())
    this_process._parent_process = None  # as in a started Python
    for descriptor, stream in ((out, 1), (err, 2)):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    function(*arguments)
