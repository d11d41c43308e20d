"""Counts, losses and weights of a step's microbatches, exchanged by an all-reduce."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from resihp.contracts import ContractError, MiscountError


@dataclass(frozen=True)
class MicrobatchReport:
    """Loss of one microbatch and its weight; None where the loop gives no weights."""

    loss: torch.Tensor | float = 0.0
    weight: float | None = None


@dataclass(frozen=True)
class StepCounts:
    """Losses by microbatch index, and weights where the loop gives them."""

    losses: tuple[float, ...]
    weights: tuple[float, ...] | None = None

    @property
    def weight(self) -> float | None:
        """Divisor of the sums of gradients and losses; None: they are not divided."""
        return None if self.weights is None else math.fsum(self.weights)

    @property
    def loss(self) -> float:
        """Loss of the step, summed in the order of the microbatches."""
        weight = self.weight
        return math.fsum(self.losses) / (1.0 if weight is None else weight)

    def reports(self) -> dict[int, MicrobatchReport]:
        """Reports of all microbatches, as one process would give that had computed them all."""
        weights = self.weights or (None,) * len(self.losses)
        pairs = zip(self.losses, weights, strict=True)
        return {index: MicrobatchReport(*pair) for index, pair in enumerate(pairs)}


def count_rows(
    reports: Mapping[int, MicrobatchReport],
    microbatches: int,
    *,
    members: int,
    loss_members: int | None = None,
) -> torch.Tensor:
    """Return the rows of one rank, [4, microbatches]: loss, count, weight, has weight.

    The sum of the rows over all ranks is the argument of `read_counts`.

    members       ranks of the replica, each of which counts 1 / members
    loss_members  ranks of the replica that report the loss; default: all
    """
    rows = torch.zeros(4, microbatches, dtype=torch.float64)
    for index, report in reports.items():
        weight = report.weight
        rows[0, index] = float(report.loss) / (loss_members or members)
        counted = (1.0, weight or 0.0, float(weight is not None))
        rows[1:, index] = torch.tensor(counted, dtype=torch.float64) / members
    return rows


def read_counts(summed: torch.Tensor) -> StepCounts:
    """Return the counts of the step from the rows summed over all ranks.

    Raises `MiscountError` unless each microbatch counts once, and `ContractError` if some but not
    all have a weight, or if the weights do not sum to a positive number.
    """
    counts = summed[1]
    wrong = ((counts - 1.0).abs() > 1e-6).nonzero().flatten()
    if len(wrong):
        shown = {int(index): round(float(counts[index]), 3) for index in wrong[:6]}
        raise MiscountError(f"microbatches do not count once: {shown}")
    weighted = float(summed[3].sum())
    if not (weighted < 0.5 or abs(weighted - summed.shape[1]) < 0.5):
        raise ContractError("report", "give a weight with every microbatch of a step, or with none")
    read = StepCounts(tuple(summed[0].tolist()), tuple(summed[2].tolist()) if weighted else None)
    if read.weight is not None and not read.weight > 0.0:
        raise ContractError("report", f"the weights of a step sum to {read.weight}")
    return read
