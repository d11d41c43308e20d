"""What the first rank offers all others to take on next."""

from __future__ import annotations

from dataclasses import dataclass

from resihp.contracts import Plan


@dataclass(frozen=True)
class Offer:
    """The plan of the next world, and who takes part in the switch to it.

    members  all who are alive, and standbys that come in
    leaving  those of them that leave for good when it is taken on
    """

    plan: Plan
    members: tuple[int, ...]
    leaving: tuple[int, ...] = ()

    @property
    def staying(self) -> tuple[int, ...]:
        """Who is a member of the next world."""
        return tuple(rank for rank in self.members if rank not in self.leaving)
