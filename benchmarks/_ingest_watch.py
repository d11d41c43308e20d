"""What the ingest benchmark watches: processor time and memory of processes, and verdicts."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import urllib3

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


def spent_s(pid: int) -> float:
    """Processor seconds of a process and all its descendants, those that have ended included."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return 0.0
    times = stat.rsplit(")", 1)[1].split()[
        11:15
    ]  # user and system, its own and its dead children's
    return sum(map(int, times)) * _TICK_S + sum(map(spent_s, children(pid)))


def memory_mb(pid: int, which: str = "VmRSS") -> float:
    """Resident memory of a process; with "VmHWM" the largest so far."""
    lines = _read(Path(f"/proc/{pid}/status")).splitlines()
    return next((int(s.split()[1]) / 1e3 for s in lines if s.startswith(which)), 0.0)


def children(pid: int) -> list[int]:
    """Child processes of all threads of a process."""
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in found for child in _read(path).split()]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def parts_of_service(supervisor: int) -> dict[str, list[int]]:
    """Child processes of a supervisor by their part of the service: API, worker, Redis."""
    parts: dict[str, list[int]] = {"api": [], "worker": [], "redis": []}
    for pid in children(supervisor):
        name = _read(Path(f"/proc/{pid}/comm"))
        for part, marks in _MARKS.items():
            if name.startswith(marks):
                parts[part].append(pid)
    return parts


_MARKS = {"api": ("resihp-api",), "worker": ("resihp-worker",), "redis": ("redis", "valkey")}


@dataclass(frozen=True)
class Named:
    """A rank that a verdict named: when it was seen, and the last step taken into account."""

    rank: int
    status: str
    seen_s: float
    step: int | None


class VerdictWatch:
    """Follows the event stream of a job, and notes when ranks are found slow or stopped."""

    def __init__(self, url: str, job: str) -> None:
        self._url = f"{url}/v1/jobs/{job}/events"
        self._named: dict[int, Named] = {}
        threading.Thread(target=self._follow, daemon=True).start()

    @property
    def named(self) -> list[Named]:
        """The first verdict of each rank that was named."""
        return list(self._named.values())

    def _follow(self) -> None:
        try:
            for document in self._events():
                if document.get("kind") != "verdict":
                    continue
                verdict = document["verdict"]
                rank, status = verdict["rank"], verdict["status"]
                if status in ("fail_slow", "fail_stop"):
                    found = Named(rank, status, time.monotonic(), verdict["step"])
                    self._named.setdefault(rank, found)
        except (urllib3.exceptions.HTTPError, OSError):
            return  # the service has ended

    def _events(self) -> Iterator[dict[str, Any]]:
        answer = urllib3.request("GET", self._url, preload_content=False, timeout=None)
        rest = b""
        while content := answer.read1():
            *lines, rest = (rest + content).split(b"\n")
            yield from (json.loads(line[5:]) for line in lines if line.startswith(b"data:"))
