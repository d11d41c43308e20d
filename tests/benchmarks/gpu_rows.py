"""Measurements that do what a device might do to them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks._gpu_rows import NotRunError, Row


def good(value: float) -> Iterator[Row]:
    yield Row("good", value, "ms", 2.0, "twice that")


def failing() -> Iterator[Row]:
    yield Row("before the failure", 1.0)
    raise RuntimeError("an illegal memory access")


def impossible() -> Iterator[Row]:
    raise NotRunError("not possible: no such device")
    yield


def hanging(pids: str) -> Iterator[Row]:
    """Hangs, and so does a process of its own."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield Row("before the hang", 1.0)
    Path(pids).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)
