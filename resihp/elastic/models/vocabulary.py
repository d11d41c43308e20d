"""Embedding, head and cross entropy over a vocabulary sharded by rows."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from resihp.layout import Range

from ..process_groups.abortable import AbortableProcessGroup
from .base import Packed
from .tensor_parallel import copy_to_tp_region, reduce_from_tp_region


class _VocabularyTable(nn.Module):
    """Rows [start, stop) of a table; the other ranks of the group hold the other rows.

    A small share of a small vocabulary may be empty.
    """

    def __init__(self, rows: Range, hidden: int, group: AbortableProcessGroup) -> None:
        super().__init__()
        self.rows, self.group = rows, group
        self.table = nn.Parameter(torch.empty(rows[1] - rows[0], hidden, device="cpu"))


class VocabularyEmbedding(_VocabularyTable):
    """Embedding of the tokens."""

    def forward(self, packed: Packed) -> torch.Tensor:
        """[T] ids -> [T, D]."""
        if len(self.group) == 1:
            return functional.embedding(packed.tokens, self.table)
        if len(self.table) == 0:
            nothing_D = self.table.sum(dim=0)
            return reduce_from_tp_region(
                nothing_D.expand(len(packed.tokens), -1).clone(), self.group
            )
        local, outside = _localise(packed.tokens, self.rows)
        embedded_TD = functional.embedding(local, self.table)
        own_TD = embedded_TD.masked_fill(outside.unsqueeze(-1), 0.0)
        return reduce_from_tp_region(own_TD, self.group, in_place=True)


class VocabularyHead(_VocabularyTable):
    """Projection on the rows, and the loss over the whole vocabulary."""

    def logits(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Logits of the V rows held here, [T, D] -> [T, V], of normalised activations."""
        x_TD = copy_to_tp_region(x_TD, self.group, in_place=True)
        return functional.linear(x_TD, self.table).float()

    def loss(self, x_TD: torch.Tensor, packed: Packed) -> torch.Tensor:
        """Scalar sum of the cross entropy over the T targets, of normalised activations."""
        return sharded_cross_entropy(self.logits(x_TD), packed.targets, self.rows, self.group)


def sharded_cross_entropy(
    logits_TV: torch.Tensor, targets_T: torch.Tensor, rows: Range, group: AbortableProcessGroup
) -> torch.Tensor:
    """Return the sum over T of the cross entropy, without targets of -100.

    No rank holds a whole row of logits: maximum, normaliser and the target's logit are
    reduced over the group (Megatron-LM, arXiv 1909.08053, section 3).
    """
    if rows[0] == rows[1]:  # a column that counts for nothing, so that there is a maximum
        logits_TV = functional.pad(logits_TV, (0, 1), value=-torch.inf)
    if len(group) == 1:
        return functional.cross_entropy(logits_TV, targets_T, reduction="sum")
    loss = _CrossEntropy.apply(logits_TV, targets_T, rows, group)  # type: ignore[no-untyped-call]
    return cast(torch.Tensor, loss)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: torch.Tensor,
        targets_T: torch.Tensor,
        rows: Range,
        group: AbortableProcessGroup,
    ) -> torch.Tensor:
        peak_T = group.all_reduce_max(logits_TV.amax(dim=-1))
        exp_TV = (logits_TV - peak_T.unsqueeze(-1)).exp_()
        local_T, outside_T = _localise(targets_T, rows)
        picked_T = logits_TV.gather(-1, local_T.unsqueeze(-1)).squeeze(-1) - peak_T
        sums = torch.stack((exp_TV.sum(dim=-1), picked_T.masked_fill(outside_T, 0.0)))
        total_T, picked_T = group.all_reduce(sums)
        counts_T = targets_T >= 0
        softmax_TV = exp_TV.div_(total_T.unsqueeze(-1))
        ctx.save_for_backward(softmax_TV, local_T, outside_T, counts_T)
        losses_T: torch.Tensor = (total_T.log() - picked_T) * counts_T
        return losses_T.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        softmax_TV, local_T, outside_T, counts_T = ctx.saved_tensors
        hit_T1 = (~outside_T).to(softmax_TV.dtype).unsqueeze(-1)
        grad_TV = softmax_TV.scatter_add(-1, local_T.unsqueeze(-1), -hit_T1)
        return grad_TV.mul_(counts_T.unsqueeze(-1) * grad), None, None, None


def _localise(ids: torch.Tensor, rows: Range) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids relative to `rows`, clamped, and a mask of those outside."""
    outside = (ids < rows[0]) | (ids >= rows[1])
    return (ids - rows[0]).clamp(0, max(0, rows[1] - rows[0] - 1)), outside
