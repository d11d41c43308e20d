"""Lets go of old worlds off the training thread."""

from __future__ import annotations

import threading


def dispose(*old: object, hold_s: float = 0.0) -> None:
    """Let go of an old world `hold_s` from now.

    Closing connections takes longer than a switch; and a group that was given up with an exchange
    under way cannot be closed before that has timed out: it would hold the interpreter's lock for
    so long.
    """
    held = list(old)
    timer = threading.Timer(hold_s, held.clear)
    timer.name, timer.daemon = "resihp-dispose", True
    timer.start()
