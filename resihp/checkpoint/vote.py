"""What the ranks tell each other of each save, in the background and in the order of the saves.

A checkpoint that not every rank takes part in is given up by all. Where the state of any rank has
got new shapes, if only on that one, all say in the round of that save what they hold, and go by the
same new plan as soon as they come to their next one; until then their checkpoints are given up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from resihp.contracts import CheckpointError, ContractError

from .counters import ProblemLog
from .ranks import Ranks, SaveItem, assign_writers
from .staging.in_flight import InFlightCheckpoint

PATIENCE_S = 60.0
"""Longest wait of a rank with new shapes for the others to come to the same save."""


class GatheredItems(NamedTuple):
    """What all ranks hold, and which time it is that they say so."""

    version: int
    items: Sequence[Sequence[SaveItem]]


@dataclass(eq=False)
class Vote:
    """One rank's part in the round of one save.

    claims    what it holds; None where that cannot be saved
    version   of what was told when its plan was made; None: it has no plan for these shapes
    begun     the checkpoint that it has begun, or that it has begun none, once it knows
    told      what all hold, if they say so in this round
    """

    items: Callable[[], Sequence[SaveItem] | None]
    version: int | None
    begun: Future[InFlightCheckpoint | None] = field(default_factory=Future)
    told: Future[GatheredItems] = field(default_factory=Future)


class VoteQueue:
    """The rounds, one after the other in a thread of their own.

    give_up  called with what this rank has begun and another takes no part in
    newest   what was told last
    """

    def __init__(
        self, ranks: Ranks, said: ProblemLog, give_up: Callable[[InFlightCheckpoint], None]
    ) -> None:
        self._ranks, self._problems, self._give_up = ranks, said, give_up
        self._thread = ThreadPoolExecutor(1, "resihp-checkpoint-agree")
        self.newest = GatheredItems(0, ())

    def cast(self, vote: Vote) -> None:
        """Take part in the next round."""
        self._thread.submit(self._round, vote)

    def ask(self, vote: Vote) -> GatheredItems:
        """Take part in the next round, and let all ranks say what they hold; what they said."""
        self.cast(vote)
        try:
            return vote.told.result(PATIENCE_S)
        except TimeoutError:
            raise CheckpointError("the other ranks have not come to the same save") from None

    def close(self) -> None:
        """Take part in no more."""
        self._thread.shutdown(wait=False)

    def _round(self, vote: Vote) -> None:
        try:
            is_agreed = self._all_ready(vote)
        except RuntimeError as problem:
            self._problems.problem("votes of the ranks", problem)
            if not vote.told.done():
                vote.told.set_exception(problem)
            return
        checkpoint = vote.begun.result()
        if checkpoint is not None and not is_agreed:
            self._give_up(checkpoint)

    def _all_ready(self, vote: Vote) -> bool:
        ranks, has_plan = self._ranks, vote.version is not None
        if ranks.all_ready(has_plan and self._is_ready(vote)):
            return True
        if ranks.all_ready(has_plan):
            return False
        try:
            items = _usable(ranks.gather_in_background(vote.items()))
        except ContractError as problem:  # the same on all ranks
            vote.told.set_exception(problem)
            return False
        self.newest = GatheredItems(self.newest.version + 1, items)
        vote.told.set_result(self.newest)
        return ranks.all_ready(not has_plan and self._is_ready(vote))

    def _is_ready(self, vote: Vote) -> bool:
        """Ready, and by the newest plan."""
        has_begun = vote.begun.result() is not None
        return has_begun and vote.version in (None, self.newest.version)


def _usable(everyones: Sequence[Sequence[SaveItem] | None]) -> Sequence[Sequence[SaveItem]]:
    """What all ranks hold. Raises `ContractError` where that cannot be shared out."""
    items = [held for held in everyones if held is not None]
    if len(items) < len(everyones):
        raise ContractError("state", "not every rank's can be saved")
    assign_writers(items)
    return items
