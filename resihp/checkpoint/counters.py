"""What has been saved, skipped and failed, said once and counted always."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from threading import Lock

log = logging.getLogger("resihp.checkpoint")


@dataclass
class LevelCounters:
    """Of one level. Times in seconds; `durable_s` from `save` to complete, of the newest one."""

    saved: int = 0
    skipped: int = 0
    failed: int = 0
    newest_step: int | None = None
    durable_s: float | None = None


@dataclass
class Counters:
    """Of a `Checkpointer`.

    started      checkpoints begun
    no_buffer    checkpoints not begun, or given up at the fence, because every buffer was in use
    vetoed       checkpoints that another rank could not take part in
    failures     problems caught at the boundary with the training loop, by what they say
    blocking_s   time that the training thread spent in `save` and `fence`, all together
    """

    started: int = 0
    no_buffer: int = 0
    vetoed: int = 0
    blocking_s: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)
    levels: dict[str, LevelCounters] = field(default_factory=dict)


class ProblemLog:
    """Logs a problem when it is new, and that it has gone; in between it is silent."""

    def __init__(self) -> None:
        self._now: dict[str, str] = {}
        self._lock = Lock()

    def problem(self, where: str, problem: BaseException | str) -> None:
        """Say it unless it has just been said."""
        text = f"{type(problem).__name__}: {problem}" if isinstance(problem, Exception) else problem
        with self._lock:
            is_known = where in self._now
            self._now[where] = str(text)
        if not is_known:
            log.warning("%s: %s; training goes on without it", where, text)

    def well(self, where: str) -> None:
        """Say that it works again where a problem had been said."""
        with self._lock:
            was = self._now.pop(where, None)
        if was is not None:
            log.warning("%s: works again", where)


def seconds_since(begun_s: float) -> float:
    """By the monotonic clock."""
    return time.monotonic() - begun_s
