"""Counts, losses and weights of a step's microbatches, exchanged by an all-reduce."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from resihp.contracts import ContractError, MiscountError


@dataclass(frozen=True)
class MicrobatchReport:
    """Loss of one microbatch and its weight, as far as this process gives them."""

    loss: torch.Tensor | float | None = None
    weight: float | None = None


@dataclass(frozen=True)
class StepCounts:
    """Losses by microbatch index, weights where the loop gives them, and the computing replicas."""

    losses: tuple[float, ...]
    weights: tuple[float, ...] | None = None
    replicas: tuple[int, ...] = ()

    @property
    def weight(self) -> float | None:
        """Divisor of the sums of gradients and losses; None: they are not divided."""
        return None if self.weights is None else math.fsum(self.weights)

    @property
    def loss(self) -> float:
        """Loss of the step; NaN if that is no number, as of infinite losses of either sign."""
        weight = self.weight
        try:
            return math.fsum(self.losses) / (1.0 if weight is None else weight)
        except (ValueError, OverflowError):
            return math.nan

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
    replica: int = 0,
) -> torch.Tensor:
    """Return the rows of one rank, [6, microbatches]: count, loss, has loss, weight, has weight,
    replica.

    The sum of the rows over all ranks is the argument of `read_counts`. Those ranks of a replica
    that have a loss or a weight, such as its last pipeline stage, give it.

    members  ranks of the replica, each of which counts 1 / members
    replica  index of the replica, the same on all of its members
    """
    rows = torch.zeros(6, microbatches, dtype=torch.float64, device="cpu")
    for index, report in reports.items():
        rows[0, index], rows[5, index] = 1.0 / members, replica / members
        for row, value in ((1, report.loss), (3, report.weight)):
            if value is not None:
                rows[row, index], rows[row + 1, index] = float(value), 1.0
    return rows


def missing_microbatches(summed: torch.Tensor) -> tuple[int, ...]:
    """Return the microbatches that no rank has counted in the rows summed over all ranks."""
    return tuple((summed[0] < 1e-6).nonzero().flatten().tolist())


def read_counts(summed: torch.Tensor) -> StepCounts:
    """Return the counts of the step from the rows summed over all ranks.

    Losses and weights are means over the ranks that gave them; a loss that none gave is 0. Raises
    `MiscountError` unless each microbatch counts once, and `ContractError` if some but not all have
    a weight, or if the weights do not sum to a positive number.
    """
    counts, losses, with_loss, weights, with_weight, replicas = summed
    wrong = ((counts - 1.0).abs() > 1e-6).nonzero().flatten()
    if len(wrong):
        shown = {int(index): round(float(counts[index]), 3) for index in wrong[:6]}
        raise MiscountError(f"microbatches do not count once: {shown}")
    has_weight = with_weight > 0.0
    if has_weight.any() and not has_weight.all():
        raise ContractError("report", "give a weight with every microbatch of a step, or with none")
    means = (losses / with_loss.clamp(min=1.0), weights / with_weight.clamp(min=1.0))
    read = StepCounts(
        losses=tuple(means[0].tolist()),
        weights=tuple(means[1].tolist()) if has_weight.any() else None,
        replicas=tuple(map(round, replicas.tolist())),
    )
    if read.weight is not None and not read.weight > 0.0:
        raise ContractError("report", f"the weights of a step sum to {read.weight}")
    return read
