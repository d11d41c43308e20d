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

from .counters import Said
from .ranks import Claim, Ranks, shares
from .staging.filling import Filling

PATIENCE_S = 60.0
"""Longest wait of a rank with new shapes for the others to come to the same save."""


class Told(NamedTuple):
    """What all ranks hold, and which time it is that they say so."""

    version: int
    claims: Sequence[Sequence[Claim]]


@dataclass(eq=False)
class Ballot:
    """One rank's part in the round of one save.

    claims    what it holds; None where that cannot be saved
    version   of what was told when its plan was made; None: it has no plan for these shapes
    begun     the checkpoint that it has begun, or that it has begun none, once it knows
    told      what all hold, if they say so in this round
    """

    claims: Callable[[], Sequence[Claim] | None]
    version: int | None
    begun: Future[Filling | None] = field(default_factory=Future)
    told: Future[Told] = field(default_factory=Future)


class Agreement:
    """The rounds, one after the other in a thread of their own.

    give_up  called with what this rank has begun and another takes no part in
    newest   what was told last
    """

    def __init__(self, ranks: Ranks, said: Said, give_up: Callable[[Filling], None]) -> None:
        self._ranks, self._said, self._give_up = ranks, said, give_up
        self._thread = ThreadPoolExecutor(1, "resihp-checkpoint-agree")
        self.newest = Told(0, ())

    def cast(self, ballot: Ballot) -> None:
        """Take part in the next round."""
        self._thread.submit(self._round, ballot)

    def ask(self, ballot: Ballot) -> Told:
        """Take part in the next round, and let all ranks say what they hold; what they said."""
        self.cast(ballot)
        try:
            return ballot.told.result(PATIENCE_S)
        except TimeoutError:
            raise CheckpointError("the other ranks have not come to the same save") from None

    def close(self) -> None:
        """Take part in no more."""
        self._thread.shutdown(wait=False)

    def _round(self, ballot: Ballot) -> None:
        try:
            is_agreed = self._all_ready(ballot)
        except RuntimeError as problem:
            self._said.problem("agreement of the ranks", problem)
            if not ballot.told.done():
                ballot.told.set_exception(problem)
            return
        filling = ballot.begun.result()
        if filling is not None and not is_agreed:
            self._give_up(filling)

    def _all_ready(self, ballot: Ballot) -> bool:
        ranks, has_plan = self._ranks, ballot.version is not None
        if ranks.all_ready(has_plan and self._is_ready(ballot)):
            return True
        if ranks.all_ready(has_plan):
            return False
        try:
            claims = _usable(ranks.gather_behind(ballot.claims()))
        except ContractError as problem:  # the same on all ranks
            ballot.told.set_exception(problem)
            return False
        self.newest = Told(self.newest.version + 1, claims)
        ballot.told.set_result(self.newest)
        return ranks.all_ready(not has_plan and self._is_ready(ballot))

    def _is_ready(self, ballot: Ballot) -> bool:
        """Ready, and by the newest plan."""
        has_begun = ballot.begun.result() is not None
        return has_begun and ballot.version in (None, self.newest.version)


def _usable(everyones: Sequence[Sequence[Claim] | None]) -> Sequence[Sequence[Claim]]:
    """What all ranks hold. Raises `ContractError` where that cannot be shared out."""
    claims = [held for held in everyones if held is not None]
    if len(claims) < len(everyones):
        raise ContractError("state", "not every rank's can be saved")
    shares(claims)
    return claims
