"""What is done when a program ends: what was begun is finished, threads end in order.

Python ends a thread that asks for its lock while the interpreter is taken down; C++ code that had
let go of the lock then aborts the whole process. A job that is done would end with SIGABRT.
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

_UNTIL_EXIT_S = 5.0


class Closable(Protocol):
    """Has threads of its own."""

    def close(self) -> None:
        """End them."""


_open: dict[Closable, None] = {}  # kept alive: what was begun is finished, whoever still asks
_threads: weakref.WeakKeyDictionary[threading.Thread, Callable[[], object]]
_threads = weakref.WeakKeyDictionary()
_in_torch = threading.Lock()
_owner = os.getpid()


def remember(one: Closable) -> None:
    """Close it when this process ends, if `forget` has not been called by then."""
    _begin_anew_in_a_child()
    _open[one] = None


def forget(one: Closable) -> None:
    """It has been closed."""
    _open.pop(one, None)


def started(thread: threading.Thread, tell: Callable[[], object] = bool) -> threading.Thread:
    """Start a thread that is waited for at the exit; there `tell` has it end, if it must be told.

    `tell` must not refer to what the thread is there for, which could not be let go before.
    """
    _begin_anew_in_a_child()
    thread.start()
    _threads[thread] = tell
    return thread


def in_torch() -> threading.Lock:
    """To be held around each short call of torch by a thread that may outlive the interpreter.

    At the exit nobody gets it any more.
    """
    return _in_torch


def _begin_anew_in_a_child() -> None:
    """A forked child has none of its parent's threads."""
    global _owner  # noqa: PLW0603 - of the process
    if _owner != os.getpid():
        _open.clear()
        _threads.clear()
        _owner = os.getpid()


def _close_all() -> None:
    if _owner == os.getpid():
        for one in list(_open):
            with suppress(Exception):
                one.close()


def _stand_still() -> None:
    if _owner != os.getpid():
        return
    deadline = time.monotonic() + _UNTIL_EXIT_S
    left = list(_threads.items())
    for _, tell in left:
        tell()
    for thread, _ in left:
        thread.join(max(0.0, deadline - time.monotonic()))
    _in_torch.acquire(timeout=max(0.0, deadline - time.monotonic()))


# before executors take no more work, which is when atexit's own turn comes
_register: Callable[[Callable[[], None]], object] = getattr(
    threading, "_register_atexit", atexit.register
)
_register(_close_all)
atexit.register(_stand_still)
