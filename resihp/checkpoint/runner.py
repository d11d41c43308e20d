"""One thread for each level, so that a slow or failing level delays only itself."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from threading import Condition, Thread

from .counters import LevelCounters, Said, seconds_since
from .levels.contract import Level
from .priority import be_nice
from .staging.filling import Abandoned, Filling


class Runner:
    """Puts checkpoints into a level, one after the other.

    `then` is called after each put with the checkpoint and whether the level holds it now. The
    thread, and those that the level starts from it, are `niceness` below training's.
    """

    def __init__(
        self,
        level: Level,
        counters: LevelCounters,
        said: Said,
        then: Callable[[Filling, bool], None],
        niceness: int,
    ) -> None:
        self.level, self.counters = level, counters
        self._said, self._then, self._niceness = said, then, niceness
        self._waiting: deque[Filling] = deque()
        self._is_busy = self._is_closed = False
        self._changed = Condition()
        name = f"resihp-checkpoint-{type(level).__name__}"
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def has_room(self) -> bool:
        """Whether one more checkpoint would be taken."""
        with self._changed:
            limit = self.level.patience + (0 if self._is_busy else 1)
            return not self._is_closed and len(self._waiting) < limit

    def offer(self, filling: Filling) -> bool:
        """Take a checkpoint, or count it as skipped where too many wait."""
        if not self.has_room:
            self.counters.skipped += 1
            return False
        with self._changed:
            self._waiting.append(filling)
            self._changed.notify_all()
        return True

    def wait(self, timeout_s: float) -> bool:
        """Until everything taken has been put; whether that was so in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._waiting or self._is_busy), timeout_s)

    def close(self, deadline_s: float) -> None:
        """Finish what was taken, until then by the monotonic clock, and end the thread."""
        self.wait(deadline_s - time.monotonic())
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        try:
            self.level.close()
        except Exception as problem:  # noqa: BLE001 - any storage may fail in its own way
            self._said.problem(self.level.name, problem)

    def _run(self) -> None:
        be_nice(self._niceness)
        while (filling := self._next()) is not None:
            try:
                self._then(filling, self._put(filling))
            finally:
                filling.leave(self.level.name)
                del filling
                with self._changed:
                    self._is_busy = False
                    self._changed.notify_all()

    def _next(self) -> Filling | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            if not self._waiting:
                return None
            self._is_busy = True
            return self._waiting.popleft()

    def _put(self, filling: Filling) -> bool:
        try:
            self.level.put(filling)
        except Abandoned:
            return False
        except BaseException as problem:  # noqa: BLE001 - also one that would end the thread
            self.counters.failed += 1
            self._said.problem(self.level.name, problem)
            return False
        self._said.well(self.level.name)
        self.counters.saved += 1
        self.counters.newest_step = filling.identity.step
        self.counters.durable_s = seconds_since(filling.begun_s)
        return True
