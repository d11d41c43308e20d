"""Scheduling priority of background threads, as `nice` values of Linux."""

from __future__ import annotations

import contextlib
import os
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
