"""Priorities of threads, and open files, as far as the system grants them to this process."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import threading

BACKGROUND_NICENESS, _MAX_NICENESS = 10, 19
"""Niceness that leaves about a tenth of a core to a thread next to a busy training thread."""


def lower_priority(by: int) -> None:
    """Add `by` to the niceness of the calling thread and of threads started from it (Linux)."""
    if sys.platform == "linux" and by > 0:
        with contextlib.suppress(OSError):
            niceness = min(os.getpriority(os.PRIO_PROCESS, 0) + by, _MAX_NICENESS)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


def allow_open_files(number: int) -> int:
    """Raise the limit of open files, usually 1,024, to `number` as far as the system allows.

    Returns the limit then, which may be lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= number:
        return number
    allowed = number if hard == resource.RLIM_INFINITY else min(number, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (OSError, ValueError):
        return soft
    return allowed
