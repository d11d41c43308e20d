"""Slow links, slow groups of collectives and slow hosts; they name no device.

A collective ends on all ranks at once, so that a slow device shows in the waiting of the others and
a slow link in the transfer itself. Only collective records that separate the two are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from resihp.contracts import Op, Status, TelemetryBatch

from .arrays import Bools, Ints, group_median
from .evidence.rank_tests import LevelTest
from .persistence import Persistent, State
from .rank_table import RankTable
from .settings import DetectorSettings


@dataclass(frozen=True, kw_only=True)
class LinkVerdict:
    """Verdict on the transfers that `rank` records with `peer`, or on a group's collectives.

    peer        -1 for a group, of which `rank` is the first
    group       ranks whose collectives are slow; empty for a link between two
    slowdown    transfer time over that of the links between the same two stages
    since_step  first slow step; None while healthy
    """

    rank: int
    peer: int
    status: Status
    group: tuple[int, ...] = ()
    slowdown: float = 1.0
    since_step: int | None = None
    evidence: tuple[str, ...] = ()


class LinkTest(Persistent):
    """Finds pairs of ranks whose transfers take longer than others between the same stages.

    The links are those with point-to-point records so far; a link that appears later restarts the
    comparison.
    """

    _saved = ("_keys", "_test")

    def __init__(self, places: RankTable, settings: DetectorSettings) -> None:
        self._places, self._settings = places, settings
        self._keys = np.empty(0, np.int64)
        self._classes = np.empty(0, np.int64)
        self._test: LevelTest | None = None

    def observe(self, step: TelemetryBatch, index: Ints, number: int) -> None:
        """Takes all records of a step."""
        rows = (step.op == Op.P2P) & (step.peer >= 0) & (step.compute_ms > 0)
        if not rows.any():
            return
        peer = self._places.index(step.peer[rows])
        known = peer >= 0
        own, peer, times = index[rows][known], peer[known], step.compute_ms[rows][known]
        keys = (own << 32) | peer
        found = np.unique(keys)
        test = self._test
        if test is None or not np.isin(found, self._keys).all():
            test = self._begin(np.union1d(self._keys, found))
        at = np.searchsorted(self._keys, keys)
        value = group_median(np.log(times), at, self._keys.size)
        test.observe(number, value)

    def _begin(self, keys: Ints) -> LevelTest:
        self._keys = keys
        places = self._places
        own, peer = keys >> 32, keys & 0xFFFF_FFFF
        kind = np.stack([places.peers[own], places.peers[peer]], axis=1)
        _, classes = np.unique(kind, axis=0, return_inverse=True)
        self._classes = classes.reshape(-1).astype(np.int64)
        self._test = LevelTest(self._classes, self._settings, least=1.25, error=0.02)
        return self._test

    @property
    def any_slow(self) -> bool:
        """True where a link is slow."""
        return self._test is not None and bool(self._test.slow.any())

    def verdicts(self) -> list[LinkVerdict]:
        """The slow links, in the order of their ranks."""
        test = self._test
        if test is None:
            return []
        found = []
        for at in np.flatnonzero(test.slow).tolist():
            rank = int(self._places.ranks[int(self._keys[at]) >> 32])
            peer = int(self._places.ranks[int(self._keys[at]) & 0xFFFF_FFFF])
            factor = float(test.factor[at])
            words = f"transfers with rank {peer} take {factor:.2f} times as long as their like"
            found.append(
                LinkVerdict(
                    rank=rank,
                    peer=peer,
                    status=Status.FAIL_SLOW,
                    slowdown=factor,
                    since_step=int(test.since[at]),
                    evidence=(words,),
                )
            )
        return found

    def healthy_like(self, link: LinkVerdict) -> tuple[int, int] | None:
        """Ends of a healthy link of the same kind; None where there is none."""
        test, ranks = self._test, self._places.ranks
        if test is None:
            return None
        own, peer = ranks[self._keys >> 32], ranks[self._keys & 0xFFFF_FFFF]
        here = np.flatnonzero((own == link.rank) & (peer == link.peer))[0]
        healthy = np.flatnonzero((self._classes == self._classes[here]) & ~test.slow)
        return (int(own[healthy[0]]), int(peer[healthy[0]])) if healthy.size else None

    def load(self, state: State) -> None:
        """Restores what `state` returned."""
        if state["_keys"].size:
            self._begin(state["_keys"])
        super().load(state)


_LEAST_TENSOR, _LEAST_DATA = 1.25, 1.5
"""Slowdown below which nothing is reported; the network between replicas is shared with others."""
_ERROR = 0.02


class CollectiveGroupTest(Persistent):
    """Test of the collectives of groups, given by the group of each rank (-1 for none) and the
    class of each group."""

    _saved = ("test",)

    def __init__(
        self, places: RankTable, groups: tuple[Ints, Ints], settings: DetectorSettings, least: float
    ) -> None:
        self._places = places
        self._member, classes = groups
        self.test = LevelTest(classes, settings, least=least, error=_ERROR)

    def observe(self, step: TelemetryBatch, index: Ints, rows: Bools, number: int) -> None:
        """Takes the collectives in `rows` of a step."""
        group = self._member[index[rows]]
        some = group >= 0
        if some.any():
            logs = np.log(step.compute_ms[rows][some])
            value = group_median(logs, group[some], self.test.slow.size)
            self.test.observe(number, value)

    def verdicts(self) -> list[LinkVerdict]:
        """The slow groups."""
        return [self._verdict(group) for group in np.flatnonzero(self.test.slow).tolist()]

    def _verdict(self, group: int) -> LinkVerdict:
        ranks = tuple(self._places.ranks[self._member == group].tolist())
        factor = float(self.test.factor[group])
        listed = ", ".join(str(rank) for rank in ranks[:8]) + (" …" if len(ranks) > 8 else "")
        return LinkVerdict(
            rank=ranks[0],
            peer=-1,
            group=ranks,
            status=Status.FAIL_SLOW,
            slowdown=factor,
            since_step=int(self.test.since[group]),
            evidence=(
                f"collectives within ranks {listed} take {factor:.2f} times as long as their like",
            ),
        )


class CollectiveTest(Persistent):
    """Tests tensor-parallel groups by the collectives within microbatches, and data-parallel ones
    (the ranks of all replicas that hold the same shard) by those of the step."""

    _saved = ("_tensor", "_data")

    def __init__(self, places: RankTable, settings: DetectorSettings) -> None:
        self._tensor = CollectiveGroupTest(places, _tensor_groups(places), settings, _LEAST_TENSOR)
        self._data = CollectiveGroupTest(places, _data_groups(places), settings, _LEAST_DATA)

    def observe(self, step: TelemetryBatch, index: Ints, number: int) -> None:
        """Takes all records of a step."""
        rows = (step.op == Op.COLLECTIVE) & np.isfinite(step.wait_ms) & (step.compute_ms > 0)
        if rows.any():
            inner = step.microbatch >= 0
            self._tensor.observe(step, index, rows & inner, number)
            self._data.observe(step, index, rows & ~inner, number)

    @property
    def any_slow(self) -> bool:
        """True where a group is slow."""
        return bool(self._tensor.test.slow.any() or self._data.test.slow.any())

    def verdicts(self) -> list[LinkVerdict]:
        """The slow groups, tensor-parallel ones first."""
        return [*self._tensor.verdicts(), *self._data.verdicts()]


def _tensor_groups(places: RankTable) -> tuple[Ints, Ints]:
    """Tensor-parallel group of each rank, and the class of each group, by its layers."""
    sizes = np.bincount(places.group)
    member = np.where(sizes[places.group] > 1, places.group, -1)
    stage = np.zeros(sizes.size, np.int64)
    stage[places.group] = places.peers
    return member.astype(np.int64), stage


def _data_groups(places: RankTable) -> tuple[Ints, Ints]:
    """Data-parallel group of each rank, and the class of each group, by its number of layers."""
    key = np.stack([places.pp, places.slot], axis=1)
    _, member, sizes = np.unique(key, axis=0, return_inverse=True, return_counts=True)
    member = member.reshape(-1)
    layers = np.zeros(sizes.size)
    layers[member] = places.layers + 1e6 * (places.first + 2 * places.last)
    _, classes = np.unique(layers, return_inverse=True)
    return np.where(sizes[member] > 1, member, -1), classes.reshape(-1).astype(np.int64)


def touching(links: Sequence[LinkVerdict], rank: int) -> list[LinkVerdict]:
    """The verdicts on a rank's own transfers, and on the groups that it is in."""
    return [link for link in links if link.rank == rank or rank in link.group]


class HostTest(Persistent):
    """Finds ranks whose hosts spend longer on data loading than those of their peers."""

    _saved = ("test",)

    def __init__(self, places: RankTable, settings: DetectorSettings) -> None:
        self._places = places
        self.test = LevelTest(np.zeros(places.size, np.int64), settings, least=1.5, error=0.1)

    def observe(self, step: TelemetryBatch, index: Ints, number: int) -> Bools:
        """Takes all records of a step; returns the ranks whose host is slow."""
        data = step.op == Op.DATA
        if not data.any():
            return self.test.slow
        size = self._places.size
        spent = np.bincount(index[data], step.compute_ms[data], size)
        present = np.bincount(index[data], minlength=size) > 0
        # A share of the compute time is added, so that a change of next to no time is none.
        compute = (step.op == Op.FORWARD) | (step.op == Op.BACKWARD)
        busy = np.bincount(index[compute], step.compute_ms[compute], size)
        floor = 0.01 * float(np.median(busy[busy > 0])) if (busy > 0).any() else 0.0
        value = np.log(np.maximum(spent + floor, 1e-9))
        return self.test.observe(number, np.where(present, value, np.nan))
