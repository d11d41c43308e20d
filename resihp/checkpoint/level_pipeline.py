"""One thread for each level, so that a slow or failing level delays only itself."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Condition, Thread

from .counters import LevelCounters, ProblemLog, seconds_since
from .levels.level import Level
from .levels.local_disk import LocalDisk
from .staging.in_flight import UNHURRIED, CheckpointAbandoned, InFlightCheckpoint, Pace
from .thread_priority import lower_priority


class LevelWorker:
    """Puts checkpoints into a level, one after the other.

    `then` is called after each put with the checkpoint and whether the level holds it now. The
    thread, and those that the level starts from it, are `niceness` below training's.
    """

    def __init__(
        self,
        level: Level,
        counters: LevelCounters,
        said: ProblemLog,
        then: Callable[[InFlightCheckpoint, bool], None],
        niceness: int,
    ) -> None:
        self.level, self.counters = level, counters
        self._problems, self._then, self._niceness = said, then, niceness
        self._waiting: deque[InFlightCheckpoint] = deque()
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

    def offer(self, checkpoint: InFlightCheckpoint) -> bool:
        """Take a checkpoint, or count it as skipped where too many wait."""
        if not self.has_room:
            self.counters.skipped += 1
            return False
        with self._changed:
            self._waiting.append(checkpoint)
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
            self._problems.problem(self.level.name, problem)

    def _run(self) -> None:
        lower_priority(self._niceness)
        while (checkpoint := self._next()) is not None:
            try:
                self._then(checkpoint, self._put(checkpoint))
            finally:
                checkpoint.leave(self.level.name)
                del checkpoint
                with self._changed:
                    self._is_busy = False
                    self._changed.notify_all()

    def _next(self) -> InFlightCheckpoint | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            if not self._waiting:
                return None
            self._is_busy = True
            return self._waiting.popleft()

    def _put(self, checkpoint: InFlightCheckpoint) -> bool:
        try:
            self.level.put(checkpoint)
        except CheckpointAbandoned:
            return False
        except BaseException as problem:  # noqa: BLE001 - also one that would end the thread
            self.counters.failed += 1
            self._problems.problem(self.level.name, problem)
            return False
        self._problems.well(self.level.name)
        self.counters.saved += 1
        self.counters.newest_step = checkpoint.identity.step
        self.counters.durable_s = seconds_since(checkpoint.begun_s)
        return True


class LevelPipeline:
    """A thread for each level. The first ones take a checkpoint as it is copied; where one of them
    is a disk, levels with `after_disk` get it from there once it is complete.

    counters    of each level by its name; filled here
    handed_on   called in a level's thread after each checkpoint that it was given
    niceness    see `Checkpointer`
    """

    def __init__(
        self,
        levels: Sequence[Level],
        counters: dict[str, LevelCounters],
        said: ProblemLog,
        handed_on: Callable[[], None],
        niceness: int,
    ) -> None:
        self._handed_on = handed_on
        self._disk = next((level for level in levels if isinstance(level, LocalDisk)), None)
        self._workers: list[LevelWorker] = []
        for level in levels:
            counters[level.name] = LevelCounters()
            then = self._after(level)
            self._workers.append(LevelWorker(level, counters[level.name], said, then, niceness))

    @property
    def durable_s(self) -> float | None:
        """From `save` to complete, at the slowest level that waits for no disk; None: not known."""
        times = [r.counters.durable_s for r in self._workers if not r.level.after_disk]
        return max((t for t in times if t is not None), default=None)

    def able(self) -> list[LevelWorker]:
        """The first levels that have room for one more checkpoint."""
        return [worker for worker in self._first() if worker.has_room]

    def pace(self, able: Sequence[LevelWorker], window_s: float) -> Pace | None:
        """How a disk that alone takes the checkpoint is expected to get on; None: others take it.

        Of the first one nothing is known: it copies at the fence alone, into pages found by then.
        """
        (one, *others) = able
        durable_s = one.counters.durable_s
        is_alone = isinstance(one.level, LocalDisk) and not others
        known = Pace(window_s, durable_s) if durable_s else UNHURRIED
        return known if is_alone else None

    def expect(self, checkpoint: InFlightCheckpoint, able: Sequence[LevelWorker]) -> None:
        """Note in a checkpoint who will need it, before its copy starts."""
        checkpoint.uploads = len(self._fed_by_disk())
        checkpoint.taken = {worker.level.name: 0 for worker in able}

    def offer(self, checkpoint: InFlightCheckpoint, able: Sequence[LevelWorker]) -> None:
        """Give it to those that are able; the other first levels skip it."""
        for worker in self._first():
            if worker in able:
                worker.offer(checkpoint)
            else:
                worker.counters.skipped += 1

    def wait(self, deadline_s: float) -> bool:
        """Until every level has put what it took, or then by the monotonic clock; whether all did.

        In the levels' order, so that what one hands on to a later one is waited for too.
        """
        return all(worker.wait(deadline_s - time.monotonic()) for worker in self._workers)

    def close(self, deadline_s: float) -> None:
        """Finish what was taken, until then, and end the threads."""
        for worker in self._workers:
            worker.close(deadline_s)

    def _first(self) -> list[LevelWorker]:
        return [worker for worker in self._workers if not self._is_fed_by_disk(worker)]

    def _fed_by_disk(self) -> list[LevelWorker]:
        return [worker for worker in self._workers if self._is_fed_by_disk(worker)]

    def _is_fed_by_disk(self, worker: LevelWorker) -> bool:
        return worker.level.after_disk and self._disk is not None

    def _after(self, level: Level) -> Callable[[InFlightCheckpoint, bool], None]:
        """Hand a checkpoint from the disk on to the levels after it; also one that it failed on."""

        def hand_on(checkpoint: InFlightCheckpoint, is_put: bool) -> None:
            self._handed_on()
            if level is self._disk:
                for worker in self._fed_by_disk():
                    if not self._passes(checkpoint, is_put, worker):
                        checkpoint.uploaded()
            elif level.after_disk and self._disk is not None:
                checkpoint.uploaded()

        return hand_on

    def _passes(self, checkpoint: InFlightCheckpoint, is_put: bool, worker: LevelWorker) -> bool:
        """Whether a checkpoint goes on from the disk, or from the buffer where the disk failed."""
        if not is_put:
            if checkpoint.problem is not None:
                return False
            if not checkpoint.fall_back_to_buffer():
                worker.counters.skipped += 1  # parts of the buffer may hold newer bytes already
                return False
            checkpoint.done_with(worker.level.name, 0)
        is_taken = worker.offer(checkpoint)
        if not is_taken:
            checkpoint.leave(worker.level.name)
        return is_taken
