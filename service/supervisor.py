"""Child processes, forked from their supervisor and started again when they die or hang."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from .errors import StartError
from .logs import logger

log = logger("resihp.supervisor")

# A fork imports nothing again and needs no pickling. It is safe because the supervisor has no
# thread, event loop or connection.
_FORK = multiprocessing.get_context("fork")
_LIBC = ctypes.CDLL(None)
_SET_DEATH_SIGNAL, _SET_NAME = 1, 15  # options of prctl
_LONGEST_DELAY_S = 30.0
_STEADY_S = 60.0  # a process that ran for longer is started again with the shortest delay
HUNG_S = 60.0
"""Time without a sign of life after which a process is killed."""
_LONGEST_LOOK_S = 1.0  # a supervisor that stood still for longer heard no sign meanwhile

Body = Callable[[Callable[[], None]], None]
"""Work of a child process until SIGTERM; it calls its argument when it is ready, and from then on
every few seconds as a sign of life."""


class ChildProcess:
    """A process that is started again when it dies or gives no sign of life for `HUNG_S`, and
    killed when its supervisor dies (Linux).

    name  name in the log and, with the prefix "resihp-", in the list of processes
    body  its work; a `StartError` from it ends the process and is reported to the supervisor
    """

    def __init__(self, name: str, body: Body) -> None:
        self.name = name
        self._body = body
        self._early_deaths = 0
        self._restart_s: float | None = None  # None: it runs, as far as is known
        self._signs: Any = _FORK.RawValue("Q")  # number of its signs of life, in shared memory

    def start(self) -> None:
        """Fork the process."""
        self._reports, reports = _FORK.Pipe(duplex=False)
        supervisor, signs = os.getpid(), self._signs
        signs.value = 0

        def alive() -> None:
            if not signs.value:
                reports.send(None)
            signs.value += 1

        def run() -> None:
            _leave_supervisor(supervisor, self.name)
            try:
                self._body(alive)
            except StartError as error:
                if self._restart_s is not None:  # nobody waits for the report of a later start
                    log.error("process cannot start", reason=str(error))
                reports.send(str(error))
                sys.exit(2)

        process = _FORK.Process(target=run, name=self.name)
        process.start()
        reports.close()
        self._process = process
        self._started_s, self._restart_s = time.monotonic(), None
        self._signs_seen, self._silent_s, self._looked_s = 0, 0.0, self._started_s

    def is_ready(self) -> bool:
        """True once it is ready; call it until then. Raises `StartError` if it has ended."""
        if not self._reports.poll():
            return False
        try:
            problem: str | None = self._reports.recv()
        except EOFError:
            problem = f"the process {self.name} ended at its start; see the log"
        if problem is not None:
            raise StartError(problem)
        return True

    def revive(self) -> None:
        """Start it again if it has died; the delay doubles with each early death. Kill it if it
        hangs."""
        status, now_s = self._process.exitcode, time.monotonic()
        if status is None:
            if self._silence_s(now_s) > HUNG_S:
                log.warning("process hangs, killing it", process=self.name)
                self._process.kill()
            return
        if self._restart_s is None:
            is_early = now_s - self._started_s < _STEADY_S
            self._early_deaths = self._early_deaths + 1 if is_early else 0
            delay_s = restart_delay_s(self._early_deaths)
            self._restart_s = now_s + delay_s
            log.warning("process died", process=self.name, status=status, restart_in_s=delay_s)
        if now_s >= self._restart_s:
            self._reports.close()
            try:
                self.start()
            except OSError as error:  # no memory or process id is free
                self._restart_s = now_s + _LONGEST_DELAY_S
                log.error("process does not start", process=self.name, error=str(error))

    def _silence_s(self, now_s: float) -> float:
        """Time since its last sign of life, as far as the supervisor looked."""
        signs = self._signs.value
        looked_for_s = min(now_s - self._looked_s, _LONGEST_LOOK_S)
        self._silent_s = self._silent_s + looked_for_s if signs == self._signs_seen else 0.0
        self._signs_seen, self._looked_s = signs, now_s
        return self._silent_s

    def terminate(self) -> None:
        """Ask it to end."""
        self._process.terminate()

    def join(self, deadline_s: float) -> None:
        """Wait until it has ended; kill it at `deadline_s` of the monotonic clock."""
        self._process.join(max(0.0, deadline_s - time.monotonic()))
        if self._process.exitcode is None:
            log.warning("process does not end, killing it", process=self.name)
            self._process.kill()
            self._process.join()


def restart_delay_s(early_deaths: int) -> float:
    """Time before a process that died early so often in sequence is started again."""
    return float(min(0.1 * 2 ** min(early_deaths, 10), _LONGEST_DELAY_S))


def end(children: Iterable[ChildProcess], *, timeout_s: float) -> None:
    """End these processes together: SIGTERM, and SIGKILL after `timeout_s`."""
    ending = list(children)
    deadline_s = time.monotonic() + timeout_s
    for child in ending:
        child.terminate()
    for child in ending:
        child.join(deadline_s)


def _leave_supervisor(supervisor: int, name: str) -> None:
    """Undo in a child what it has inherited, and let it die with its supervisor."""
    os.setsid()  # Ctrl-C goes to the supervisor, which ends its children in order
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    if sys.platform == "linux":
        _LIBC.prctl(_SET_NAME, f"resihp-{name}".encode(), 0, 0, 0)
        _LIBC.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != supervisor:  # it died before the request
        os._exit(1)
