"""Threads that may be inside torch are waited for before the interpreter ends.

Python ends a thread that asks for its lock while the interpreter is taken down; C++ code that had
let go of the lock then aborts the whole process. A job that is done would end with SIGABRT.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref

_UNTIL_EXIT_S = 5.0
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_in_torch = threading.Lock()


def started(thread: threading.Thread) -> threading.Thread:
    """Start a thread that has been told to end, or ends by itself, by the time of the exit."""
    _threads.add(thread)
    thread.start()
    return thread


def in_torch() -> threading.Lock:
    """To be held around each short call of torch by a thread that may outlive the interpreter.

    At the exit nobody gets it any more.
    """
    return _in_torch


def _stand_still() -> None:
    deadline = time.monotonic() + _UNTIL_EXIT_S
    for thread in list(_threads):
        if thread.is_alive():
            thread.join(max(0.0, deadline - time.monotonic()))
    _in_torch.acquire(timeout=max(0.0, deadline - time.monotonic()))


atexit.register(_stand_still)
