"""What the first rank offers all others to take on next."""

from __future__ import annotations

import json
from dataclasses import dataclass

from resihp.contracts import Plan, from_json, to_json


@dataclass(frozen=True)
class Proposal:
    """The plan of the next world, and who takes part in the switch to it.

    members  all who are alive, and standbys that come in
    leaving  those of them that leave for good when it is taken on
    gone     state that nobody alive holds, named; all of it then comes from the newest checkpoint
    """

    plan: Plan
    members: tuple[int, ...]
    leaving: tuple[int, ...] = ()
    gone: str = ""

    @property
    def staying(self) -> tuple[int, ...]:
        """Who is a member of the next world."""
        return tuple(rank for rank in self.members if rank not in self.leaving)


def write_offer(offer: Proposal | str) -> str:
    """As it stands in the store; a string is the reason why there is none and the job stops."""
    if isinstance(offer, str):
        return json.dumps({"stop": offer})
    return json.dumps({**vars(offer), "plan": to_json(offer.plan)})


def read_offer(raw: bytes) -> Proposal | str:
    """What `write_offer` wrote."""
    told = json.loads(raw)
    if "stop" in told:
        return str(told["stop"])
    plan = from_json(Plan, told["plan"])
    return Proposal(plan, tuple(told["members"]), tuple(told["leaving"]), told["gone"])
