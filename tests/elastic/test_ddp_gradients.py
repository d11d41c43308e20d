"""Gradients of a loop: what a step leaves in `.grad` is what the optimizer takes it to be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from resihp.elastic.ddp.gradients import LoopGradients
from resihp.elastic.ddp.groups import ReplicaGroups
from resihp.elastic.microbatches.assignment import Assignment
from resihp.elastic.process_groups.abortable import ProcessGroupFactory
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
