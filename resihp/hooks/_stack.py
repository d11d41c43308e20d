"""Python stack of a thread, as another thread sees it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

_MOST_FRAMES = 16
_MOST_CHARACTERS = 120
_OWN = ("resihp.hooks", "resihp.instrumentation")


def stack_of(threads: Iterable[int]) -> tuple[str, ...]:
    """Return the frames of threads, the innermost first: ("loader.py:31 in read", ...).

    File names without folders, lines and functions, no values; at most 16 frames, none of the
    hooks. A thread that runs no Python code has none. Looking costs the threads nothing but the
    time in which this one holds Python's lock.
    """
    frames = sys._current_frames()
    lines: list[str] = []
    for thread in dict.fromkeys(threads):
        frame = frames.get(thread)
        while frame is not None and len(lines) < _MOST_FRAMES:
            code = frame.f_code
            if not str(frame.f_globals.get("__name__", "")).startswith(_OWN):
                place = f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"
                lines.append(_printable(place[:_MOST_CHARACTERS]))
            frame = frame.f_back
    return tuple(lines)


def _printable(text: str) -> str:
    """Replace what UTF-8 cannot express: bytes of a file name that are none."""
    return text.encode(errors="replace").decode()
