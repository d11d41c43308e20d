"""The two conjugate operators of tensor parallelism (Megatron-LM, arXiv 1909.08053, section 3)."""

from __future__ import annotations

from typing import Any, cast

import torch

from ..process_groups.abortable import AbortableProcessGroup


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, group: AbortableProcessGroup, in_place: bool
    ) -> torch.Tensor:
        ctx.group, ctx.in_place = group, in_place
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if not (ctx.in_place and grad.is_contiguous()):
            grad = grad.clone(memory_format=torch.contiguous_format)
        return ctx.group.all_reduce(grad), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, group: AbortableProcessGroup, in_place: bool
    ) -> torch.Tensor:
        if in_place:
            ctx.mark_dirty(tensor)  # whoever has saved it for its backward pass finds that out
        else:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        return group.all_reduce(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad, None, None


def copy_to_tp_region(
    tensor: torch.Tensor, group: AbortableProcessGroup, *, in_place: bool = False
) -> torch.Tensor:
    """Into a sharded region: identity forward, sum of the gradients over the group backward.

    `in_place` promises that what uses the result makes a new tensor for its gradient, as a matrix
    product does and an addition does not; the sum then overwrites it.
    """
    if len(group) == 1:
        return tensor
    return cast(torch.Tensor, _Enter.apply(tensor, group, in_place))  # type: ignore[no-untyped-call]


def reduce_from_tp_region(
    tensor: torch.Tensor, group: AbortableProcessGroup, *, in_place: bool = False
) -> torch.Tensor:
    """Out of a sharded region: sum over the group forward, identity backward.

    Summed in float32 whatever the precision of the operators, as a single rank's matrix product
    would be. `in_place` promises that `tensor` was just computed and is used nowhere else; the sum
    then overwrites it.
    """
    if len(group) == 1:
        return tensor
    wide = tensor.float()
    is_own = (in_place or wide is not tensor) and wide.is_contiguous() and not wide._is_view()
    return cast(torch.Tensor, _Leave.apply(wide, group, is_own))  # type: ignore[no-untyped-call]
