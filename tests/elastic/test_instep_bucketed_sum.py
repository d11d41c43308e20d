"""Gradients of a loop travel while backward runs, in one order, and never what has changed."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

from resihp.contracts import ContractError
from resihp.elastic.ddp.gradient_buckets import LoopAllReduce
from resihp.elastic.process_groups.abortable import AbortableProcessGroup


class Doubling:
    """As a group of two that hold the same."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __len__(self) -> int:
        return 2

    def start_all_reduce(self, flat: torch.Tensor) -> Any:
        self.sizes.append(flat.numel())
        return flat.mul_(2)

    def complete(self, work: Any) -> None:
        pass


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def backward(net: nn.Module) -> None:
    net(torch.ones(2, 8)).square().sum().backward()


def summing(net: nn.Module, group: Doubling, bucket_bytes: int) -> LoopAllReduce:
    return LoopAllReduce(list(net.parameters()), cast(AbortableProcessGroup, group), bucket_bytes)


@pytest.mark.parametrize("bucket_bytes", [1, 160, 1 << 20])
def test_last_layers_travel_first_and_local_gradients_stay(bucket_bytes: int) -> None:
    net, group = model(), Doubling()
    backward(net)
    bucketed = summing(net, group, bucket_bytes)
    with bucketed.during_last_backward():
        backward(net)
    sent = list(group.sizes)
    total = bucketed.finish()
    assert group.sizes == sent, "all of it has travelled while backward ran"
    assert group.sizes[0] == (4 if bucket_bytes == 1 else 36 if bucket_bytes == 160 else 180)
    for parameter, summed in zip(net.parameters(), total, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(summed, 2 * parameter.grad)


def test_parameters_without_a_gradient_count_as_zeros() -> None:
    net, group = model(), Doubling()
    bucketed = summing(net, group, 1 << 20)
    with bucketed.during_last_backward():
        net[0](torch.ones(2, 8)).sum().backward()
    assert not group.sizes, "the others may still get theirs"
    total = bucketed.finish()
    assert not total[-1].any()
    assert total[0].any()


def test_a_gradient_that_changes_after_it_was_sent() -> None:
    """A second backward pass, or a loop that scales gradients by itself."""
    net, group = model(), Doubling()
    bucketed = summing(net, group, 1 << 20)
    with bucketed.during_last_backward():
        backward(net)
        backward(net)
    with pytest.raises(ContractError, match="overlap=False"):
        bucketed.finish()
