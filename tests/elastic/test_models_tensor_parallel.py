"""The two operators around a sharded region: what they overwrite, and what they leave alone."""

from __future__ import annotations

import pytest
import torch

from resihp.elastic.models.tensor_parallel import copy_to_tp_region, reduce_from_tp_region
from resihp.elastic.process_groups.abortable import ProcessGroupFactory
from tests.elastic.threads import on_ranks

RANKS = (0, 1)


def test_in_place_changes_no_number() -> None:
    def run(factory: ProcessGroupFactory) -> list[list[torch.Tensor]]:
        group = factory.group("tp", RANKS)
        found = []
        for in_place in (False, True):
            weight = torch.full((3, 2), factory.rank + 1.0, requires_grad=True)
            x = torch.arange(8.0).view(4, 2).requires_grad_()
            inside = copy_to_tp_region(x, group, in_place=in_place)
            left = reduce_from_tp_region(inside @ weight.T, group, in_place=in_place)
            left.square().sum().backward()
            assert x.grad is not None
            assert weight.grad is not None
            found.append([left.detach(), x.grad, weight.grad])
        return found

    for copied, overwritten in on_ranks(RANKS, run).values():
        for one, other in zip(copied, overwritten, strict=True):
            assert torch.equal(one, other)


def test_without_the_promise_what_others_hold_is_left_alone() -> None:
    """The result of the operator and the gradient that another branch gets, too."""

    def run(factory: ProcessGroupFactory) -> None:
        group = factory.group("tp", RANKS)
        x, beside = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        doubled = x * 2.0
        assert reduce_from_tp_region(doubled, group).tolist() == [4.0, 4.0]
        assert doubled.tolist() == [2.0, 2.0]
        (copy_to_tp_region(x, group) + beside).sum().backward()
        assert x.grad is not None
        assert beside.grad is not None
        assert (x.grad.tolist(), beside.grad.tolist()) == ([2.0, 2.0], [1.0, 1.0])

    on_ranks(RANKS, run)


def test_a_broken_promise_is_an_error_not_a_wrong_gradient() -> None:
    """A tanh has saved its result, which the sum has overwritten."""

    def run(factory: ProcessGroupFactory) -> None:
        group = factory.group("tp", RANKS)
        x = torch.ones(2, requires_grad=True)
        left = reduce_from_tp_region(x.tanh(), group, in_place=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            left.sum().backward()

    on_ranks(RANKS, run)


def test_a_view_is_never_overwritten() -> None:
    def run(factory: ProcessGroupFactory) -> None:
        group = factory.group("tp", RANKS)
        whole = torch.ones(4, requires_grad=True) * 1.0
        assert reduce_from_tp_region(whole[:2], group, in_place=True).tolist() == [2.0, 2.0]
        assert whole.tolist() == [1.0] * 4

    on_ranks(RANKS, run)
