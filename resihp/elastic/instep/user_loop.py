"""What a training loop of the user's sees: the place of its process, and one step at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from resihp.contracts import ContractError


@dataclass(frozen=True)
class Seat:
    """Where this process stands: `replica` of `replicas`, `index` of the `members` in it."""

    replica: int
    replicas: int
    index: int = 0
    members: int = 1

    def __post_init__(self) -> None:
        if not (0 <= self.replica < self.replicas and 0 <= self.index < self.members):
            raise ContractError("seat", f"there is no place {self}")

    @property
    def rank(self) -> int:
        """Number over all processes."""
        return self.replica * self.members + self.index

    def ranks(self, replica: int) -> range:
        """The processes of a replica."""
        return range(replica * self.members, (replica + 1) * self.members)


@dataclass
class Step:
    """One step: iterate over it, and do forward and backward of each microbatch it yields.

    When the loop ends, the gradients are the sums over all `microbatches` of the step, on every
    replica alike, and `loss` is the sum of what was reported: clip, update, zero the gradients.
    """

    number: int
    microbatches: Iterator[int]
    loss: float = math.nan
    reported: dict[int, float] = field(default_factory=dict)
    _present: int | None = None

    def __iter__(self) -> Iterator[int]:
        for index in self.microbatches:
            self._present = index
            yield index

    def report(self, loss: torch.Tensor) -> None:
        """Tell the loss of the microbatch that was yielded last."""
        assert self._present is not None, "a microbatch is being computed"
        self.reported[self._present] = float(loss.detach())
