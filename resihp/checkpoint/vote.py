"""Votes of the ranks on each save, in the background and in the order of the saves.

A checkpoint that not every rank takes part in is abandoned by all, and a level that not every rank
puts it into does without. If the state of any rank has new shapes, all ranks exchange their save
items in the vote on that save, and plan anew at their next save; until then their checkpoints are
abandoned. Without an answer, because a rank is lost or too late, every rank keeps its own. A late
rank is waited for, in the background; only `close` and the end of the program do not wait long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from threading import Condition, Thread
from typing import NamedTuple

from resihp._shutdown import start_thread
from resihp.contracts import CheckpointError, ContractError

from .counters import ProblemLog
from .ranks import Ranks, SaveItem, assign_writers
from .staging.in_flight import InFlightCheckpoint

PATIENCE_S = 60.0
"""Longest wait for the others to reach the same save: of a rank with new shapes, and at the end."""


class GatheredItems(NamedTuple):
    """Save items of all ranks; `version` counts the exchanges."""

    version: int
    items: Sequence[Sequence[SaveItem]]


@dataclass(eq=False)
class Vote:
    """Vote of this rank on one save.

    items     returns its save items; None if its state cannot be saved
    version   exchange of items that its plan is based on; None: it has no plan for these shapes
    begun     its checkpoint; None if it has not begun one
    gathered  items of all ranks, if they are exchanged in this vote
    is_over   True once its checkpoint has been told a result
    """

    items: Callable[[], Sequence[SaveItem] | None]
    version: int | None
    begun: Future[InFlightCheckpoint | None] = field(default_factory=Future)
    gathered: Future[GatheredItems] = field(default_factory=Future)
    is_over: bool = False


class VoteQueue:
    """Holds the votes one after the other, in a thread of its own.

    levels   names of the levels, the same number on all ranks
    abandon  called with this rank's checkpoint if another rank does not take part
    newest   the latest exchange of items
    """

    def __init__(
        self,
        ranks: Ranks,
        levels: Sequence[str],
        problems: ProblemLog,
        abandon: Callable[[InFlightCheckpoint], None],
    ) -> None:
        self._ranks, self._levels = ranks, tuple(levels)
        self._problems, self._abandon = problems, abandon
        self.newest = GatheredItems(0, ())
        self._changed, self._pending = Condition(), deque[Vote]()
        self._late: Future[GatheredItems] | None = None
        self._queue = SimpleQueue[Vote | None]()
        # An executor's thread would be joined at the end of the program, however long a peer takes.
        thread = Thread(target=self._run, name="resihp-checkpoint-vote", daemon=True)
        start_thread(thread, partial(self._queue.put, None))

    def submit(self, vote: Vote) -> None:
        """Take part in the next vote."""
        with self._changed:
            self._pending.append(vote)
        self._queue.put(vote)

    def submit_and_gather(self, vote: Vote) -> GatheredItems:
        """Take part in the next vote, and exchange save items in it.

        Waits `PATIENCE_S` for the other ranks, once until they have caught up.
        """
        self.submit(vote)
        is_late = self._late is not None and not self._late.done()
        try:
            return vote.gathered.result(0 if is_late else PATIENCE_S)
        except TimeoutError:
            self._late = vote.gathered
            raise CheckpointError("the other ranks have not reached the same save") from None

    def close(self, timeout_s: float) -> None:
        """End the votes and the thread.

        After the time, or `PATIENCE_S` if that is shorter, this rank keeps its own checkpoints of
        the votes that have not ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._pending, min(timeout_s, PATIENCE_S))
            left = [vote for vote in self._pending if vote.begun.done()]
        for vote in left:
            self._end(vote, None)
        self._queue.put(None)

    def _run(self) -> None:
        while (vote := self._queue.get()) is not None:
            self._hold(vote)
            with self._changed:
                self._pending.remove(vote)
                self._changed.notify_all()

    def _hold(self, vote: Vote) -> None:
        agreed: int | None = None
        try:
            agreed = self._agreed(vote)
        except Exception as problem:  # noqa: BLE001 - the checkpoint must be told, and votes go on
            self._problems.report("vote of the ranks", problem)
            if not vote.gathered.done():
                vote.gathered.set_exception(problem)
        self._end(vote, agreed)

    def _end(self, vote: Vote, agreed: int | None) -> None:
        """Tell the checkpoint of a vote the bits of its levels; None: unknown. The first counts."""
        checkpoint = vote.begun.result()
        with self._changed:
            is_known, vote.is_over = vote.is_over, True
        if checkpoint is None or is_known:
            return
        if agreed is None:
            checkpoint.settle(checkpoint.receivers)
            return
        if not agreed:
            self._abandon(checkpoint)
        checkpoint.settle(name for bit, name in enumerate(self._levels) if agreed >> bit & 1)

    def _agreed(self, vote: Vote) -> int:
        """Bits of the levels into which every rank puts its checkpoint."""
        ranks, has_plan = self._ranks, vote.version is not None
        if agreed := ranks.common_bits(self._receivers(vote) if has_plan else 0):
            return agreed
        if ranks.common_bits(has_plan):
            return 0
        held = ranks.gather_in_background(vote.items())
        try:
            items = [each for each in held if each is not None]
            if len(items) < len(held):
                raise ContractError("state", "cannot be saved on every rank")
            assign_writers(items)
        except ContractError as problem:  # the same on all ranks
            vote.gathered.set_exception(problem)
            return 0
        self.newest = GatheredItems(self.newest.version + 1, items)
        vote.gathered.set_result(self.newest)
        return ranks.common_bits(0 if has_plan else self._receivers(vote))

    def _receivers(self, vote: Vote) -> int:
        """Bits of the levels that receive this rank's checkpoint; 0 without one by this plan."""
        checkpoint = vote.begun.result()
        if checkpoint is None or vote.version not in (None, self.newest.version):
            return 0
        return sum(1 << i for i, name in enumerate(self._levels) if name in checkpoint.receivers)
