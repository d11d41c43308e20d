"""A sidecar that is forked from the tests' fork server."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from typing import IO, Any

import service.server  # noqa: F401 what a sidecar needs, imported once
from service import Sidecar, app
from tests.forked import ForkedProcess


class ForkedSidecar(Sidecar):
    """Runs what a `Sidecar` runs. It ends with the fork server, in place of this process."""

    def _started(self, options: list[str], log: IO[bytes]) -> Any:
        command = [*self._command, *options]
        return ForkedProcess(run_python, command, out=log.fileno(), err=log.fileno())


def run_python(command: Sequence[str]) -> None:
    """Do what Python does with these arguments: `-m MODULE ...` or `SCRIPT ...`.

    Requests wait for a Redis that is held up by whatever else this machine runs.
    """
    app._REDIS_ANSWER_S = 60.0
    if command[0] == "-m":
        sys.argv = list(command[1:])
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(command)
        runpy.run_path(sys.argv[0], run_name="__main__")
