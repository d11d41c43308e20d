"""A recomputed call: what it keeps, what it runs again, and what goes wrong in it."""

from __future__ import annotations

import weakref

import pytest
import torch

from resihp.contracts import PeerLostError
from resihp.elastic.models.recomputation import (
    attention_core,
    recomputed,
    recomputing_attention,
)


class Layer:
    """Two products with a nonlinearity between them; counts the calls of each part."""

    def __init__(self) -> None:
        self.weight = torch.randn(8, 8, requires_grad=True)
        self.begun = self.ended = 0
        self.inner: list[weakref.ref[torch.Tensor]] = []
        self.is_lost = False

    def __call__(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        self.begun += 1
        if self.is_lost and self.begun > 1:
            raise PeerLostError("lost a peer")
        inner = (x @ self.weight).tanh()
        self.inner.append(weakref.ref(inner))
        result = inner @ self.weight * scale
        self.ended += 1
        return result


def test_the_gradients_are_the_same_and_nothing_is_kept() -> None:
    layer, x = Layer(), torch.randn(4, 8, requires_grad=True)
    layer(x, 2.0).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is not None
    kept = x.grad.clone(), layer.weight.grad.clone()
    x.grad = layer.weight.grad = None
    output = recomputed(layer, x, 2.0)
    assert layer.inner[1]() is None, "an activation is kept"
    output.sum().backward()
    assert torch.equal(x.grad, kept[0])
    assert torch.equal(layer.weight.grad, kept[1])
    del output
    assert layer.inner[2]() is None, "an activation outlives the backward pass"


def test_the_call_is_repeated_once_up_to_the_last_tensor_that_it_saves() -> None:
    layer, x = Layer(), torch.randn(4, 8, requires_grad=True)
    output = recomputed(layer, x, 2.0)
    for _ in range(3):  # as the operators of a split backward pass
        torch.autograd.backward(output, torch.ones_like(output), inputs=[x], retain_graph=True)
    assert (layer.begun, layer.ended) == (2, 1)


def test_without_gradients_nothing_is_repeated() -> None:
    layer = Layer()
    with torch.no_grad():
        recomputed(layer, torch.randn(4, 8), 1.0)
    assert layer.begun == 1


def test_a_loss_while_it_is_repeated_is_that_loss() -> None:
    layer, x = Layer(), torch.randn(4, 8, requires_grad=True)
    layer.is_lost = True
    output = recomputed(layer, x, 1.0)
    with pytest.raises(PeerLostError, match="lost a peer"):
        output.sum().backward()


def test_an_input_that_has_changed_is_an_error_not_a_wrong_gradient() -> None:
    layer, x = Layer(), torch.randn(4, 8)
    output = recomputed(layer, x, 1.0)
    x.add_(1.0)
    with pytest.raises(AssertionError, match="has changed"):
        output.sum().backward()


def test_a_core_of_attention_is_recomputed_where_that_is_asked_for() -> None:
    for enabled, calls in ((False, 1), (True, 2)):
        layer, x = Layer(), torch.randn(4, 8, requires_grad=True)
        with recomputing_attention(enabled):
            output = attention_core(layer, x, 1.0)
        output.sum().backward()
        assert layer.begun == calls
