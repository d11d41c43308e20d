"""The levels of a checkpointer: who takes a checkpoint, and who hands it on to whom."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from .counters import LevelCounters, Said
from .levels.contract import Level
from .levels.disk import LocalDisk
from .runner import Runner
from .staging.filling import UNHURRIED, Filling, Pace


class Cascade:
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
        said: Said,
        handed_on: Callable[[], None],
        niceness: int,
    ) -> None:
        self._handed_on = handed_on
        self._disk = next((level for level in levels if isinstance(level, LocalDisk)), None)
        self._runners: list[Runner] = []
        for level in levels:
            counters[level.name] = LevelCounters()
            then = self._after(level)
            self._runners.append(Runner(level, counters[level.name], said, then, niceness))

    @property
    def durable_s(self) -> float | None:
        """From `save` to complete, at the slowest level that waits for no disk; None: not known."""
        times = [r.counters.durable_s for r in self._runners if not r.level.after_disk]
        return max((t for t in times if t is not None), default=None)

    def able(self) -> list[Runner]:
        """The first levels that have room for one more checkpoint."""
        return [runner for runner in self._first() if runner.has_room]

    def pace(self, able: Sequence[Runner], window_s: float) -> Pace | None:
        """How a disk that alone takes the checkpoint is expected to get on; None: others take it.

        Of the first one nothing is known: it copies at the fence alone, into pages found by then.
        """
        (one, *others) = able
        durable_s = one.counters.durable_s
        is_alone = isinstance(one.level, LocalDisk) and not others
        known = Pace(window_s, durable_s) if durable_s else UNHURRIED
        return known if is_alone else None

    def expect(self, filling: Filling, able: Sequence[Runner]) -> None:
        """Note in a checkpoint who will need it, before its copy starts."""
        filling.uploads = len(self._fed_by_disk())
        filling.taken = {runner.level.name: 0 for runner in able}

    def offer(self, filling: Filling, able: Sequence[Runner]) -> None:
        """Give it to those that are able; the other first levels skip it."""
        for runner in self._first():
            if runner in able:
                runner.offer(filling)
            else:
                runner.counters.skipped += 1

    def wait(self, deadline_s: float) -> bool:
        """Until every level has put what it took, or then by the monotonic clock; whether all did.

        In the levels' order, so that what one hands on to a later one is waited for too.
        """
        return all(runner.wait(deadline_s - time.monotonic()) for runner in self._runners)

    def close(self, deadline_s: float) -> None:
        """Finish what was taken, until then, and end the threads."""
        for runner in self._runners:
            runner.close(deadline_s)

    def _first(self) -> list[Runner]:
        return [runner for runner in self._runners if not self._is_fed_by_disk(runner)]

    def _fed_by_disk(self) -> list[Runner]:
        return [runner for runner in self._runners if self._is_fed_by_disk(runner)]

    def _is_fed_by_disk(self, runner: Runner) -> bool:
        return runner.level.after_disk and self._disk is not None

    def _after(self, level: Level) -> Callable[[Filling, bool], None]:
        """Hand a checkpoint from the disk on to the levels after it; also one that it failed on."""

        def hand_on(filling: Filling, is_put: bool) -> None:
            self._handed_on()
            if level is self._disk:
                for runner in self._fed_by_disk():
                    if not self._passes(filling, is_put, runner):
                        filling.uploaded()
            elif level.after_disk and self._disk is not None:
                filling.uploaded()

        return hand_on

    def _passes(self, filling: Filling, is_put: bool, runner: Runner) -> bool:
        """Whether a checkpoint goes on from the disk, or from the buffer where the disk failed."""
        if not is_put:
            if filling.problem is not None:
                return False
            if not filling.falls_back():
                runner.counters.skipped += 1  # parts of the buffer may hold newer bytes already
                return False
            filling.done_with(runner.level.name, 0)
        is_taken = runner.offer(filling)
        if not is_taken:
            filling.leave(runner.level.name)
        return is_taken
