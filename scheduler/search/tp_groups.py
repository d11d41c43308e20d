"""The devices that are left, gathered into tensor-parallel groups, as arrays for the search."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import Job, LayerCost, Layout

from ..cost_model import GroupCost, group_cost, layer_cost

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class TPGroup:
    """Living members of a tensor-parallel group with their shares.

    column is the pipeline stage whose weights the members hold in the job's first layout; groups
    of one column are peers and may trade places.
    """

    ranks: tuple[int, ...]
    shares: tuple[int, ...]
    column: int
    cost: GroupCost


@dataclass(frozen=True, eq=False)
class GroupTable:
    """All groups; the arrays are indexed by group. `kind` numbers groups that cost the same."""

    groups: tuple[TPGroup, ...]
    forward_ms: Floats
    backward_ms: Floats
    embedding_ms: Floats
    head_ms: Floats
    widest: Floats
    kind: NDArray[np.intp]

    @classmethod
    def of(cls, groups: Sequence[TPGroup]) -> GroupTable:
        """The arrays of these groups."""
        rows = [
            (
                g.cost.forward_ms,
                g.cost.backward_ms,
                g.cost.embedding_ms,
                g.cost.head_ms,
                max(g.shares) / sum(g.shares),
            )
            for g in groups
        ]
        numbers: dict[tuple[float, ...], int] = {}
        kind = [numbers.setdefault(row, len(numbers)) for row in rows]
        forward, backward, embedding, head, widest = np.array(rows, float).reshape(-1, 5).T
        numbered = np.array(kind, np.intp)
        return cls(tuple(groups), forward, backward, embedding, head, widest, numbered)


def share_units(job: Job, layout: Layout) -> int:
    """Units into which every layer is cut: KV groups, or what the layout's shares sum to."""
    return job.model.kv_heads if job.model else sum(layout.replicas[0].stages[0].shares)


class GroupBuilder:
    """Makes groups of ranks; equal speeds give equal shares, so that most are looked up."""

    def __init__(
        self, job: Job, speeds: Mapping[int, float], units: int, *, even: bool = False
    ) -> None:
        self._job, self._speeds, self._units, self._even = job, speeds, units, even
        self._cost = layer_cost(job)
        self._known: dict[tuple[tuple[float, ...], bool], tuple[tuple[int, ...], GroupCost]] = {}
        self._per_node = job.links.ranks_per_node

    def __call__(self, ranks: Sequence[int], column: int) -> TPGroup | None:
        """The best group of living `ranks`; None if there is none. Slow ones may be left out."""
        speeds = self._speeds
        living = [rank for rank in ranks if speeds.get(rank, 1.0) > 0.0]
        if not living:
            return None
        values = tuple([speeds.get(rank, 1.0) for rank in living])
        spread = max(living) // self._per_node != min(living) // self._per_node
        key = (values, spread)
        if key not in self._known:
            self._known[key] = self._best(values, living)
        shares, cost = self._known[key]
        held = [(rank, share) for rank, share in zip(living, shares, strict=True) if share]
        return TPGroup(tuple([r for r, _ in held]), tuple([q for _, q in held]), column, cost)

    def _best(
        self, speeds: tuple[float, ...], ranks: Sequence[int]
    ) -> tuple[tuple[int, ...], GroupCost]:
        """Shares by speed over all members, or without the slowest ones where that is quicker."""
        slowest = sorted(range(len(speeds)), key=lambda i: (speeds[i], -i))
        best: tuple[tuple[int, ...], GroupCost] | None = None
        dropped = [0.0] * len(speeds)
        for count in range(len(speeds)):
            left = list(speeds)
            for index in slowest[:count]:
                left[index] = 0.0
            if left != dropped and (count == 0 or speeds[slowest[count - 1]] < max(speeds)):
                option = self._option(left, ranks)
                if best is None or _layer_ms(option[1]) < _layer_ms(best[1]) * (1 - 1e-9):
                    best = option
        assert best is not None
        return best

    def _option(
        self, speeds: Sequence[float], ranks: Sequence[int]
    ) -> tuple[tuple[int, ...], GroupCost]:
        cost = self._cost
        fixed = 2.0 * cost.fixed_ms / (cost.forward_ms + cost.backward_ms) * self._units
        shares = balanced_shares(speeds, self._units, fixed=fixed, even=self._even)
        kept = [i for i, share in enumerate(shares) if share]
        return shares, self._group_cost(cost, shares, speeds, ranks, kept)

    def _group_cost(
        self,
        cost: LayerCost,
        shares: Sequence[int],
        speeds: Sequence[float],
        ranks: Sequence[int],
        kept: Sequence[int],
    ) -> GroupCost:
        return group_cost(
            self._job,
            cost,
            [shares[i] for i in kept],
            [speeds[i] for i in kept],
            [ranks[i] for i in kept],
        )


def _layer_ms(cost: GroupCost) -> float:
    return cost.forward_ms + cost.backward_ms


