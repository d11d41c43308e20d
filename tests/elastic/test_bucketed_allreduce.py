"""Gradients of a loop travel while backward runs, in one order, and never what has changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import nn

from resihp.contracts import ContractError
from resihp.elastic.process_groups.abortable import AbortableProcessGroup
from resihp.elastic.process_groups.bucketed_allreduce import BucketedAllReduce, GradientSlice


class Ended:
    """Work that is over."""

    def __init__(self, has_failed: bool) -> None:
        self.has_failed = has_failed


class Doubling:
    """As a group of two that hold the same."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.fails_after = 1000

    def __len__(self) -> int:
        return 2

    def start_all_reduce(self, flat: torch.Tensor) -> Any:
        self.sizes.append(flat.numel())
        flat.mul_(2)
        return Ended(len(self.sizes) > self.fails_after)

    def wait(self, work: Any) -> None:
        pass

    def has_succeeded(self, work: Ended) -> bool:
        return not work.has_failed


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def backward(net: nn.Module) -> None:
    net(torch.ones(2, 8)).square().sum().backward()


def summing(
    net: nn.Module, group: Doubling, bucket_bytes: int, summed: Sequence[torch.Tensor] = ()
) -> BucketedAllReduce:
    slices = [GradientSlice(parameter) for parameter in reversed(list(net.parameters()))]
    return BucketedAllReduce([(cast(AbortableProcessGroup, group), slices)], bucket_bytes, summed)


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


def test_a_gradient_that_something_else_scales_after_it_was_sent() -> None:
    """As a pipeline does that is not told to leave that to the loop."""
    net, group = model(), Doubling()
    bucketed = summing(net, group, 1 << 20)
    with bucketed.overlapped():
        backward(net)
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(4)
    with pytest.raises(ContractError, match="scale_grads=False"):
        finish(bucketed)


def test_no_other_thread_takes_a_bucket_for_its_sum() -> None:
    """One that looks between the copy of the gradients and their exchange."""
    net, seen = model(), list[Any]()

    class Watched(Doubling):
        def start_all_reduce(self, flat: torch.Tensor) -> Any:
            seen.extend(bucketed.sum_of(one) for one in bucketed._bucket_of)
            return super().start_all_reduce(flat)

    backward(net)
    bucketed = summing(net, Watched(), 1 << 20)
    bucketed.start()
    assert seen == [None] * len(list(net.parameters()))
    for one in bucketed._bucket_of:
        summed = bucketed.sum_of(one)
        assert summed is not None
        torch.testing.assert_close(summed, 2 * one.read())


def test_several_passes_are_waited_for() -> None:
    """The microbatches of a pipeline: its gradients are complete with the last of them."""
    net, group = model(), Doubling()
    bucketed = summing(net, group, 160)
    with bucketed.overlapped(passes=lambda _: 3):
        backward(net)
        backward(net)
        assert not group.sizes
        backward(net)
        sent = list(group.sizes)
    total = finish(bucketed)
    assert group.sizes == sent
    assert len(sent) > 1
    for parameter, summed in zip(net.parameters(), total, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(summed, 2 * parameter.grad)


def test_gradients_that_are_views_of_one_buffer() -> None:
    """Those of FSDP2: a write to one counts as a write to all, and hooks are called by hand."""
    net, group = model(), Doubling()
    parameters = list(net.parameters())
    buffer = torch.zeros(sum(parameter.numel() for parameter in parameters))
    parts = buffer.split([parameter.numel() for parameter in parameters])
    bucketed = summing(net, group, 1)

    def accumulate(factor: float) -> None:
        with torch.no_grad():
            for parameter, part in reversed(list(zip(parameters, parts, strict=True))):
                if parameter.grad is None:
                    parameter.grad = part.view_as(parameter)
                parameter.grad += factor
                for hook in (parameter._post_accumulate_grad_hooks or {}).values():  # type: ignore[attr-defined]
                    hook(parameter)

    accumulate(1.0)
    with bucketed.overlapped():
        accumulate(2.0)
    assert len(group.sizes) == len(parameters)
    assert all(torch.equal(summed, torch.full_like(summed, 6.0)) for summed in finish(bucketed))
    again = summing(net, group, 1)
    with again.overlapped():
        accumulate(1.0)
        buffer.mul_(2.0)
    with pytest.raises(ContractError, match="changed"):
        finish(again)


def test_only_what_was_not_summed_travels_again() -> None:
    """Sums from before a loss hold all microbatches already, whatever is added locally."""
    net, group = model(), Doubling()
    group.fails_after = 2
    first = summing(net, group, 1)
    with first.overlapped():
        backward(net)
    summed = first.summed()
    assert len(summed) == 2
    kept = [flat.clone() for flat in summed]
    survivors = Doubling()
    second = summing(net, survivors, 1, summed)
    with second.overlapped():
        backward(net)
    sizes = [parameter.numel() for parameter in reversed(list(net.parameters()))]
    assert survivors.sizes == sizes[2:]
    total = finish(second)[::-1]
    assert all(torch.equal(a.flatten(), b) for a, b in zip(total, kept, strict=False))
    for parameter, whole in list(zip(reversed(list(net.parameters())), total, strict=True))[2:]:
        assert parameter.grad is not None
        torch.testing.assert_close(whole, 2 * parameter.grad)
    assert len(second.summed()) == len(sizes)
