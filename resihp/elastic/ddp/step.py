"""Coordinates of a process among replicas, and the step that a user's loop iterates over."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
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

    For a pipeline iterate over `batches()`, and run its schedule on the microbatches of each.
    When the loop ends, the gradients are the sums over all microbatches of the step, on every
    replica alike, and `loss` is the sum of what was reported. Where weights were reported, both
    are divided by the sum of the weights, `weight`: with losses that are sums over tokens, and
    numbers of tokens as weights, they are means over the tokens of the step.
    """

    number: int
    microbatches: Iterator[tuple[int, ...]]
    loss: float = math.nan
    weight: float | None = None
    done: dict[int, MicrobatchReport] = field(default_factory=dict)
    is_batched: bool = False
    _present: tuple[int, ...] = ()

    def __iter__(self) -> Iterator[int]:
        for (index,) in self._taken():
            yield index

    def batches(self) -> Iterator[tuple[int, ...]]:
        """Yield microbatches to compute at once, by a pipeline: first this replica's, then others.

        After a loss it redoes some, as many as its quota at most, in another batch. A replica that
        has just joined has none.
        """
        self.is_batched = True
        return self._taken()

    def batches_of(self, microbatches: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Divide `microbatches` as the loop takes them."""
        if self.is_batched:
            yield from [microbatches] if microbatches else []
        else:
            yield from ((index,) for index in microbatches)

    def report(
        self,
        loss: torch.Tensor | float | Sequence[torch.Tensor | float],
        *,
        weight: float | Sequence[float] | None = None,
    ) -> None:
        """Report the loss of the microbatch that was yielded last, without a device sync.

        Of a batch, the losses of all its microbatches, and their weights. Of the processes of a
        replica one at least reports, such as those of the last pipeline stage.
        """
        if not self._present:
            raise ContractError("report", "no microbatch is being computed")
        count = len(self._present)
        losses = _one_each("loss", loss, count)
        weights = [None] * count if weight is None else _one_each("weight", weight, count)
        for index, one, each in zip(self._present, losses, weights, strict=True):
            self.done[index] = MicrobatchReport(one, None if each is None else float(each))

    def _taken(self) -> Iterator[tuple[int, ...]]:
        for batch in self.microbatches:
            self._present = batch
            yield batch
        self._present = ()


Number = torch.Tensor | float


def _one_each(name: str, given: Number | Sequence[Number], count: int) -> list[Number]:
    """Return a number for each of `count` microbatches. Raises `ContractError`."""
    if isinstance(given, torch.Tensor):
        numbers: list[Number] = [given] if count == 1 else list(given.reshape(-1))
    elif isinstance(given, Iterable):
        numbers = list(given)
    else:  # numpy's are no float
        numbers = [given]
    if len(numbers) != count:
        raise ContractError("report", f"{len(numbers)} numbers for {count} microbatches ({name})")
    for number in numbers:
        if isinstance(number, torch.Tensor) and number.numel() != 1:
            raise ContractError("report", f"a {name} is one number, not {tuple(number.shape)}")
    # Copies: the loop may go on to add to its own.
    return [one.detach().clone() if isinstance(one, torch.Tensor) else one for one in numbers]
