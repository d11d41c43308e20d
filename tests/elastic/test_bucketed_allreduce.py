"""Gradients of a loop travel while backward runs, in one order, and never what has changed."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

from resihp.contracts import ContractError
from resihp.elastic.process_groups.abortable import AbortableProcessGroup
from resihp.elastic.process_groups.bucketed_allreduce import BucketedAllReduce, GradientSlice


class Doubling:
    """As a group of two that hold the same."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __len__(self) -> int:
        return 2

    def start_all_reduce(self, flat: torch.Tensor) -> Any:
        self.sizes.append(flat.numel())
        return flat.mul_(2)

    def wait(self, work: Any) -> None:
        pass


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def backward(net: nn.Module) -> None:
    net(torch.ones(2, 8)).square().sum().backward()


def summing(net: nn.Module, group: Doubling, bucket_bytes: int) -> BucketedAllReduce:
    slices = [GradientSlice(parameter) for parameter in reversed(list(net.parameters()))]
    return BucketedAllReduce([(cast(AbortableProcessGroup, group), slices)], bucket_bytes)


def finish(bucketed: BucketedAllReduce) -> list[torch.Tensor]:
    """The sums in the order of the model's parameters."""
    return [total for _, total in bucketed.finish()][::-1]


@pytest.mark.parametrize("bucket_bytes", [1, 160, 1 << 20])
def test_last_layers_travel_first_and_local_gradients_stay(bucket_bytes: int) -> None:
    net, group = model(), Doubling()
    backward(net)
    bucketed = summing(net, group, bucket_bytes)
    with bucketed.overlapped():
        backward(net)
    sent = list(group.sizes)
    total = finish(bucketed)
    assert group.sizes == sent, "all of it has travelled while backward ran"
    assert group.sizes[0] == (4 if bucket_bytes == 1 else 36 if bucket_bytes == 160 else 180)
    for parameter, summed in zip(net.parameters(), total, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(summed, 2 * parameter.grad)


def test_parameters_without_a_gradient_count_as_zeros() -> None:
    net, group = model(), Doubling()
    bucketed = summing(net, group, 1 << 20)
    with bucketed.overlapped():
        net[0](torch.ones(2, 8)).sum().backward()
    assert not group.sizes, "the others may still get theirs"
    total = finish(bucketed)
    assert not total[-1].any()
    assert total[0].any()


def test_a_gradient_that_changes_after_it_was_sent() -> None:
    """A second backward pass, or a loop that scales gradients by itself."""
    net, group = model(), Doubling()
    bucketed = summing(net, group, 1 << 20)
    with bucketed.overlapped():
        backward(net)
        backward(net)
    with pytest.raises(ContractError, match="overlap=False"):
        finish(bucketed)
