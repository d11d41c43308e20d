"""Exchanges of ranks: orders of them, and those that gather dead and slow ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from resihp.contracts import Layout, Replica

_MOST_REPLICAS = 12  # up to which ranks are gathered


@dataclass(frozen=True)
class RankOrder:
    """Exchange of ranks: the rank that works in the place of each one; the others keep theirs."""

    instead: Mapping[int, int]

    @property
    def key(self) -> tuple[tuple[int, int], ...]:
        """Pairs of ranks: the one whose place it is and the one that works there."""
        return tuple(self.instead.items())

    def of(self, layout: Layout) -> Layout:
        """The layout after the exchange; layers and shares stay in their places."""
        return Layout(tuple(self.of_replica(replica) for replica in layout.replicas))

    def of_replica(self, replica: Replica) -> Replica:
        """One replica of it."""
        get = self.instead.get
        return Replica(
            tuple(
                replace(stage, ranks=tuple([get(rank, rank) for rank in stage.ranks]))
                for stage in replica.stages
            )
        )

    def then(self, pairs: Iterable[tuple[int, int]]) -> RankOrder:
        """Exchange after which the ranks of each pair, as they work now, change places too."""
        swap = {a: b for pair in pairs for a, b in (pair, pair[::-1])}
        places = {*self.instead, *swap}
        now = {place: self.instead.get(place, place) for place in places}
        moved = {place: swap.get(rank, rank) for place, rank in now.items()}
        return RankOrder({p: r for p, r in sorted(moved.items()) if p != r})


def gathered_orders(
    layout: Layout, speeds: Mapping[int, float], most: Sequence[int] = (1,)
) -> list[RankOrder]:
    """Exchanges that gather ranks in as few replicas as hold them.

    A replica whose stages are all as slow divides its layers with little remainder, and the others
    run as before. Ranks at the same place of a group hold the same weights in every replica, so
    that exchanging them moves nothing where layers and shares agree. The first order gathers the
    dead ranks, one in a stage and evenly over the stages of a replica, for which some change
    stages; then one for each number of `most` gathers all that are dead or slow, so many at most in
    a stage, each within its own: the more there are in one group, the fewer groups need other
    shares. None in jobs of more than twelve replicas.
    """
    if layout.dp > _MOST_REPLICAS:
        return []
    slow = sorted(
        (r for r in layout.ranks if speeds.get(r, 1.0) < 1.0), key=lambda r: (speeds[r], r)
    )
    dead = [rank for rank in slow if speeds[rank] == 0.0]
    orders = [_gathered(layout, dead, most=1, evenly=True)]
    orders += [_gathered(layout, slow, most=number, evenly=False) for number in most]
    distinct = {order.key: order for order in orders}
    return [order for key, order in distinct.items() if key]


def _gathered(layout: Layout, ranks: Sequence[int], *, most: int, evenly: bool) -> RankOrder:
    """Exchange that gathers `ranks`, the slowest first, `most` in a stage."""
    seats = _Seats(layout)
    held = Counter(seats.place[rank][0] for rank in ranks)
    waiting = list(ranks)
    for replica in sorted(range(layout.dp), key=lambda d: (-held[d], d)):
        stages = len(layout.replicas[replica].stages)
        columns = [seats.place[rank][1] for rank in waiting]
        wanted = _spread(columns[:stages], stages) if evenly else dict(enumerate(columns))
        taken, left = Counter[int](), []
        for at, rank in enumerate(waiting):
            stage = wanted.get(at, -1)
            if stage >= 0 and taken[stage] < most and seats.take(rank, replica, stage):
                taken[stage] += 1
            else:
                left.append(rank)
        waiting = left
    return seats.order


def _first_of_each(columns: Sequence[int]) -> dict[int, int]:
    """Index and column of the first one of each column."""
    return {columns.index(column): column for column in dict.fromkeys(columns)}


def _spread(columns: Sequence[int], stages: int) -> dict[int, int]:
    """Index and new column of each one: different ones at equal distances, and as many as can be
    their own.

    >>> _spread([1, 1, 5], 6)
    {0: 1, 2: 5, 1: 3}
    """
    count = len(columns)
    options = [
        [(first + k * stages // count) % stages for k in range(count)] for first in range(stages)
    ]
    wanted = set(max(options, key=lambda option: len(set(option) & set(columns)), default=[]))
    kept = {at: column for at, column in _first_of_each(columns).items() if column in wanted}
    free = sorted(wanted - set(kept.values()))
    others = (at for at in range(count) if at not in kept)
    return kept | dict(zip(others, free, strict=True))


class _Seats:
    """Places of ranks, by replica, stage and position in the group, as they are exchanged."""

    def __init__(self, layout: Layout) -> None:
        self.place = {p.rank: (p.dp, p.pp, p.tp) for p in layout.places()}
        self._owner = {place: rank for rank, place in self.place.items()}
        self._holder = dict(self._owner)
        self._taken: set[tuple[int, int, int]] = set()

    def take(self, rank: int, replica: int, stage: int) -> bool:
        """Put a rank at its position in another group, the rank there in its place, and keep it
        there; False if that place was taken before. Where the group has no such position the rank
        stays."""
        here, there = self.place[rank], (replica, stage, self.place[rank][2])
        if there in self._taken:
            return False
        other = self._holder.get(there)
        if other is not None:
            self._taken.add(there)
            self.place[rank], self.place[other] = there, here
            self._holder[there], self._holder[here] = rank, other
        return True

    @property
    def order(self) -> RankOrder:
        """The exchange of ranks so far."""
        changed = sorted((self._owner[p], rank) for p, rank in self._holder.items())
        return RankOrder({owner: rank for owner, rank in changed if owner != rank})
