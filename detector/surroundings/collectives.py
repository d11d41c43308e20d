"""Slow links inside the groups that compute together, from the time of their collectives.

A collective ends everywhere at once, so that a slow device shows in the waiting of the others and
a slow link in the transfer itself. Only records that tell the two apart are looked at.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from resihp.contracts import Op, Status, TelemetryBatch

from ..base.arrays import Bools, Ints, State
from ..base.places import Places, slots_of
from ..base.robust import group_median
from ..evidence.level import LevelTest
from ..settings import DetectorSettings
from .links import LinkVerdict

_LEAST_TENSOR, _LEAST_DATA = 1.25, 1.5
"""Slowdown below which nothing is said; the network among replicas is shared with others."""
_ERROR = 0.02


class GroupTest:
    """Collectives of some groups, given by the group of each rank (-1 for none) and the class of
    each group."""

    def __init__(
        self, places: Places, groups: tuple[Ints, Ints], settings: DetectorSettings, least: float
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


class CollectiveLinks:
    """Tensor-parallel groups by the collectives within microbatches, data-parallel ones (the ranks
    of all replicas that hold the same shard) by those of the step."""

    def __init__(self, places: Places, settings: DetectorSettings) -> None:
        self._tensor = GroupTest(places, _tensor_groups(places), settings, _LEAST_TENSOR)
        self._data = GroupTest(places, _data_groups(places), settings, _LEAST_DATA)

    def observe(self, step: TelemetryBatch, index: Ints, number: int) -> None:
        """Takes all records of a step."""
        rows = (step.op == Op.COLLECTIVE) & np.isfinite(step.wait_ms) & (step.compute_ms > 0)
        if rows.any():
            inner = step.microbatch >= 0
            self._tensor.observe(step, index, rows & inner, number)
            self._data.observe(step, index, rows & ~inner, number)

    @property
    def any_slow(self) -> bool:
        """Whether any group is slow."""
        return bool(self._tensor.test.slow.any() or self._data.test.slow.any())

    def verdicts(self) -> list[LinkVerdict]:
        """The slow groups, tensor-parallel ones first."""
        return [*self._tensor.verdicts(), *self._data.verdicts()]

    def state(self) -> State:
        """What `load` needs."""
        return {"tensor": self._tensor.test.state(), "data": self._data.test.state()}

    def load(self, state: State) -> None:
        """Takes up what `state` returned."""
        self._tensor.test.load(state["tensor"])
        self._data.test.load(state["data"])


def _tensor_groups(places: Places) -> tuple[Ints, Ints]:
    """Group of each rank, and the class of each group: those of equal layers are alike."""
    sizes = np.bincount(places.group)
    member = np.where(sizes[places.group] > 1, places.group, -1)
    stage = np.zeros(sizes.size, np.int64)
    stage[places.group] = places.peers
    return member.astype(np.int64), stage


def _data_groups(places: Places) -> tuple[Ints, Ints]:
    """The ranks at the same place of every replica; those of equally many layers are alike."""
    key = np.stack([places.pp, slots_of(places)], axis=1)
    _, member, sizes = np.unique(key, axis=0, return_inverse=True, return_counts=True)
    member = member.reshape(-1)
    layers = np.zeros(sizes.size)
    layers[member] = places.layers + 1e6 * (places.first + 2 * places.last)
    _, classes = np.unique(layers, return_inverse=True)
    return np.where(sizes[member] > 1, member, -1), classes.reshape(-1).astype(np.int64)


def touching(links: Sequence[LinkVerdict], rank: int) -> list[LinkVerdict]:
    """Those that concern a rank: its own transfers, and the groups that it is in."""
    return [link for link in links if link.rank == rank or rank in link.group]
