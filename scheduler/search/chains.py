"""Chains of groups as rows of arrays: what their stages take, hold and need together.

A chain is a row of group indices, the stages of one replica in pipeline order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import Schedule
from resihp.pipeline.orders import most_in_flight

from ..bounds import StageCosts, heterogeneous_layers, in_flight_bound, whole_layers
from ..makespan import pipeline_makespans
from ..memory import MemoryFootprint
from .tp_groups import GroupTable

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class SearchSetting:
    """What is the same for all chains of a job."""

    fleet: GroupTable
    footprint: MemoryFootprint
    layers: int
    p2p_ms: float
    max_in_flight: int | None
    schedule: Schedule


@dataclass(frozen=True, eq=False)
class ChainBatch:
    """Chains of equally many stages, each with a number of microbatches.

    chains        [chain, stage], indices of groups
    microbatches  [chain]
    """

    setting: SearchSetting
    chains: Ints
    microbatches: Ints

    @property
    def stages(self) -> int:
        """Stages of every chain."""
        return int(self.chains.shape[1])

    @cached_property
    def forward(self) -> Floats:
        """Of one layer in every stage, [chain, stage]."""
        return self.setting.fleet.forward_ms[self.chains]

    @cached_property
    def backward(self) -> Floats:
        """Of one layer in every stage."""
        return self.setting.fleet.backward_ms[self.chains]

    @cached_property
    def extra(self) -> Floats:
        """Forward of the embedding in the first stage and of the head in the last; else 0."""
        extra = np.zeros(self.chains.shape)
        extra[:, 0] += self.setting.fleet.embedding_ms[self.chains[:, 0]]
        extra[:, -1] += self.setting.fleet.head_ms[self.chains[:, -1]]
        return extra

    @cached_property
    def most(self) -> Ints:
        """Layers that fit into the memory of every stage."""
        setting, stages = self.setting, self.stages
        limit = np.array(most_in_flight(setting.schedule, stages, setting.max_in_flight))
        in_flight = np.minimum(limit, np.maximum(self.microbatches, 1)[:, None])
        most = setting.footprint.most_layers(setting.fleet.widest[self.chains], in_flight)
        return np.asarray(np.minimum(most, setting.layers - stages + 1))

    @cached_property
    def fits(self) -> NDArray[np.bool_]:
        """Whether the stages of a chain hold all layers together, [chain]."""
        most = self.most
        return np.asarray((most.min(axis=1) >= 1) & (most.sum(axis=1) >= self.setting.layers))

    def pick(self, rows: Ints) -> ChainBatch:
        """Some of them, in that order."""
        picked = ChainBatch(self.setting, self.chains[rows], self.microbatches[rows])
        for name in ("forward", "backward", "extra", "most", "fits"):
            if name in self.__dict__:
                picked.__dict__[name] = self.__dict__[name][rows]
        return picked

    def times(self, layers: Ints) -> tuple[Floats, Floats]:
        """Forward and backward of every stage with that many layers, [..., chain, stage]."""
        return layers * self.forward + self.extra, layers * self.backward + 2.0 * self.extra

    def slowest(self, layers: Ints) -> Floats:
        """What the bottleneck stage needs for one microbatch, [..., chain]."""
        forward, backward = self.times(layers)
        return np.asarray((forward + backward).max(axis=-1))

    def bounds(self, layers: Ints) -> Floats:
        """Lower bounds of the spans with these layers, [..., chain]."""
        return in_flight_bound(
            *self.times(layers),
            self.microbatches,
            p2p=self.setting.p2p_ms,
            max_in_flight=self.setting.max_in_flight,
            schedule=self.setting.schedule,
        )

    def whole_layers(self, within_ms: float, *, tight: bool = False) -> tuple[Floats, Ints]:
        """Bounds over all whole layers, inf beyond `within_ms`, and layers that attain them."""
        program = heterogeneous_layers if tight else whole_layers
        return program(
            StageCosts(self.forward, self.backward, self.extra, self.most),
            self.setting.layers,
            self.microbatches,
            within_ms,
            p2p=self.setting.p2p_ms,
            max_in_flight=self.setting.max_in_flight,
            schedule=self.setting.schedule,
        )

    def spans(self, layers: Ints) -> Floats:
        """Exact spans with these layers [chain, stage]."""
        return pipeline_makespans(
            *self.times(layers),
            self.microbatches,
            p2p=self.setting.p2p_ms,
            max_in_flight=self.setting.max_in_flight,
            schedule=self.setting.schedule,
        )
