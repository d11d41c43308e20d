"""The count of a step's microbatches over all processes: each once, with its loss and weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from resihp.contracts import ContractError, MiscountError

from .step import MicrobatchReport


@dataclass(frozen=True)
class StepCounts:
    """Losses by microbatch, and weights if they were reported."""

    losses: tuple[float, ...]
    weights: tuple[float, ...] | None

    @property
    def weight(self) -> float | None:
        """By what the sums of gradients and losses are divided; None: by nothing."""
        return None if self.weights is None else math.fsum(self.weights)

    @property
    def loss(self) -> float:
        """Of the step. The order of summation is that of the microbatches."""
        weight = self.weight
        return math.fsum(self.losses) / (1.0 if weight is None else weight)

    def told(self) -> dict[int, MicrobatchReport]:
        """As if this process had computed everything."""
        weights = self.weights or (None,) * len(self.losses)
        return {
            i: MicrobatchReport(*pair)
            for i, pair in enumerate(zip(self.losses, weights, strict=True))
        }


def written(done: Mapping[int, MicrobatchReport], microbatches: int, members: int) -> torch.Tensor:
    """One process's lines [4, microbatches]: loss, count, weight, whether there is a weight.

    A replica's `members` share each microbatch, so the sums over all processes are means over
    members and sums over replicas.
    """
    lines = torch.zeros(4, microbatches, dtype=torch.float64)
    for index, told in done.items():
        weight = told.weight
        own = (float(told.loss), 1.0, weight or 0.0, float(weight is not None))
        lines[:, index] = torch.tensor(own, dtype=torch.float64) / members
    return lines


def read(lines: torch.Tensor) -> StepCounts:
    """The sum of everybody's lines.

    Raises `MiscountError` unless each microbatch counts once, and `ContractError` if some were
    given a weight and some were not, or if no weight is left to divide by.
    """
    if bool(((lines[1] - 1.0).abs() > 1e-6).any()):
        raise MiscountError(f"microbatches do not count once: {lines[1].tolist()}")
    weighted = float(lines[3].sum())
    if not (weighted < 0.5 or abs(weighted - lines.shape[1]) < 0.5):
        raise ContractError("report", "give a weight with every microbatch of a step, or with none")
    account = StepCounts(tuple(lines[0].tolist()), tuple(lines[2].tolist()) if weighted else None)
    if account.weight is not None and not account.weight > 0.0:
        raise ContractError("report", f"the weights of a step sum to {account.weight}")
    return account
