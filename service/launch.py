"""A sidecar started and stopped by another program: for demos, tests and notebooks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import IO

from .errors import StartError


class Sidecar:
    """A `resihp serve` process on a free port, stopped at the end of the block and with the program
    that started it, even if that is killed.

        with Sidecar(data) as sidecar:
            client = Client(sidecar.url, ...)

    data             data folder, also for the log
    options          further command-line options of `resihp serve`
    command          arguments of the Python interpreter in place of `-m resihp.cli serve`
    log              log file; `serve.log` in the data folder by default
    start_timeout_s  longest time until it serves

    A sidecar that was killed can be started again with `start`, on the same data and port.
    """

    def __init__(
        self,
        data: Path,
        *,
        options: tuple[str, ...] = (),
        command: tuple[str, ...] = ("-m", "resihp.cli", "serve"),
        log: Path | None = None,
        start_timeout_s: float = 60.0,
    ) -> None:
        self.data = data
        self.url = ""
        self._options = options
        self._command = command
        self._log = log or data / "serve.log"
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of its supervisor, with which all its processes end; None if not running."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start it and wait until it serves. Raises `StartError` with the end of its log."""
        self.data.mkdir(parents=True, exist_ok=True)
        ready = self.data / "ready.json"
        ready.unlink(missing_ok=True)
        port = self.url.rsplit(":", 1)[1] if self.url else "0"
        files = ("--data", str(self.data), "--ready-file", str(ready))
        with self._log.open("ab") as log:
            self._process = self._started(["--port", port, *files, *self._options], log)
        deadline_s = time.monotonic() + self._start_timeout_s
        while not ready.exists():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self.stop()
                raise StartError(f"the sidecar did not start:\n{self.tail()}")
            time.sleep(0.02)
        self.url = json.loads(ready.read_text())["url"]

    def _started(self, options: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        command = [sys.executable, *self._command, *options, "--parent", str(os.getpid())]
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ
        )

    def stop(self, *, timeout_s: float = 20.0) -> int | None:
        """Terminate it, or kill it after `timeout_s`; the exit status, None if not started."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.terminate()
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait(timeout_s)

    def kill(self) -> None:
        """Kill its supervisor (SIGKILL); the kernel ends the other processes (Linux)."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(20)

    def tail(self, lines: int = 20) -> str:
        """The last lines of the log."""
        if not self._log.exists():
            return ""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    def __enter__(self) -> Sidecar:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
