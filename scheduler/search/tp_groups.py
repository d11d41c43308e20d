"""Tensor-parallel groups of the living ranks: members, shares by speed, costs as arrays."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from heapq import heapify, heapreplace

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import Job, Layout

from ..cost_model import GroupCost, group_cost, layer_cost
from ..greedy import greedy_allocation
from ..link_costs import ALL_LINKS_HEALTHY, LinkSlowdowns

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class TPGroup:
    """Living ranks of a tensor-parallel group with their shares.

    column  pipeline stage of the initial layout whose weights the ranks hold; groups of one column
            are peers and can exchange places
    """

    ranks: tuple[int, ...]
    shares: tuple[int, ...]
    column: int
    cost: GroupCost


@dataclass(frozen=True, eq=False)
class GroupTable:
    """All groups, with arrays indexed by group; groups of equal cost share a number in `kind`."""

    groups: tuple[TPGroup, ...]
    forward_ms: Floats
    backward_ms: Floats
    embedding_ms: Floats
    head_ms: Floats
    widest: Floats
    kind: NDArray[np.intp]

    @classmethod
    def of(cls, groups: Sequence[TPGroup], links: LinkSlowdowns = ALL_LINKS_HEALTHY) -> GroupTable:
        """Table of these groups. One with a slow link costs like no other: its transfers depend on
        the stages beside it."""
        rows = [(*astuple(g.cost), max(g.shares) / sum(g.shares)) for g in groups]
        numbers: dict[object, int] = {}
        kind = [
            numbers.setdefault((row, g.ranks) if links.touches(g.ranks) else row, len(numbers))
            for row, g in zip(rows, groups, strict=True)
        ]
        forward, backward, embedding, head, widest = np.array(rows, float).reshape(-1, 5).T
        numbered = np.array(kind, np.intp)
        return cls(tuple(groups), forward, backward, embedding, head, widest, numbered)


def share_units(job: Job, layout: Layout) -> int:
    """Units into which every layer is cut, so that each stage can hold it as it does in `layout`.

    KV groups, of which several ranks may hold a copy, or without a model the least common multiple
    of the sums of all stages' shares.
    """
    sums = {sum(stage.shares) for replica in layout.replicas for stage in replica.stages}
    return max(job.model.kv_heads, *sums) if job.model else math.lcm(*sums)


def balanced_shares(
    speeds: Sequence[float], units: int, *, fixed: float = 0.0, even: bool = False
) -> tuple[int, ...]:
    """Units of each member that minimise the time of the slowest one; 0 drops a member.

    A member of speed p with q units takes `(fixed + q) / p`. Exact: greedy allocation, with ties
    to the member of fewer units. `even` gives equal shares to as many members as divide the
    units, for runtimes without uneven shards.

    >>> balanced_shares((1.0, 1.0, 0.5, 1.0), 8)
    (3, 2, 1, 2)
    >>> balanced_shares((1.0, 0.0, 0.1), 4)
    (4, 0, 0)
    """
    if even:
        return _even(speeds, units)
    able = [i for i, p in enumerate(speeds) if p > 0.0]
    counts = greedy_allocation(
        [0] * len(able), units, lambda k, count: ((fixed + count) / speeds[able[k]], count)
    )
    held = dict(zip(able, counts, strict=True))
    return tuple(held.get(i, 0) for i in range(len(speeds)))


def _even(speeds: Sequence[float], units: int) -> tuple[int, ...]:
    """Equal shares for the degree k, a divisor of `units`, that maximises `k * min(speed)`."""
    fastest = sorted((i for i, p in enumerate(speeds) if p > 0.0), key=lambda i: (-speeds[i], i))
    degrees = [k for k in range(1, len(fastest) + 1) if units % k == 0]
    best = max(degrees, key=lambda k: (k * speeds[fastest[k - 1]], k), default=0)
    chosen = set(fastest[:best])
    return tuple(units // best if i in chosen else 0 for i in range(len(speeds)))


class GroupBuilder:
    """Builder of groups with the best shares, cached by speeds and nodes of the members.

    present  shares by the ranks of a stage, which are kept where all of them are alive; no member
             is then left out for being slow, and other groups have shares as even as they go, so
             that every rank holds as little as it can. None: shares and members by speed
    """

    def __init__(
        self,
        job: Job,
        speeds: Mapping[int, float],
        units: int,
        links: LinkSlowdowns = ALL_LINKS_HEALTHY,
        *,
        even: bool = False,
        present: Mapping[tuple[int, ...], tuple[int, ...]] | None = None,
    ) -> None:
        self._present = present
        self._job, self._speeds, self._units, self._even = job, speeds, units, even
        self._cost, self._links = layer_cost(job), links
        self._known: dict[object, tuple[tuple[int, ...], GroupCost]] = {}
        self._per_node = job.links.ranks_per_node

    def __call__(self, ranks: Sequence[int], column: int) -> TPGroup | None:
        """Best group of the living `ranks`; None without any.

        Slow ones, or one with a slow link, are left out where that is faster.
        """
        speeds = self._speeds
        living = [rank for rank in ranks if speeds.get(rank, 1.0) > 0.0]
        if not living:
            return None
        values = tuple([speeds.get(rank, 1.0) for rank in living])
        nodes = [rank // self._per_node for rank in living]
        is_slow = self._links.collective(living) > 1.0
        is_own = is_slow or self._present is not None
        key = (values, tuple([node - nodes[0] for node in nodes]), tuple(living) if is_own else ())
        if key not in self._known:
            kept = self._kept if self._present is not None else self._best
            self._known[key] = kept(values, living)
        shares, cost = self._known[key]
        held = [(rank, share) for rank, share in zip(living, shares, strict=True) if share]
        return TPGroup(tuple([r for r, _ in held]), tuple([q for _, q in held]), column, cost)

    def _best(
        self, speeds: tuple[float, ...], ranks: Sequence[int]
    ) -> tuple[tuple[int, ...], GroupCost]:
        """Shares over all members, or without some where that is faster."""
        cost, best_ms = self._cost, math.inf
        best: tuple[tuple[int, ...], GroupCost] | None = None
        fixed = 2.0 * cost.fixed_ms / (cost.forward_ms + cost.backward_ms) * self._units
        for dropped in self._droppable(speeds, ranks):
            left = [0.0 if i in dropped else speed for i, speed in enumerate(speeds)]
            shares = balanced_shares(left, self._units, fixed=fixed, even=self._even)
            option = self._timed(shares, left, ranks)
            layer_ms = option.forward_ms + option.backward_ms
            if best is None or layer_ms < best_ms * (1 - 1e-9):
                best, best_ms = (shares, option), layer_ms
        assert best is not None, "without any member left out"
        return best

    def _kept(
        self, speeds: tuple[float, ...], ranks: Sequence[int]
    ) -> tuple[tuple[int, ...], GroupCost]:
        """Present shares if all members of the stage are alive, else shares as even as they go."""
        shares = (self._present or {}).get(tuple(ranks))
        if shares is None:
            shares = balanced_shares((1.0,) * len(ranks), self._units)
        return shares, self._timed(shares, speeds, ranks)

    def _timed(
        self, shares: Sequence[int], speeds: Sequence[float], ranks: Sequence[int]
    ) -> GroupCost:
        """Cost of a group of the members that hold anything."""
        kept = [(q, p, r) for q, p, r in zip(shares, speeds, ranks, strict=True) if q]
        held, known, members = zip(*kept, strict=True)
        slowdown = self._links.collective(members)
        return group_cost(self._job, self._cost, held, known, members, slowdown)

    def _droppable(
        self, speeds: tuple[float, ...], ranks: Sequence[int]
    ) -> Iterator[Collection[int]]:
        """Members to leave out, by index: none, the slowest ones, each one with a slow link."""
        slowest = sorted(range(len(speeds)), key=lambda i: (speeds[i], -i))
        for count in range(len(speeds)):
            if count and speeds[slowest[count - 1]] >= max(speeds):
                break
            yield slowest[:count]
        if len(ranks) > 1 and self._links.collective(ranks) > 1.0:
            yield from ([i] for i, rank in enumerate(ranks) if self._links.touches([rank]))


Place = tuple[int, list[int]]  # column and ranks of a stage, all of which may be dead


def assign_ranks(
    job: Job, layout: Layout, speeds: Mapping[int, float]
) -> tuple[list[list[Place]], list[Place]]:
    """Stages of every replica of `layout`, joined by living ranks outside it, and spare groups.

    Such joiners are ranks of the job's initial layout or of `speeds` that are not in `layout`. A
    joiner goes to the group with most of its initial peers; joiners whose whole group is gone form
    it again, and new ranks go to the smallest groups.
    """
    home = {place.rank: (place.dp, place.pp) for place in job.layout.places()}
    stages = [
        [(_column(stage.ranks, home, i), list(stage.ranks)) for i, stage in enumerate(r.stages)]
        for r in layout.replicas
    ]
    working = set(layout.ranks)
    joiners = [r for r in sorted({*home, *speeds} - working) if speeds.get(r, 1.0) > 0.0]
    gone = {rank for rank, speed in speeds.items() if speed == 0.0}
    return stages, _join(joiners, home, stages, job.layout.tp, gone) if joiners else []


def _column(ranks: Iterable[int], home: Mapping[int, tuple[int, int]], index: int) -> int:
    columns = Counter(home[rank][1] for rank in ranks if rank in home)
    return max(columns, key=lambda c: (columns[c], -c), default=index)


def _join(
    joiners: Sequence[int],
    home: Mapping[int, tuple[int, int]],
    stages: list[list[Place]],
    tp: int,
    gone: Collection[int],
) -> list[Place]:
    """Add joiners to `stages`, which still contain the ranks in `gone`.

    Returns the groups without a replica as (column, ranks).
    """

    def living(ranks: list[int]) -> int:
        return sum(rank not in gone for rank in ranks)

    places: dict[tuple[int, int], Counter[tuple[int, int]]] = defaultdict(Counter)
    for row, replica in enumerate(stages):
        for index, (_, ranks) in enumerate(replica):
            for rank in ranks:
                if rank in home:
                    places[home[rank]][row, index] += 1
    returning: dict[tuple[int, int], list[int]] = defaultdict(list)
    new_ranks = []
    for rank in joiners:
        if rank not in home:
            new_ranks.append(rank)
        elif home[rank] in places:
            row, index = places[home[rank]].most_common(1)[0][0]
            ranks = stages[row][index][1]
            ranks.insert(sum(member < rank for member in ranks), rank)
        else:
            returning[home[rank]].append(rank)
    groups = (ranks for row in stages for _, ranks in row)
    smallest = [(living(ranks), number, ranks) for number, ranks in enumerate(groups)]
    heapify(smallest)
    for rank in new_ranks:
        held, number, ranks = smallest[0]
        if held >= tp:
            break
        ranks.append(rank)
        heapreplace(smallest, (held + 1, number, ranks))
    return [(column, ranks) for (_, column), ranks in sorted(returning.items())]
