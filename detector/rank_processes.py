"""Processes of the ranks, as their heartbeats tell of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from resihp.contracts import Heartbeat, Status, Verdict

from .evidence.status import FAIL_STOP, StatusTable
from .hangs import Hangs, HangTracker
from .heartbeat import HeartbeatTracker
from .persistence import Persistent
from .rank_table import RankTable
from .sensors import Sensors

_HANG_CONFIDENCE = 0.9


class RankProcesses(Persistent):
    """The newest process of each rank: its signs of life, the place of its training thread, and its
    sensors. Times are seconds of the heartbeats' clock."""

    _saved = ("sensors", "_newest", "_failed", "_heartbeats", "_hangs", "_hanging", "_now")
    _newest: dict[int, tuple[str, int]]
    _failed: dict[int, str]
    _hanging: Hangs

    def __init__(self, places: RankTable) -> None:
        self.sensors = Sensors(places)
        self._newest, self._failed = {}, {}
        self._heartbeats, self._hangs = HeartbeatTracker(), HangTracker()
        self._hanging = Hangs()
        self._now = 0.0

    def is_another(self, rank: int, heartbeat: Heartbeat) -> bool:
        """Return whether a heartbeat is the first of a process that works as a rank."""
        process, _ = self._newest.get(rank, ("", 0))
        return not heartbeat.left and heartbeat.process not in ("", process)

    def is_newest(self, rank: int, heartbeat: Heartbeat) -> bool:
        """Note the process of a rank; return whether the heartbeat is its newest."""
        process, sequence = self._newest.get(rank, ("", 0))
        if heartbeat.process and heartbeat.process == process:
            if heartbeat.sequence <= sequence:
                return False
        elif heartbeat.left and process:
            return not heartbeat.process
        elif heartbeat.process != process:
            self.forget([rank])
        self._newest[rank] = (heartbeat.process, heartbeat.sequence)
        return True

    def beat(
        self, ranks: Sequence[int], heartbeat: Heartbeat, now: float, table: StatusTable
    ) -> list[int]:
        """Take the newest heartbeat of ranks; return those whose sensors now tell other causes."""
        self._heartbeats.beat(ranks, now)
        for rank in ranks:
            self._hangs.observe(rank, heartbeat, now)
        return [rank for rank in ranks if self.sensors.observe(rank, heartbeat, table)]

    def heard(self, rank: int, now: float) -> None:
        """Take records of a rank as a sign of life and of progress."""
        self._heartbeats.beat([rank], now)
        self._hangs.moved(rank, now)

    def knows(self, rank: int) -> bool:
        """Return whether a rank sends heartbeats."""
        return self._heartbeats.knows(rank)

    def end(self, ranks: Collection[int], *, failed: bool) -> None:
        """Take that the processes of ranks have ended, after an error or not."""
        self.forget(ranks)
        if failed:
            self._heartbeats.fail(ranks)

    def fail(self, ranks: Collection[int]) -> None:
        """Note that the newest processes of ranks have failed, as others report."""
        for rank in ranks:
            self._failed[rank] = self._newest.get(rank, ("", 0))[0]

    def is_successor(self, rank: int, heartbeat: Heartbeat) -> bool:
        """Return whether a heartbeat is of another process than the one that failed; False where
        either is not known, for it may be a late one of the dead process."""
        failed = self._failed.get(rank)
        return bool(failed and heartbeat.process) and heartbeat.process != failed

    def revive(self, rank: int) -> None:
        """Take that a rank works that was held for dead; a silence of it begins anew."""
        self._failed.pop(rank, None)
        self._heartbeats.revive(rank)

    def forget(self, ranks: Collection[int]) -> None:
        """Drop what is known of ranks."""
        self._heartbeats.forget(ranks)
        self._hangs.forget(ranks)
        self.sensors.forget(ranks)
        for rank in ranks:
            self._newest.pop(rank, None)

    def keep(self, is_known: Callable[[int], bool]) -> None:
        """Drop what is known of all other ranks."""
        self.forget([rank for rank in self._newest if not is_known(rank)])
        self._heartbeats.keep(is_known)

    def silent(self, now: float) -> list[int]:
        """Ranks whose heartbeats have stopped."""
        return self._heartbeats.dead(now)

    def take_last_place(self, rank: int) -> tuple[str, ...]:
        """Drop where a rank was when it fell silent; return that as evidence."""
        last_seen = self._hangs.last_seen(rank)
        self._hangs.forget([rank])
        return last_seen

    @property
    def newest_step(self) -> int:
        """Newest step that a heartbeat told of and no record since; -1 without one."""
        return self._hangs.newest_step

    def look_for_hangs(self, now: float, places: RankTable, table: StatusTable) -> set[int]:
        """Find the ranks that hang now; return those on which that changes the verdict.

        While a rank has stopped all others may wait for it, and while one is silent nothing new is
        said.
        """
        before, self._now = self._hanging, now
        if (table.status == FAIL_STOP).any():
            self._hanging = Hangs()
        elif not self._heartbeats.any_quiet(now):
            self._hanging = self._hangs.hangs(now, places)
        ranks = before.by_rank.keys() | self._hanging.by_rank.keys()
        return {rank for rank in ranks if before.naming(rank) != self._hanging.naming(rank)}

    @property
    def hanging(self) -> list[int]:
        """Ranks that hang, in order."""
        return sorted(self._hanging.by_rank)

    def asked_stacks(self) -> tuple[int, ...]:
        """A few of the ranks that hang, and one that waits for them, whose stacks are not known."""
        return self._hangs.asked_stacks() if self._hanging.by_rank else ()

    def with_hang(self, verdict: Verdict) -> Verdict:
        """A verdict, with the hang of the rank's training thread if it hangs: its process has not
        failed."""
        hanging, hang = self._hanging, self._hanging.by_rank.get(verdict.rank)
        if hang is None:
            return verdict
        evidence = (*hanging.evidence(verdict.rank, self._now), *verdict.evidence)
        if verdict.status in (Status.FAIL_STOP, Status.FAIL_SLOW):
            return replace(verdict, evidence=evidence)
        return replace(
            verdict,
            status=Status.SUSPECT if hanging.named else Status.INCONCLUSIVE,
            since_step=hang.position.step,
            confidence=_HANG_CONFIDENCE if hanging.named else 0.5,
            evidence=evidence,
        )
