"""Slow links: factors on transfers between ranks and on collectives of groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from statistics import median

from resihp.contracts import Job, Layout, LinkVerdict, Place, Replica, Status
from resihp.layout import transfer_pairs

from .cost_model import transfer_ms

Pair = tuple[int, int]

_SEVERAL = 2  # slow links between two nodes from which on all links between them count as slow


@dataclass(frozen=True)
class LinkSlowdowns:
    """Factors (above 1) on the times of transfers and collectives over slow links.

    links           by pair of ranks, the lower one first
    groups          ranks whose collectives are slow, and the factor
    nodes           by pair of nodes, the lower one first; a node holds consecutive ranks
    ranks_per_node  ranks of a node

    Only the factors of links that are known to be slow are kept: it is false without any.
    """

    links: Mapping[Pair, float] = field(default_factory=dict)
    groups: tuple[tuple[frozenset[int], float], ...] = ()
    nodes: Mapping[Pair, float] = field(default_factory=dict)
    ranks_per_node: int = 1

    @classmethod
    def of(cls, job: Job, verdicts: Iterable[LinkVerdict]) -> LinkSlowdowns:
        """Factors of the links and groups that are fail-slow; other verdicts do not count.

        Several slow links between ranks of the same two nodes have one cause, the cable or the
        switch between them: then all links between the two nodes count, with the median factor of
        the slow ones, or with their own where that is larger.
        """
        links: dict[Pair, float] = {}
        groups: dict[frozenset[int], float] = {}
        for verdict in verdicts:
            if verdict.status is not Status.FAIL_SLOW or verdict.slowdown <= 1.0:
                continue
            if verdict.group:
                known = frozenset(verdict.group)
                groups[known] = max(groups.get(known, 1.0), verdict.slowdown)
            else:
                pair = _ordered(verdict.rank, verdict.peer)
                links[pair] = max(links.get(pair, 1.0), verdict.slowdown)
        per_node = job.links.ranks_per_node
        between = defaultdict[Pair, list[float]](list)
        for (one, other), factor in links.items():
            between[one // per_node, other // per_node].append(factor)
        nodes = {
            pair: median(factors)
            for pair, factors in between.items()
            if pair[0] != pair[1] and len(factors) >= _SEVERAL
        }
        return cls(links, tuple(groups.items()), nodes, per_node)

    def __bool__(self) -> bool:
        return bool(self.links or self.groups)

    def between(self, one: int, other: int) -> float:
        """Factor on a transfer between two ranks; 1.0 unless their link is slow.

        The link of two ranks is slow as well if they are of a group with slow collectives: which
        of its links is the slow one is not known.
        """
        size = self.ranks_per_node
        found = self.links.get(_ordered(one, other), 1.0)
        if self.nodes:
            found = max(found, self.nodes.get(_ordered(one // size, other // size), 1.0))
        return max([found, *(f for ranks, f in self.groups if one in ranks and other in ranks)])

    def boundary(self, ranks: Sequence[int], following: Sequence[int]) -> float:
        """Factor on the transfers between two consecutive stages: that of the slowest link."""
        if not self.touches(ranks) or not self.touches(following):
            return 1.0
        return max(self.between(*pair) for pair in transfer_pairs(ranks, following))

    def collective(self, ranks: Collection[int]) -> float:
        """Factor on the collectives of a group: that of the slowest link between its ranks."""
        members = frozenset(ranks)
        if len(members) < 2 or not self.touches(members):
            return 1.0
        found = [1.0, *(f for known, f in self.groups if len(known & members) > 1)]
        found += [f for pair, f in self.links.items() if members.issuperset(pair)]
        nodes = {rank // self.ranks_per_node for rank in members}
        found += [f for pair, f in self.nodes.items() if nodes.issuperset(pair)]
        return max(found)

    def touches(self, ranks: Iterable[int]) -> bool:
        """True if one of the ranks has a slow link."""
        if not self:
            return False
        size, ends = self.ranks_per_node, self._ends
        slow = self._slow_nodes
        return any(rank in ends or rank // size in slow for rank in ranks)

    @cached_property
    def _ends(self) -> frozenset[int]:
        return frozenset().union(*self.links, *(ranks for ranks, _ in self.groups))

    @cached_property
    def _slow_nodes(self) -> frozenset[int]:
        return frozenset().union(*self.nodes)


ALL_LINKS_HEALTHY = LinkSlowdowns()


def boundaries_ms(job: Job, replica: Replica, links: LinkSlowdowns) -> list[float]:
    """Time of a transfer between every two consecutive stages, in milliseconds."""
    return [
        transfer_ms(job, links.boundary(one.ranks, other.ranks))
        for one, other in pairwise(replica.stages)
    ]


def is_in_use(layout: Layout, link: Pair) -> bool:
    """True if the two ranks transfer to each other in a layout, or are of one group."""
    places = [
        Place(rank, dp, pp, stage.ranks.index(rank))
        for dp, replica in enumerate(layout.replicas)
        for pp, stage in enumerate(replica.stages)
        for rank in stage.ranks
        if rank in link
    ]
    if len(places) < 2:
        return False
    one, other = places
    return one.dp == other.dp and (one.pp == other.pp or _meet(layout, one, other))


def _meet(layout: Layout, one: Place, other: Place) -> bool:
    """True if two ranks of a replica transfer to each other."""
    here, there = layout.stage_at(one), layout.stage_at(other)
    replica = layout.replicas[one.dp]
    wraps = replica.chunks > 1 and (one.pp, other.pp) == (0, len(replica.stages) - 1)
    if other.pp != one.pp + 1 and not wraps:
        return False
    return (one.rank, other.rank) in transfer_pairs(here.ranks, there.ranks)


def _ordered(one: int, other: int) -> Pair:
    return (one, other) if one <= other else (other, one)
