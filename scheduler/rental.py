"""When a dear change pays although nobody knows how long its reason will last: ski rental."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from resihp.contracts import Plan


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A better layout that is dear to get to: what it saves in each step, what its moves cost."""

    plan: Plan
    saved_ms: float
    cost_ms: float

    @property
    def pays_after(self) -> int:
        """Steps in which it saves what its moves cost."""
        return math.ceil(self.cost_ms / self.saved_ms)


@dataclass(frozen=True, kw_only=True)
class Rental:
    """What staying has cost since the last dear change, and the offer that it is weighed against.

    The rule of break-even (Karlin, Manasse, Rudolph and Sleator, 1988): stay as long as what
    staying has cost, with the step ahead, is no more than the change costs. Whenever the reason
    goes away, that lost at most twice what a clairvoyant loses who knows how long every situation
    lasts and decides in each whether to change. What was lost in earlier situations counts: a
    device that is slow again and again is acted on as one that stays slow.
    """

    lost_ms: float = 0.0
    offer: Offer | None = None

    @property
    def due(self) -> bool:
        """Whether the offer is to be taken before the next step."""
        offer = self.offer
        return offer is not None and self.lost_ms + offer.saved_ms > offer.cost_ms

    @property
    def steps_left(self) -> int | None:
        """Steps until the offer is due if nothing changes; None without one."""
        if self.offer is None:
            return None
        return max(0, int((self.offer.cost_ms - self.lost_ms) // self.offer.saved_ms))

    def stepped(self) -> Rental:
        """After one more step in the present layout."""
        return replace(self, lost_ms=self.lost_ms + self.offer.saved_ms) if self.offer else self

    def offered(self, offer: Offer | None) -> Rental:
        """In a new situation, with what would be better in it."""
        return replace(self, offer=offer)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The plan to change to now, None to stay, and the account to decide by from then on.

    `best` is the quickest other layout, also where it saves too little to be offered; None where
    none is quicker.
    """

    plan: Plan | None
    rental: Rental = Rental()
    best: Offer | None = None
