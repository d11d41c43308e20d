"""The launcher as the first process of a container, where there is no other init."""

from __future__ import annotations

import os
import signal

_FAULTS = {
    signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGABRT,
    signal.SIGSYS, signal.SIGKILL, signal.SIGSTOP,
}  # fmt: skip


def run_below_init() -> None:
    """Return in a child if this is process 1, else at once.

    Processes whose parents have ended become children of process 1, as the loader workers of a
    killed rank, and stay in the table of processes until it waits for them. Process 1 does nothing
    else, but to pass signals on to the child, and ends as that does.
    """
    if os.getpid() != 1:
        return
    signals = signal.valid_signals() - _FAULTS
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return
    while True:
        taken = signal.sigwaitinfo(signals)
        assert taken is not None
        if taken.si_signo == signal.SIGCHLD:
            _reap(child)
        elif taken.si_code <= 0:  # by a process; one of a terminal goes to the child as well
            os.kill(child, taken.si_signo)


def _reap(child: int) -> None:
    """Wait for all children that have ended; end with the status of `child` if it is one."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
