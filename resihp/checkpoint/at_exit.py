"""Closes what a program leaves open when it ends: what was begun is finished, threads end in order.

A thread that still runs while the interpreter is taken down may end the whole process with SIGABRT.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol


class Closable(Protocol):
    """Has threads of its own."""

    def close(self) -> None:
        """End them."""


_open: dict[Closable, None] = {}  # kept alive: what was begun is finished, whoever still asks
_owner = os.getpid()


def remember(one: Closable) -> None:
    """Close it when this process ends, if `forget` has not been called by then."""
    global _owner  # noqa: PLW0603 - a forked child has none of its parent's threads
    if _owner != os.getpid():
        _open.clear()
        _owner = os.getpid()
    _open[one] = None


def forget(one: Closable) -> None:
    """It has been closed."""
    _open.pop(one, None)


def _close_all() -> None:
    if _owner == os.getpid():
        for one in list(_open):
            with suppress(Exception):
                one.close()


# before executors take no more work, which is when atexit's own turn comes
_register: Callable[[Callable[[], None]], object] = getattr(
    threading, "_register_atexit", atexit.register
)
_register(_close_all)