@dataclass(frozen=True)
class RankAssignment:
    """Who stands where: member ranks of every stage of every replica, and those without a place.

    Stages are (column, ranks); a stage may have lost all of its members.
    """

    replicas: tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]
    spare: tuple[tuple[int, tuple[int, ...]], ...]


def assign_ranks(job: Job, layout: Layout, speeds: Mapping[int, float]) -> RankAssignment:
    """The groups of `layout`, with every living rank that has no place beside its old peers.

    A rank is a joiner if it stands in the job's first layout or in `speeds`, and not in `layout`.
    It joins the group in which most of its first peers work; those whose whole group has gone form
    it anew, and ranks that were never there strengthen the smallest groups.
    """
    home = {place.rank: (place.dp, place.pp) for place in job.layout.places()}
    stages = [
        [(_column(stage.ranks, home, i), list(stage.ranks)) for i, stage in enumerate(r.stages)]
        for r in layout.replicas
    ]
    working = set(layout.ranks)
    joiners = [r for r in sorted({*home, *speeds} - working) if speeds.get(r, 1.0) > 0.0]
    gone = {rank for rank, speed in speeds.items() if speed == 0.0}
    spare = _join(joiners, home, stages, job.layout.tp, gone) if joiners else []
    return RankAssignment(
        tuple(tuple((column, tuple(ranks)) for column, ranks in row) for row in stages),
        tuple((column, tuple(ranks)) for column, ranks in spare),
    )


def _column(ranks: Iterable[int], home: Mapping[int, tuple[int, int]], index: int) -> int:
    columns = Counter(home[rank][1] for rank in ranks if rank in home)
    return max(columns, key=lambda c: (columns[c], -c), default=index)


def _join(
    joiners: Sequence[int],
    home: Mapping[int, tuple[int, int]],
    stages: list[list[tuple[int, list[int]]]],
    tp: int,
    gone: Collection[int],
) -> list[tuple[int, list[int]]]:
    """Puts joiners into `stages`, in which those that are `gone` still stand; the groups that are
    left over."""

    def living(ranks: list[int]) -> int:
        return sum(rank not in gone for rank in ranks)

    places: dict[tuple[int, int], Counter[tuple[int, int]]] = defaultdict(Counter)
    for row, replica in enumerate(stages):
        for index, (_, ranks) in enumerate(replica):
            for rank in ranks:
                if rank in home:
                    places[home[rank]][row, index] += 1
    returning: dict[tuple[int, int], list[int]] = defaultdict(list)
    strangers = []
    for rank in joiners:
        if rank not in home:
            strangers.append(rank)
        elif home[rank] in places:
            row, index = places[home[rank]].most_common(1)[0][0]
            ranks = stages[row][index][1]
            ranks.insert(sum(member < rank for member in ranks), rank)
        else:
            returning[home[rank]].append(rank)
    for rank in strangers:
        _, smallest = min((s for row in stages for s in row), key=lambda s: living(s[1]))
        if living(smallest) < tp:
            smallest.append(rank)
    return [(column, ranks) for (_, column), ranks in sorted(returning.items())]


def balanced_shares(
    speeds: Sequence[float], units: int, *, fixed: float = 0.0, even: bool = False
) -> tuple[int, ...]:
    """Units for each member so that the slowest one is as fast as it can be; 0 drops a member.

    A member of speed p with q units needs `(fixed + q) / p`. Exact: every unit goes where it ends
    first (the greedy rule is optimal for separable convex bottlenecks), on a tie where fewer are
    held; a member that gets none does not take part. `even` gives equal shares to the members that
    take part, as runtimes without uneven shards need; as many as divide the units.

    >>> balanced_shares((1.0, 1.0, 0.5, 1.0), 8)
    (3, 2, 1, 2)
    >>> balanced_shares((1.0, 0.0, 0.1), 4)
    (4, 0, 0)
    """
    if even:
        return _even(speeds, units)
    finish = [((fixed + 1.0) / p, 0, i) for i, p in enumerate(speeds) if p > 0.0]
    held = [0] * len(speeds)
    heapify(finish)
    for _ in range(units if finish else 0):
        index = finish[0][2]
        held[index] += 1
        end = (fixed + held[index] + 1.0) / speeds[index]
        heapreplace(finish, (end, held[index], index))
    return tuple(held)


def _even(speeds: Sequence[float], units: int) -> tuple[int, ...]:
    """The degree k among the divisors of `units` that makes `k * min(speed)` largest."""
    fastest = sorted((i for i, p in enumerate(speeds) if p > 0.0), key=lambda i: (-speeds[i], i))
    degrees = [k for k in range(1, len(fastest) + 1) if units % k == 0]
    best = max(degrees, key=lambda k: (k * speeds[fastest[k - 1]], k), default=0)
    chosen = set(fastest[:best])
    return tuple(units // best if i in chosen else 0 for i in range(len(speeds)))
