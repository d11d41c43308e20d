"""Counters of saved, skipped and failed checkpoints, and a log without repetitions."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from threading import Lock

log = logging.getLogger("resihp.checkpoint")


@dataclass
class LevelCounters:
    """Counters of one level.

    newest_step  step of the newest complete checkpoint that this process has put there
    durable_s    seconds from `save` until that checkpoint was complete
    """

    saved: int = 0
    skipped: int = 0
    failed: int = 0
    newest_step: int | None = None
    durable_s: float | None = None


@dataclass
class Counters:
    """Counters of a `Checkpointer`.

    started      checkpoints begun
    no_buffer      checkpoints not begun, or abandoned at the fence, for want of room in the host
                   cache or of a level
    vetoed         checkpoints abandoned because another rank could not take part
    blocking_s     seconds that the training thread spent in `save` and `fence`, in total
    cache_wait_s   those of them in which a host cache smaller than the state was full, and the
                   fence waited for storage
    failures       exceptions caught at the boundary with the training loop, by message
    levels         counters of each level, by its name
    """

    started: int = 0
    no_buffer: int = 0
    vetoed: int = 0
    blocking_s: float = 0.0
    cache_wait_s: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)
    levels: dict[str, LevelCounters] = field(default_factory=dict)


class ProblemLog:
    """Logs the first of consecutive problems at each place, and the recovery from them."""

    def __init__(self) -> None:
        self._open: dict[str, str] = {}
        self._lock = Lock()

    def is_open(self, where: str) -> bool:
        """Return True if a problem has been logged and not resolved since."""
        with self._lock:
            return where in self._open

    def report(self, where: str, problem: BaseException | str) -> None:
        """Log a problem unless one is open at this place."""
        text = f"{type(problem).__name__}: {problem}" if isinstance(problem, Exception) else problem
        with self._lock:
            is_known = where in self._open
            self._open[where] = str(text)
        if not is_known:
            log.warning("%s: %s; training continues without it", where, text)

    def resolve(self, where: str) -> None:
        """Log the recovery if a problem is open at this place."""
        with self._lock:
            was_open = self._open.pop(where, None) is not None
        if was_open:
            log.warning("%s: works again", where)
