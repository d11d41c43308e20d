"""Gradients of a loop: what a step leaves in `.grad` is what the optimizer takes it to be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest
import torch
from torch import nn

from resihp.contracts import ContractError
from resihp.elastic.ddp.gradients import LoopGradients
from resihp.elastic.ddp.groups import ReplicaGroups
from resihp.elastic.microbatches.assignment import Assignment
from resihp.elastic.process_groups.abortable import AbortableProcessGroup, ProcessGroupFactory
from resihp.elastic.process_groups.bucketed_allreduce import BucketedAllReduce, GradientSlice
from tests.elastic.threads import on_ranks

REPLICAS = (0, 1)
SHARES = tuple(Assignment(todo=(replica,)) for replica in REPLICAS)
"""One microbatch each."""


def gradients_of(model: nn.Module, *, ordered: bool = False) -> LoopGradients:
    return LoopGradients(model, len(REPLICAS), bucket_bytes=1 << 20, overlap=True, ordered=ordered)


def convolution() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    return model


def pixels(index: int) -> torch.Tensor:
    chosen = torch.Generator().manual_seed(index)
    return torch.randn(2, 4, 8, 8, generator=chosen).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("ordered", [False, True])
def test_sums_keep_the_memory_format_of_their_parameter(ordered: bool) -> None:
    """A fused optimizer goes through both in the order of memory."""
    plain = convolution()
    for index in range(len(REPLICAS)):
        plain(pixels(index)).square().mean().backward()
    expected = [parameter.grad for parameter in plain.parameters()]
    models = [convolution() for _ in REPLICAS]  # not by the threads, which share one seed

    def run_rank(factory: ProcessGroupFactory) -> list[nn.Parameter]:
        group, model = factory.group("replicas", REPLICAS), models[factory.rank]
        groups, sums = ReplicaGroups(group, group), gradients_of(model, ordered=ordered)
        sums.begin()
        with sums.adding(SHARES[factory.rank].todo, groups, is_last=True):
            model(pixels(factory.rank)).square().mean().backward()
        sums.sum_over(groups, SHARES, factory.rank)
        sums.use(None)
        return list(model.parameters())

    for parameters in on_ranks(REPLICAS, run_rank).values():
        for parameter, gradient in zip(parameters, expected, strict=True):
            assert parameter.grad is not None
            assert gradient is not None
            assert parameter.grad.stride() == parameter.stride()
            torch.testing.assert_close(parameter.grad, gradient)


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=str)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[None]:
    """Another default dtype of torch than fp32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("default_dtype")
def test_ordered_sums_are_fp32_whatever_the_default_dtype() -> None:
    models = [nn.Linear(4, 3, dtype=torch.float32) for _ in REPLICAS]

    def run_rank(factory: ProcessGroupFactory) -> list[torch.Tensor]:
        group, model = factory.group("replicas", REPLICAS), models[factory.rank]
        groups, sums = ReplicaGroups(group, group), gradients_of(model, ordered=True)
        sums.begin()
        with sums.adding(SHARES[factory.rank].todo, groups, is_last=True):
            model(torch.full((1, 4), 1.0 + factory.rank, dtype=torch.float32)).sum().backward()
        sums.sum_over(groups, SHARES, factory.rank)
        assert sums.total is not None
        return sums.total

    for weight, bias in on_ranks(REPLICAS, run_rank).values():
        assert torch.equal(weight, torch.full((3, 4), 3.0, dtype=torch.float32))
        assert torch.equal(bias, torch.full((3,), 2.0, dtype=torch.float32))


@pytest.mark.usefixtures("default_dtype")
def test_a_rank_that_only_receives_sums_has_those_of_the_sender() -> None:
    def run_rank(factory: ProcessGroupFactory) -> list[torch.Tensor]:
        group = factory.group("replicas", REPLICAS)
        kept, shared = (nn.Parameter(torch.zeros(3, dtype=torch.float32)) for _ in range(2))
        for parameter in (kept, shared):
            parameter.grad = torch.full_like(parameter, 1.0 + factory.rank)
        slices = [(group, [GradientSlice(kept), GradientSlice(shared)])]
        bucketed = BucketedAllReduce(
            slices, 1 << 20, holders=lambda one: REPLICAS if one.parameter is shared else (0,)
        )
        return [summed for _, summed in bucketed.finish()]

    for sums in on_ranks(REPLICAS, run_rank).values():
        assert torch.equal(sums[-1], torch.full((3,), 3.0, dtype=torch.float32))


def test_a_parameter_that_is_frozen_between_two_steps_keeps_no_gradient() -> None:
    """An optimizer would update it with that of the last step, again and again."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sums = gradients_of(model)
    sums.begin()
    model(torch.ones(1, 4)).sum().backward()
    model[0].requires_grad_(False)
    sums.begin()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert sums.parameters == list(model[1].parameters())


def test_a_parameter_that_is_added_later() -> None:
    """It would be in no sum."""
    model = nn.Sequential(nn.Linear(4, 4))
    sums = gradients_of(model)
    sums.begin()
    model.append(nn.Linear(4, 2))
    with pytest.raises(ContractError, match="other parameters"):
        sums.begin()


class OtherDevice:
    """A group of CPU tensors whose backend, like gloo, refuses tensors of two devices."""

    device, ranks = torch.device("cpu"), REPLICAS

    def __len__(self) -> int:
        return len(self.ranks)

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, into: list[int], out: list[int]
    ) -> None:
        assert (received.device, received.numel()) == (sent.device, sum(into))
        assert sent.numel() == sum(out)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor] * len(self)


@pytest.mark.parametrize("replica", REPLICAS)
def test_ordered_sums_are_on_the_device_of_the_model(replica: int) -> None:
    """Of a replica without microbatches too."""
    shares = Assignment(todo=REPLICAS), Assignment(todo=())
    model = nn.Linear(3, 2, device="meta")
    group = cast(AbortableProcessGroup, OtherDevice())
    groups, sums = ReplicaGroups(group, group), gradients_of(model, ordered=True)
    sums.begin()
    for index in shares[replica].todo:
        with sums.adding((index,), groups, is_last=index == REPLICAS[-1]):
            model(torch.ones(4, 3, device="meta")).sum().backward()
    sums.sum_over(groups, shares, replica)
    assert sums.total is not None
    assert {tensor.device.type for tensor in sums.total} == {"meta"}
