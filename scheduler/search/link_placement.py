"""Places of ranks for slow links: exchanges of ranks and of groups after which they carry less."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from resihp.contracts import Job, Layout, Replica

from ..link_costs import LinkSlowdowns, boundaries_ms
from ..makespan import pipeline_makespans
from ..simulator import stage_times
from .chains import by_length
from .quotas import Arrangement
from .rank_orders import RankOrder

_FEW_RANKS = 16  # up to which more exchanges in a row and more orders are tried
_ROUNDS = (5, 3)  # exchanges in a row: with few ranks, with more
_KEPT = (12, 4)  # orders that are continued after each of them
_SEARCHED = (12, 4)  # orders returned
_ENDS = 16  # ranks with a slow link whose exchanges are tried
_PEERS = 64  # ranks with which each of them is exchanged
_BATCH = 256  # orders judged before the time is looked at
_LEAST_GAIN = 1e-3  # microbatches


def link_orders(
    job: Job, found: Arrangement, speeds: Mapping[int, float], links: LinkSlowdowns
) -> list[RankOrder]:
    """Exchanges from which a search for slow links starts again, the most promising first.

    Ranks at the ends of slow links that an arrangement uses change places with others of their
    replica, of their stage in other replicas, or without a stage; so do whole groups. An exchange
    is judged by the microbatches that the replicas, with their layers and shares, run more within
    the makespan; `found` need not be made for these links. A few of the best are continued with
    another exchange. Of those that are judged alike, the one that moves fewest ranks is returned.
    Once the time of the search is up, the exchanges that were judged by then count.
    """
    judge = _Judge(job, found, speeds, links)
    is_large = len(judge.layout.ranks) > _FEW_RANKS
    rounds, kept, searched = (pair[is_large] for pair in (_ROUNDS, _KEPT, _SEARCHED))
    heads, known = [RankOrder({})], {RankOrder({}).key: (0.0, RankOrder({}))}
    for _ in range(rounds):
        tried = {order.key: order for head in heads for order in judge.exchanges(head)}
        fresh = [order for key, order in tried.items() if key not in known]
        judged: list[tuple[float, RankOrder]] = []
        while len(judged) < len(fresh) and not found.evaluator.setting.expired():
            part = fresh[len(judged) :][:_BATCH]
            judged += zip(judge.gains(part), part, strict=True)
        known |= {order.key: (gain, order) for gain, order in judged}
        heads = [order for _, order in _ranked(judged)[:kept]]
    alike: dict[float, RankOrder] = {}
    for gain, order in _ranked(known.values()):
        if gain > _LEAST_GAIN:
            alike.setdefault(round(gain, 9), order)
    return list(alike.values())[:searched]


def _ranked(judged: Iterable[tuple[float, RankOrder]]) -> list[tuple[float, RankOrder]]:
    """The largest gain first; of equal ones, the one that moves fewest ranks."""
    return sorted(judged, key=lambda one: (-round(one[0], 9), len(one[1].key), one[1].key))


class _Judge:
    """Exchanges of ranks in an arrangement, and what they gain."""

    def __init__(
        self, job: Job, found: Arrangement, speeds: Mapping[int, float], links: LinkSlowdowns
    ) -> None:
        self.layout = found.layout
        self._job, self._found, self._speeds, self._links = job, found, speeds, links
        known = {*job.layout.ranks, *speeds} - self.layout.members
        self._idle = [rank for rank in sorted(known) if speeds.get(rank, 1.0) > 0.0]
        replicas = enumerate(self.layout.replicas)
        self._row = {rank: row for row, replica in replicas for rank in replica.ranks}
        self._capacities: dict[tuple[Replica, int], float] = {}

    def gains(self, orders: Sequence[RankOrder]) -> list[float]:
        """Microbatches that the replicas run more within the makespan after each exchange."""
        pairs = list(zip(self.layout.replicas, self._found.quotas, strict=True))
        moved = [
            [
                (pairs[row], (order.of_replica(pairs[row][0]), pairs[row][1]))
                for row in sorted({self._row[rank] for rank in order.instead if rank in self._row})
            ]
            for order in orders
        ]
        self._measure({one for changes in moved for change in changes for one in change})
        known = self._capacities
        return [sum(known[new] - known[old] for old, new in changes) for changes in moved]

    def _measure(self, wanted: Iterable[tuple[Replica, int]]) -> None:
        missing = [pair for pair in wanted if pair not in self._capacities]
        setting = self._found.evaluator.setting
        job, links = self._job, self._links
        for indices in by_length([replica.stages for replica, _ in missing]):
            pairs = [missing[index] for index in indices]
            times = [stage_times(job, replica, self._speeds, links) for replica, _ in pairs]
            forward, backward = np.array(times).transpose(1, 0, 2)
            ends = pipeline_makespans(
                forward,
                backward,
                [quota for _, quota in pairs],
                p2p=np.array([boundaries_ms(job, replica, links) for replica, _ in pairs]),
                **setting.limits,
            )
            left = (self._found.makespan_ms - ends) / (forward + backward).max(axis=1)
            self._capacities.update(zip(pairs, left.tolist(), strict=True))

    def exchanges(self, head: RankOrder) -> Iterator[RankOrder]:
        """Exchanges after `head` for the ranks whose slow links are then in use."""
        layout = head.of(self.layout)
        ends = [place for row in range(layout.dp) for place in self._slow_ends(layout, row)]
        for rank, row, index in ends[:_ENDS]:
            replica = layout.replicas[row]
            peers = [stage for i, stage in enumerate(replica.stages) if i != index]
            peers += [r.stages[index] for r in layout.replicas if len(r.stages) > index]
            own = replica.stages[index]
            others = [*own.ranks, *(r for stage in peers for r in stage.ranks), *self._idle]
            for other in dict.fromkeys(others[:_PEERS]):
                if other != rank:
                    yield head.then([(rank, other)])
            for stage in peers[:_PEERS]:
                if stage is not own and own.tp == stage.tp > 1:
                    yield head.then(zip(own.ranks, stage.ranks, strict=True))

    def _slow_ends(self, layout: Layout, row: int) -> Iterator[tuple[int, int, int]]:
        """Rank, replica and stage of the ends of the slow links that a replica uses."""
        stages, links = layout.replicas[row].stages, self._links
        slow = {i for i, stage in enumerate(stages) if links.collective(stage.ranks) > 1.0}
        for i, (one, other) in enumerate(pairwise(stages)):
            if links.boundary(one.ranks, other.ranks) > 1.0:
                slow |= {i, i + 1}
        for index in sorted(slow):
            for rank in stages[index].ranks:
                if links.touches([rank]):
                    yield rank, row, index
