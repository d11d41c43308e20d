"""What a process holds of the system, by kind, so that a leak has a name."""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

LIMIT_S = 30.0
"""For generations that are being let go; what is left then counts as held."""

_PASSING = "resihp-acknowledge"


def held() -> dict[str, Any]:
    """Counts of threads and files by kind; memory in use and resident, in KiB.

    Waits until the generations that were let go are gone, so that it counts the present one alone.
    """
    for thread in threading.enumerate():
        if thread.name in ("resihp-close", "resihp-release"):
            thread.join(LIMIT_S)
    return {
        "threads": dict(Counter(_threads())),
        "files": dict(Counter(_files())),
        "used_kib": _used_bytes() >> 10,
        "resident_kib": resident_bytes() >> 10,
    }


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def _threads() -> Iterator[str]:
    """Python's own by their names, the others by those that the system knows."""
    yield from (thread.name for thread in threading.enumerate() if thread.name != _PASSING)
    yield from native_threads().values()


def native_threads() -> dict[str, str]:
    """Names, by the ids that the system gives them, of the threads that are not Python's own."""
    own = {str(thread.native_id) for thread in threading.enumerate()}
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has just ended
            name = (task / "comm").read_text().strip()
            if task.name not in own and not name.startswith("python"):
                found[task.name] = name
    return found


def _files() -> Iterator[str]:
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself
            yield re.sub(r"\d+", "N", os.readlink(f"/proc/self/fd/{descriptor}"))


class _Allocated(ctypes.Structure):
    """What glibc tells of its allocator (mallinfo2(3)), in bytes."""

    _fields_ = [
        *((f"_{place}", ctypes.c_size_t) for place in range(4)),
        ("mapped", ctypes.c_size_t),  # hblkhd
        *((f"_{place}", ctypes.c_size_t) for place in range(5, 7)),
        ("used", ctypes.c_size_t),  # uordblks
        *((f"_{place}", ctypes.c_size_t) for place in range(8, 10)),
    ]


def _used_bytes() -> int:
    """Allocated and not freed; unlike resident memory, not what the allocator keeps for later."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Allocated
    found = mallinfo2()
    return int(found.used + found.mapped)
