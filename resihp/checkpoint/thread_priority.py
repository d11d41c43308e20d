"""Threads that yield to training."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

BACKGROUND_NICENESS, _LOWEST = 10, 19
"""Training; a tenth of a core is left beside a busy thread of it."""


def lower_priority(by: int) -> None:
    """Lower the priority of the calling thread, and of those that it starts; on Linux alone."""
    if sys.platform == "linux" and by > 0:
        with contextlib.suppress(OSError):
            level = min(os.getpriority(os.PRIO_PROCESS, 0) + by, _LOWEST)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), level)
