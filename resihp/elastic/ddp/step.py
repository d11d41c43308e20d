"""Coordinates of a process among replicas, and the step that a user's loop iterates over."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from resihp.contracts import ContractError

from ..microbatches.counts import MicrobatchReport
from ..rendezvous.environment import Environment


@dataclass(frozen=True)
class ReplicaCoordinates:
    """Coordinates of this process: `replica` of `replicas`, `index` of `members` in it.

    joins  the job is running already; this process belongs to a replica that joins it
    """

    replica: int
    replicas: int
    index: int = 0
    members: int = 1
    joins: bool = False

    def __post_init__(self) -> None:
        if not (0 <= self.replica < self.replicas and 0 <= self.index < self.members):
            raise ContractError("coordinates", f"out of range: {self}")

    @classmethod
    def of(cls, environment: Environment, members: int) -> ReplicaCoordinates:
        """Build replicas of `members` consecutive ranks. Raises `ContractError` for a remainder."""
        rank, size, joins = environment.rank, environment.world_size, environment.joins
        size = max(size, rank - rank % members + members) if joins else size
        if members < 1 or size % members:
            raise ContractError("members", f"{size} processes are no replicas of {members} each")
        return cls(rank // members, size // members, rank % members, members, joins)

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.replica * self.members + self.index

    def ranks(self, replica: int) -> range:
        """Global ranks of a replica."""
        return range(replica * self.members, (replica + 1) * self.members)


@dataclass
class Step:
    """One step: iterate over it, and do forward and backward of each microbatch it yields.

    When the loop ends, the gradients are the sums over all microbatches of the step, on every
    replica alike, and `loss` is the sum of what was reported. Where weights were reported, both
    are divided by the sum of the weights, `weight`: with losses that are sums over tokens, and
    numbers of tokens as weights, they are means over the tokens of the step.
    """

    number: int
    microbatches: Iterator[int]
    loss: float = math.nan
    weight: float | None = None
    done: dict[int, MicrobatchReport] = field(default_factory=dict)
    _present: int | None = None

    def __iter__(self) -> Iterator[int]:
        for index in self.microbatches:
            self._present = index
            yield index
        self._present = None

    def report(self, loss: torch.Tensor | float, *, weight: float | None = None) -> None:
        """Report the loss of the microbatch that was yielded last, without a device sync."""
        if self._present is None:
            raise ContractError("report", "no microbatch is being computed")
        if isinstance(loss, torch.Tensor):
            if loss.numel() != 1:
                raise ContractError("report", f"a loss is one number, not {tuple(loss.shape)}")
            loss = loss.detach()
        self.done[self._present] = MicrobatchReport(loss, weight)
