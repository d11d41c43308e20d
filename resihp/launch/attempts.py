"""Attempts of a job, and the documents by which its launchers agree on them. Pure.

1. Each launcher announces a `NodeOffer` when it starts.
2. The coordinator, one of the launchers, publishes an `Attempt`: the ranks of each node. Nodes
   without ranks in it are standbys.
3. The first launcher that finds a reason publishes the `AttemptEnd`; all then end their ranks.
4. Each launcher of the attempt reports another `NodeOffer` once its ranks have ended.
5. The coordinator publishes the next `Attempt`, or the `JobEnd`.

Node 0 is the coordinator where it hosts the store. In a store that outlives it, the first launcher
is, and when that one is lost another launcher of the attempt.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from .restart_policy import Failure


@dataclass(frozen=True)
class JobIdentity:
    """Job that a store is of, which its host writes first.

    run      identity of the job
    version  of ResiHP, whose launchers read these documents
    """

    run: str
    version: str


@dataclass(frozen=True)
class NodeOffer:
    """Ranks that a launcher can start in the next attempt.

    id           of the launcher, also where another one had the same node before
    node         index of the node, by which nodes are ordered
    local_ranks  those of its last attempt whose devices it can use; before one, all
    least        ranks with which the node takes part
    completed    all its ranks have completed the job
    leaves       it takes part in no further attempt
    memory       host and port of its server of checkpoints; None: it has none
    """

    id: str
    node: int
    local_ranks: tuple[int, ...]
    least: int = 1
    completed: bool = False
    leaves: bool = False
    memory: tuple[str, int] | None = None


@dataclass(frozen=True)
class NodeRanks:
    """Ranks of one node in an attempt.

    first        global rank of its first one
    local_ranks  of its offer, in the order of the global ranks
    least, memory  as in its offer
    """

    id: str
    node: int
    first: int
    local_ranks: tuple[int, ...]
    least: int = 1
    memory: tuple[str, int] | None = None

    @property
    def key(self) -> tuple[str, int]:
        """Equal in two attempts if the ranks are the same ones."""
        return self.id, len(self.local_ranks)

    @property
    def ranks(self) -> range:
        """Global ranks."""
        return range(self.first, self.first + len(self.local_ranks))


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks of the job.

    port, host
          of the store at which the ranks meet; no host: that of the launchers' store
    why   reason of the restart; empty for the first attempt
    plan  JSON of the plan that it follows, in the ranks of this attempt; empty: none
    token, memories
          secret and addresses of the servers of checkpoints on all nodes, also of standbys
    """

    number: int
    port: int
    nodes: tuple[NodeRanks, ...]
    why: str = ""
    plan: str = ""
    token: str = ""
    memories: tuple[tuple[str, int], ...] = ()
    host: str = ""

    @property
    def world_size(self) -> int:
        """Ranks of all nodes."""
        return sum(len(node.local_ranks) for node in self.nodes)

    def copies_at(self, launcher: str) -> tuple[str, int] | None:
        """Server that stores copies for a launcher's node: that of the node after it."""
        index = self.index_of(launcher)
        if index is None or len(self.nodes) == 1:
            return None
        return self.nodes[(index + 1) % len(self.nodes)].memory

    def index_of(self, launcher: str) -> int | None:
        """Position of a launcher's node; None for a standby."""
        return next((i for i, node in enumerate(self.nodes) if node.id == launcher), None)


class EndKind(StrEnum):
    """Reason to end the ranks of an attempt.

    failure  a rank failed or a node was lost: the others wait in vain and are killed
    plan     the sidecar's plan is to be taken on: ranks may finish their step
    notice   a node is about to be taken away: ranks may finish their step
    """

    FAILURE = "failure"
    PLAN = "plan"
    NOTICE = "notice"


@dataclass(frozen=True)
class AttemptEnd:
    """End of an attempt before its ranks have completed."""

    kind: EndKind
    why: str
    failure: Failure | None = None


@dataclass(frozen=True)
class JobEnd:
    """End of the job.

    status   exit status of its launchers, 0 where it was completed
    rank     the one whose failure ended it; None: it ended for another reason
    goes_on  it ends for one launcher alone, which leaves it to the others
    """

    status: int
    why: str = ""
    rank: int | None = None
    goes_on: bool = False


def place(
    offers: Sequence[NodeOffer],
    *,
    before: Sequence[str] = (),
    most: int,
    left_out: Mapping[str, Collection[int]] | None = None,
) -> tuple[NodeRanks, ...]:
    """Choose the nodes of the next attempt and number their ranks.

    offers    of all launchers that are left, by arrival
    before    launchers of the attempt before, in its order: they come first, standbys take the
              places that are left
    most      nodes of an attempt
    left_out  local ranks by launcher that the next attempt does without

    >>> offers = [NodeOffer("a", 0, (0, 1)), NodeOffer("b", 1, (0, 1)), NodeOffer("c", 2, (0, 1))]
    >>> [node.id for node in place(offers, before=["b", "a"], most=2)]
    ['b', 'a']
    >>> [(node.id, node.first) for node in place(offers, most=2, left_out={"a": [0, 1]})]
    [('b', 0), ('c', 2)]
    """
    order = {launcher: index for index, launcher in enumerate(before)}
    first_time = sorted(offers, key=lambda offer: offer.node) if not order else offers
    placed: list[NodeRanks] = []
    next_rank = 0
    for offer in sorted(first_time, key=lambda offer: order.get(offer.id, len(order))):
        without = (left_out or {}).get(offer.id, ())
        kept = tuple(rank for rank in offer.local_ranks if rank not in without)
        if offer.leaves or not kept or len(placed) == most:
            continue
        placed.append(NodeRanks(offer.id, offer.node, next_rank, kept, offer.least, offer.memory))
        next_rank += len(kept)
    return tuple(placed)
