"""Level pipeline: a worker thread per level, and the routes of checkpoints through levels."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Condition, Thread

from resihp._process_limits import lower_priority

from .counters import LevelCounters, ProblemLog
from .history import best_first
from .levels import Level, LocalDisk
from .staging.in_flight import (
    NO_FENCE_EXPECTED,
    CheckpointAbandoned,
    InFlightCheckpoint,
    Pace,
    ShardIdentity,
)


class LevelWorker:
    """Puts checkpoints into one level, in a thread of its own.

    on_put    called after each put, with level, checkpoint and whether the level now holds it
    niceness  of the thread, and of threads that the level starts from it
    tried     the last checkpoint put, failed or not, and not abandoned
    """

    def __init__(
        self,
        level: Level,
        counters: LevelCounters,
        problems: ProblemLog,
        on_put: Callable[[Level, InFlightCheckpoint, bool], None],
        niceness: int,
    ) -> None:
        self.level, self.counters = level, counters
        self._problems, self._on_put, self._niceness = problems, on_put, niceness
        self._waiting: deque[InFlightCheckpoint] = deque()
        self._putting: InFlightCheckpoint | None = None
        self._is_closed = False
        self.tried: ShardIdentity | None = None
        self._changed = Condition()
        name = f"resihp-checkpoint-{type(level).__name__}"
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def has_room(self) -> bool:
        """True if one more checkpoint would be accepted."""
        with self._changed:
            limit = self.level.patience + (0 if self._putting else 1)
            return not self._is_closed and len(self._waiting) < limit

    def offer(self, checkpoint: InFlightCheckpoint) -> bool:
        """Accept a checkpoint, or count it as skipped if too many are waiting."""
        if not self.has_room:
            self.counters.skipped += 1
            return False
        with self._changed:
            self._waiting.append(checkpoint)
            self._changed.notify_all()
        return True

    def withdraw_oldest(self) -> InFlightCheckpoint | None:
        """Remove the oldest waiting checkpoint and count it as skipped; None if none waits."""
        with self._changed:
            if not self._waiting:
                return None
            self.counters.skipped += 1
            return self._waiting.popleft()

    def release_unless_offered(self, checkpoint: InFlightCheckpoint) -> None:
        """Release the blocks of a checkpoint of which the offer was perhaps interrupted."""
        with self._changed:
            if checkpoint not in self._waiting and checkpoint is not self._putting:
                checkpoint.leave(self.level.name)
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait until every accepted checkpoint has been put; False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._waiting or self._putting), timeout_s)

    def close(self, deadline_s: float) -> None:
        """Put what was accepted, until the deadline of the monotonic clock, and end the thread."""
        self.wait(deadline_s - time.monotonic())
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        try:
            self.level.close()
        except Exception as problem:  # noqa: BLE001 - storage may fail in any way
            self._problems.report(self.level.name, problem)

    def _run(self) -> None:
        lower_priority(self._niceness)
        while (checkpoint := self._next()) is not None:
            try:
                self._on_put(self.level, checkpoint, self._put(checkpoint))
            finally:
                checkpoint.leave(self.level.name)
                del checkpoint
                with self._changed:
                    self._putting = None
                    self._changed.notify_all()

    def _next(self) -> InFlightCheckpoint | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            if not self._waiting:
                return None
            self._putting = self._waiting.popleft()
            return self._putting

    def _put(self, checkpoint: InFlightCheckpoint) -> bool:
        try:
            self.level.put(checkpoint)
        except CheckpointAbandoned:
            return False
        except BaseException as problem:  # noqa: BLE001 - also one that would end the thread
            self.tried = checkpoint.identity
            self.counters.failed += 1
            self._report(checkpoint.identity.step, problem)
            return False
        self.tried = checkpoint.identity
        self._problems.resolve(self.level.name)
        self.counters.saved += 1
        self.counters.newest_step = checkpoint.identity.step
        self.counters.durable_s = time.monotonic() - checkpoint.begun_s
        return True

    def _report(self, step: int, problem: BaseException) -> None:
        """Log a failed put, with the newest checkpoint that the level still has."""
        if self._problems.is_open(self.level.name):
            return
        newest = self.counters.newest_step
        if newest is None:
            with contextlib.suppress(Exception):
                newest = next((one.step for one in best_first(self.level.checkpoints())), None)
        text = f"step {step} not saved ({type(problem).__name__}: {problem}); newest there: "
        text += "none" if newest is None else f"step {newest}"
        self._problems.report(self.level.name, text)


class LevelPipeline:
    """The workers of all levels.

    The first levels receive a checkpoint as it is copied. If one of them is a disk, levels with
    `after_disk` receive it from there once it is complete.

    counters    of each level by its name; filled here
    on_put      called in a level's thread after each put
    niceness    see `Checkpointer`
    """

    def __init__(
        self,
        levels: Sequence[Level],
        counters: dict[str, LevelCounters],
        problems: ProblemLog,
        on_put: Callable[[], None],
        niceness: int,
    ) -> None:
        self._on_put = on_put
        self._disk = next((level for level in levels if isinstance(level, LocalDisk)), None)
        self._first: list[LevelWorker] = []
        self._after_disk: list[LevelWorker] = []
        for level in levels:
            counters[level.name] = LevelCounters()
            worker = LevelWorker(level, counters[level.name], problems, self._after_put, niceness)
            (self._after_disk if self._is_after_disk(level) else self._first).append(worker)

    @property
    def durable_s(self) -> float | None:
        """Seconds from `save` to complete, at the slowest level without `after_disk`, if known."""
        times = [w.counters.durable_s for w in self._first if not w.level.after_disk]
        return max((t for t in times if t is not None), default=None)

    def able(self) -> list[LevelWorker]:
        """List the first levels with room for one more checkpoint."""
        return [worker for worker in self._first if worker.has_room]

    def lacking(self, identity: ShardIdentity) -> list[LevelWorker]:
        """List the levels that have not tried to store this checkpoint.

        Levels after the disk are left out if the disk is listed: they receive it from there.
        """
        first = [worker for worker in self._first if worker.tried != identity]
        if any(worker.level is self._disk for worker in first):
            return first
        return first + [worker for worker in self._after_disk if worker.tried != identity]

    def pace(self, able: Sequence[LevelWorker], window_s: float) -> Pace | None:
        """Forecast of a disk that receives the checkpoint alone; None if other levels do too.

        The first checkpoint is copied at the fence alone, into pages allocated by then.
        """
        (one, *others) = able
        durable_s = one.counters.durable_s
        is_alone = isinstance(one.level, LocalDisk) and not others
        forecast = Pace(window_s, durable_s) if durable_s else NO_FENCE_EXPECTED
        return forecast if is_alone else None

    def expect(self, checkpoint: InFlightCheckpoint, receivers: Sequence[LevelWorker]) -> None:
        """Record in a checkpoint which levels will read it, before its copy begins."""
        has_disk = any(worker.level is self._disk for worker in receivers)
        direct = sum(worker in self._after_disk for worker in receivers)
        checkpoint.uploads = len(self._after_disk) if has_disk else direct
        checkpoint.taken = {worker.level.name: 0 for worker in receivers}
        checkpoint.receivers = frozenset(checkpoint.taken)

    def offer(self, checkpoint: InFlightCheckpoint, receivers: Sequence[LevelWorker]) -> None:
        """Give a checkpoint to the receivers; the other first levels skip it."""
        for worker in receivers:
            worker.offer(checkpoint)
        for worker in self._first:
            worker.counters.skipped += worker not in receivers

    def withdraw(
        self,
        checkpoint: InFlightCheckpoint,
        receivers: Sequence[LevelWorker],
        problem: BaseException,
    ) -> None:
        """End a checkpoint that perhaps not all of its receivers have been offered."""
        checkpoint.abandon(CheckpointAbandoned(f"interrupted by {problem!r}"))
        for worker in receivers:
            worker.release_unless_offered(checkpoint)

    def wait(self, deadline_s: float) -> bool:
        """Wait until every level has put what it accepted; False after the deadline.

        In the order of the routes, to include what the disk level passes on.
        """
        workers = (*self._first, *self._after_disk)
        return all(worker.wait(deadline_s - time.monotonic()) for worker in workers)

    def close(self, deadline_s: float) -> None:
        """Finish what was accepted, until the deadline, and end the threads."""
        for worker in (*self._first, *self._after_disk):
            worker.close(deadline_s)

    def _is_after_disk(self, level: Level) -> bool:
        return level.after_disk and self._disk is not None

    def _after_put(self, level: Level, checkpoint: InFlightCheckpoint, is_put: bool) -> None:
        """Pass checkpoints of the disk on, also ones that it failed to write."""
        self._on_put()
        if level is self._disk:
            for worker in self._after_disk:
                if not self._pass_on(checkpoint, is_put, worker):
                    checkpoint.uploaded()
        elif self._is_after_disk(level):
            checkpoint.uploaded()

    def _pass_on(self, checkpoint: InFlightCheckpoint, is_put: bool, worker: LevelWorker) -> bool:
        """Pass a checkpoint on from the disk, or from the cache if the disk failed."""
        name = worker.level.name
        if not is_put:
            if checkpoint.problem is not None:
                return False
            if not checkpoint.fall_back_to_copies(name):
                worker.counters.skipped += 1  # the state may have changed since
                return False
        elif len(checkpoint.identity.ranks) == 1 and not worker.has_room:
            self._replace_oldest(worker)
        is_accepted = worker.offer(checkpoint)
        if not is_accepted:
            checkpoint.leave(name)
        return is_accepted

    def _replace_oldest(self, worker: LevelWorker) -> None:
        """Make room for a newer checkpoint on a slow level.

        With several ranks the level would complete nothing if each replaced another step.
        """
        oldest = worker.withdraw_oldest()
        if oldest is not None:
            oldest.leave(worker.level.name)
            oldest.uploaded()
