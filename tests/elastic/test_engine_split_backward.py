"""The two halves of a backward pass: what each computes, and that together they are the whole."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from resihp.elastic.step.split_backward import SplitBackward


class Layers(nn.Module):
    """Weights of all kinds: matrix, bias, norm, one cut into several, one on no path at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)
        self.norm = nn.LayerNorm(6)
        self.experts = nn.Parameter(torch.randn(3, 6, 6))
        self.offset = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(functional.gelu(self.first(x)))
        for expert in self.experts.unbind():
            h = h + functional.linear(h, expert).tanh()
        return self.second(h) + x + self.offset.exp()


def test_the_halves_are_the_whole_and_the_first_leaves_the_weights_alone() -> None:
    model, x, gradient = Layers(), torch.randn(5, 4), torch.randn(5, 4)
    entry = x.clone().requires_grad_()
    model(entry).backward(gradient)
    expected = {name: p.grad for name, p in model.named_parameters()}
    expected_input = entry.grad
    model.zero_grad()

    entry = x.clone().requires_grad_()
    halves = SplitBackward(entry, model(entry))
    assert torch.equal(halves.run_input(gradient), expected_input)
    early = {name for name, p in model.named_parameters() if p.grad is not None}
    assert early == {"experts"}, "only what several operators share cannot wait"
    halves.run_weights()
    for name, param in model.named_parameters():
        assert torch.equal(param.grad, expected[name]), name


def test_a_stage_that_only_hands_on_its_input() -> None:
    entry = torch.randn(3, requires_grad=True)
    halves = SplitBackward(entry, entry)
    gradient = torch.randn(3)
    assert torch.equal(halves.run_input(gradient), gradient)
    halves.run_weights()
    assert torch.equal(entry.grad, gradient)


def test_each_weight_is_added_to_once() -> None:
    """The overlapped reduction counts on it: it sends a gradient when it was added to."""
    model, calls = Layers(), []
    entry = torch.randn(5, 4, requires_grad=True)
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
    halves = SplitBackward(entry, model(entry))
    halves.run_input(torch.randn(5, 4))
    halves.run_weights()
    assert sorted(calls) == sorted(name for name, _ in model.named_parameters())
