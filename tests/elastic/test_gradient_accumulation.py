"""A sum of gradients survives a loss only if it holds whole microbatches."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from resihp.contracts import ContractError
from resihp.elastic.microbatches.ledger import spans
from resihp.elastic.step.gradient_accumulation import DeterministicGradientSum, GradientSum
from resihp.layout import Param

MICROBATCHES = 4


def tensors() -> dict[Param, nn.Parameter]:
    """Parameters of two chunks of one stage."""
    return {
        Param(f"layers.{chunk}.p", (2,), None): nn.Parameter(torch.ones(2)) for chunk in range(2)
    }


def run_pass(sums: GradientSum, parameter: nn.Parameter | None, microbatch: int) -> None:
    """A backward pass through the chunk of `parameter`; None: one that adds to no gradient."""
    with sums.adding(microbatch):
        if parameter is not None:
            parameter.sum().backward()


def test_a_microbatch_that_is_summed_in_part_makes_the_sum_unusable() -> None:
    """Otherwise the part would count twice: the microbatch is computed again after a loss."""
    held = tensors()
    first, second = held.values()
    sums = GradientSum(held, MICROBATCHES)
    sums.start([], {})
    run_pass(sums, second, 0)
    assert sums.finished == ()
    run_pass(sums, second, 1)
    run_pass(sums, first, 0)
    sums.finish(0, 1.0)
    assert sums.finished == (), "it holds a part of the second one"
    run_pass(sums, first, 1)
    sums.finish(1, 1.0)
    assert sums.finished == spans([0, 1])


def test_a_pass_that_adds_nothing_leaves_the_sum_usable() -> None:
    """As the first halves of split passes."""
    held = tensors()
    first, _ = held.values()
    sums = GradientSum(held, MICROBATCHES)
    sums.start([], {})
    run_pass(sums, first, 0)
    sums.finish(0, 1.0)
    run_pass(sums, None, 1)
    assert sums.finished == spans([0])


def test_a_sum_is_complete_when_the_last_pass_has_added_to_it() -> None:
    held = tensors()
    (first_name, first), (second_name, second) = held.items()
    sums = GradientSum(held, MICROBATCHES)
    sums.start([], {})
    run_pass(sums, second, 0)
    assert sums.complete_sum(second_name) is None
    with sums.completing([first_name]):
        assert sums.complete_sum(second_name) is second.grad
        assert sums.complete_sum(first_name) is None
        run_pass(sums, first, 0)
        assert sums.complete_sum(first_name) is first.grad
    assert sums.whole() == held_gradients(held)


def held_gradients(held: dict[Param, nn.Parameter]) -> dict[Param, torch.Tensor | None]:
    return {param: tensor.grad for param, tensor in held.items()}


def test_a_sum_that_was_given_and_changes_fails_the_step() -> None:
    """A model that adds to a parameter twice in one backward pass."""
    held = tensors()
    (name, first), _ = held.items()
    sums = GradientSum(held, MICROBATCHES)
    sums.start([], {})
    with sums.completing(list(held)):
        run_pass(sums, first, 0)
        assert sums.complete_sum(name) is not None
        run_pass(sums, first, 0)
    with pytest.raises(ContractError, match="changed after"):
        sums.whole()
    sums.start([], {})
    assert sums.complete_sum(name) is None, "the next step begins anew"
    sums.whole()


def test_sums_are_given_while_another_thread_takes_all_of_them() -> None:
    """The transfer takes the last ones while the end of the step checks those taken."""
    held = {Param(f"p{i}", (2,)): nn.Parameter(torch.zeros(2)) for i in range(200)}
    sums, before = GradientSum(held, MICROBATCHES), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            sums.start([], {})
            for tensor in held.values():
                tensor.grad = torch.ones(2)
            sums.complete()
            with ThreadPoolExecutor(1) as pool:
                taken = pool.submit(lambda: [sums.complete_sum(param) for param in held])
                while not taken.done():
                    assert sums.whole() == held_gradients(held)
    finally:
        sys.setswitchinterval(before)


def test_the_next_step_begins_with_whole_sums() -> None:
    held = tensors()
    first, _ = held.values()
    sums = GradientSum(held, MICROBATCHES)
    sums.start([], {})
    run_pass(sums, first, 0)
    sums.start([], {2: 1.0})
    assert sums.finished == spans([2])


@pytest.mark.parametrize("kind", [GradientSum, DeterministicGradientSum])
def test_an_interrupted_pass(kind: type[GradientSum]) -> None:
    """Sums in a fixed order keep an unfinished microbatch apart, and stay usable."""
    held = tensors()
    first, second = held.values()
    sums = kind(held, MICROBATCHES)
    sums.start([], {})
    run_pass(sums, first, 0)
    run_pass(sums, second, 0)
    sums.finish(0, 1.0)
    with pytest.raises(RuntimeError), sums.adding(1):
        raise RuntimeError("connection closed by peer")
    assert sums.finished == (spans([0]) if kind is DeterministicGradientSum else ())
