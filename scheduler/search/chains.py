"""Chains of TP groups as arrays: stage times, memory limits, bounds and makespans.

A chain is a tuple of group indices: the stages of one replica in pipeline order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import Schedule
from resihp.pipeline.orders import most_in_flight, most_split

from ..bounds import StageCosts, heterogeneous_layers, in_flight_bound, whole_layers
from ..link_costs import ALL_LINKS_HEALTHY, LinkSlowdowns
from ..makespan import pipeline_makespans
from ..memory import MemoryFootprint
from .tp_groups import GroupTable

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Chain = tuple[int, ...]


def by_length(chains: Iterable[Sequence[object]]) -> Iterator[list[int]]:
    """Indices of the chains of each length."""
    indices: dict[int, list[int]] = defaultdict(list)
    for index, chain in enumerate(chains):
        indices[len(chain)].append(index)
    yield from indices.values()


@dataclass(frozen=True)
class SearchSetting:
    """Inputs that all chains of a search share; `microbatches` of all replicas together.

    any_order  bounds hold for any order of whole passes, and for any number in flight
    """

    table: GroupTable
    footprint: MemoryFootprint
    layers: int
    microbatches: int
    p2p_ms: float
    max_in_flight: int | None
    schedule: Schedule
    expired: Callable[[], bool] = lambda: False
    links: LinkSlowdowns = ALL_LINKS_HEALTHY
    any_order: bool = False

    @property
    def limits(self) -> dict[str, Any]:
        """Arguments of all bounds and makespans, but the times of transfers."""
        schedule = None if self.any_order else self.schedule
        return {"max_in_flight": self.max_in_flight, "schedule": schedule}

    def transfers_ms(self, chains: Ints) -> float | Floats:
        """Times of transfers between the stages of chains [chain, stage]: one for all while all
        links are healthy, else [chain, boundary]."""
        if not self.links:
            return self.p2p_ms
        before, after = chains[:, :-1], chains[:, 1:]
        found = np.full(before.shape, self.p2p_ms)
        is_slow = self._touched[before] & self._touched[after]
        numbers = before[is_slow] * len(self._touched) + after[is_slow]
        distinct, at = np.unique(numbers, return_inverse=True)
        factors = np.array([self._factor(number) for number in distinct.tolist()])
        found[is_slow] = self.p2p_ms * factors[at]
        return found

    @cached_property
    def _touched(self) -> NDArray[np.bool_]:
        return np.array([self.links.touches(g.ranks) for g in self.table.groups], bool)

    @cached_property
    def _factors(self) -> dict[int, float]:
        return {}

    def _factor(self, number: int) -> float:
        """Factor on the transfers from group `number // groups` to group `number % groups`."""
        if number not in self._factors:
            one, other = (self.table.groups[g] for g in divmod(number, len(self._touched)))
            self._factors[number] = self.links.boundary(one.ranks, other.ranks)
        return self._factors[number]


@dataclass(frozen=True, eq=False)
class ChainBatch:
    """Chains of equal length, each with a number of microbatches.

    chains        indices of groups, [chain, stage]
    microbatches  [chain]
    """

    setting: SearchSetting
    chains: Ints
    microbatches: Ints

    @property
    def stages(self) -> int:
        """Number of stages of every chain."""
        return int(self.chains.shape[1])

    @cached_property
    def costs(self) -> StageCosts:
        """Costs of all stages, and the layers that fit into their memory."""
        setting, table = self.setting, self.setting.table
        extra = np.zeros(self.chains.shape)
        extra[:, 0] += table.embedding_ms[self.chains[:, 0]]
        extra[:, -1] += table.head_ms[self.chains[:, -1]]
        limits = setting.schedule, self.stages, setting.max_in_flight
        begun = np.maximum(self.microbatches, 1)[:, None]
        in_flight = np.minimum(np.array(most_in_flight(*limits)), begun)
        split = np.minimum(np.array(most_split(*limits)), begun)
        if setting.any_order:
            in_flight, split = np.ones_like(in_flight), np.zeros_like(split)
        most = setting.footprint.most_layers(table.widest[self.chains], in_flight, split)
        most = np.minimum(most, setting.layers - self.stages + 1)
        return StageCosts(
            table.forward_ms[self.chains], table.backward_ms[self.chains], extra, most
        )

    @cached_property
    def transfers_ms(self) -> float | Floats:
        """Times of transfers; see `SearchSetting.transfers_ms`."""
        return self.setting.transfers_ms(self.chains)

    @cached_property
    def fits(self) -> NDArray[np.bool_]:
        """True if a chain can hold all layers in memory, [chain]."""
        most = self.costs.most
        return np.asarray((most.min(axis=1) >= 1) & (most.sum(axis=1) >= self.setting.layers))

    def pick(self, rows: Ints) -> ChainBatch:
        """Batch of the given rows, in that order."""
        picked = ChainBatch(self.setting, self.chains[rows], self.microbatches[rows])
        if "costs" in self.__dict__:
            picked.__dict__["costs"] = self.costs.pick(rows)
        return picked

    def times(self, layers: Ints) -> tuple[Floats, Floats]:
        """Forward and backward time of every stage with these layers, [..., chain, stage]."""
        costs = self.costs
        return layers * costs.forward + costs.extra, layers * costs.backward + 2.0 * costs.extra

    def slowest(self, layers: Ints) -> Floats:
        """Time of the bottleneck stage for one microbatch, [..., chain]."""
        forward, backward = self.times(layers)
        return np.asarray((forward + backward).max(axis=-1))

    def bounds(self, layers: Ints) -> Floats:
        """Lower bounds of the makespans with these layers, [..., chain]."""
        return in_flight_bound(
            *self.times(layers),
            self.microbatches,
            p2p=self.transfers_ms,
            **self.setting.limits,
        )

    def whole_layers(self, within_ms: float, *, tight: bool = False) -> tuple[Floats, Ints]:
        """Bounds over all whole layers (inf beyond `within_ms`) and layers that attain them.

        They take all links as healthy: transfers over slow ones only take longer.
        """
        program = heterogeneous_layers if tight else whole_layers
        return program(
            self.costs,
            self.setting.layers,
            self.microbatches,
            within_ms,
            p2p=self.setting.p2p_ms,
            **self.setting.limits,
        )

    def makespans(self, layers: Ints) -> Floats:
        """Exact makespans [chain] with these layers [chain, stage]."""
        return pipeline_makespans(
            *self.times(layers),
            self.microbatches,
            p2p=self.transfers_ms,
            **self.setting.limits,
        )
