"""Order of shutdown at the end of the process: open objects are closed, then threads are joined.

CPython ends a daemon thread that asks for the GIL during finalization; C++ code that has released
the GIL then calls `std::terminate`, and a finished job would exit with SIGABRT. Therefore threads
that may run C++ code are joined, and torch is locked, before finalization starts.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

_JOIN_TIMEOUT_S = 5.0


class Closable(Protocol):
    """An object with threads of its own."""

    def close(self) -> None:
        """Finish what was begun and end the threads."""


_open: dict[Closable, None] = {}  # strong references: unfinished work outlives its user
_threads: weakref.WeakKeyDictionary[threading.Thread, Callable[[], object]]
_threads = weakref.WeakKeyDictionary()
_torch_lock = threading.Lock()
_owner = os.getpid()


def close_at_exit(closable: Closable) -> None:
    """Close `closable` when this process ends, unless `cancel_close_at_exit` is called before."""
    _reset_in_child()
    _open[closable] = None


def cancel_close_at_exit(closable: Closable) -> None:
    """Undo `close_at_exit`, for an object that has been closed."""
    _open.pop(closable, None)


def start_thread(thread: threading.Thread, stop: Callable[[], object] = bool) -> threading.Thread:
    """Start a thread that is joined at exit, after `stop()` has asked it to end.

    `stop` must not hold a reference to the object that the thread serves, which would keep that
    object alive until exit.
    """
    _reset_in_child()
    thread.start()
    _threads[thread] = stop
    return thread


def torch_lock() -> threading.Lock:
    """Lock for each short call of torch from a thread that may outlive the interpreter.

    It is acquired for good at exit, so that no such call begins during finalization.
    """
    return _torch_lock


def _reset_in_child() -> None:
    """Drop the parent's entries in a forked child, which has none of its parent's threads."""
    global _owner  # noqa: PLW0603 - state of the process
    if _owner != os.getpid():
        _open.clear()
        _threads.clear()
        _owner = os.getpid()


def _close_all() -> None:
    if _owner == os.getpid():
        for closable in list(_open):
            with suppress(Exception):
                closable.close()


def _join_threads() -> None:
    if _owner != os.getpid():
        return
    deadline = time.monotonic() + _JOIN_TIMEOUT_S
    left = list(_threads.items())
    for _, stop in left:
        stop()
    for thread, _ in left:
        thread.join(max(0.0, deadline - time.monotonic()))
    _torch_lock.acquire(timeout=max(0.0, deadline - time.monotonic()))


# Runs before executors refuse new work, which happens before atexit's own callbacks.
_register: Callable[[Callable[[], None]], object] = getattr(
    threading, "_register_atexit", atexit.register
)
_register(_close_all)
atexit.register(_join_threads)
