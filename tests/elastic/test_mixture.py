"""Experts of a layer: what each token gets, and how often the host waits for the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from resihp.contracts import ModelShape
from resihp.elastic.models import Mixture
from resihp.elastic.models.mixture import MixtureLayer
from resihp.elastic.process_groups.abortable import AbortableProcessGroup
from tests.elastic.operators import NoteOperators

WAITS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
"""Of operators whose results' shape or value the host must know."""
TOKENS, SHAPE = 48, ModelShape(layers=1, hidden=32, heads=4, kv_heads=2, ffn=24, vocab=61)


class Reads(TorchFunctionMode):
    """Counts tensors whose values are taken to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        readers = (torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.cpu, torch.Tensor.numpy)
        self.count += func in readers
        return func(*args, **(kwargs or {}))


def layer(experts: int, top_k: int) -> MixtureLayer:
    model = Mixture(SHAPE, experts=experts, top_k=top_k)
    group = AbortableProcessGroup(SimpleNamespace(device=torch.device("cpu"), rank=0), (0,), None)  # type: ignore[arg-type]
    ranges = {p.key.removeprefix("layers.0."): (0, p.size) for p in model.parameters.layers[0]}
    made = model.build("layers.0", ranges, group)
    assert isinstance(made, MixtureLayer)
    chosen = torch.Generator().manual_seed(experts)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=chosen)
    return made


def tokens() -> torch.Tensor:
    chosen = torch.Generator().manual_seed(0)
    return torch.randn(TOKENS, SHAPE.hidden, generator=chosen, requires_grad=True)


def token_by_token(made: MixtureLayer, x: torch.Tensor) -> torch.Tensor:
    """The definition: every expert computes every token."""
    scores_TK, chosen_TK = functional.linear(x, made.router).topk(made.top_k)
    gates_TE = torch.zeros(len(x), made.experts)
    gates_TE = gates_TE.scatter(1, chosen_TK, scores_TK.softmax(dim=-1))
    gate = torch.einsum("td,efd->tef", x, made.w_gate)
    up = torch.einsum("td,efd->tef", x, made.w_up)
    return torch.einsum("te,tef,edf->td", gates_TE, functional.silu(gate) * up, made.w_down)


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (5, 1), (5, 2), (5, 5), (100, 3)])
def test_a_token_gets_the_weighted_sum_of_its_experts(experts: int, top_k: int) -> None:
    """Experts without a token are among the 100."""
    made = layer(experts, top_k)
    found = []
    for compute in (made.ffn, partial(token_by_token, made)):
        x_TD = tokens()
        made.zero_grad()
        out_TD = compute(x_TD)
        out_TD.sin().sum().backward()
        weights = (made.router, made.w_gate, made.w_up, made.w_down)
        found.append([out_TD, x_TD.grad, *(weight.grad for weight in weights)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_neither_waits_nor_activations_grow_with_the_experts() -> None:
    seen: Counter[str] = Counter()

    def note(func: Any, args: Any, kwargs: Any, result: Any) -> None:
        seen["waiting"] += bool(WAITS & set(func.tags))
        if isinstance(result, torch.Tensor):
            seen["activations"] += result.numel() >= TOKENS * SHAPE.hidden

    activations = []
    for experts in (4, 16):
        made, x_TD = layer(experts, top_k=2), tokens()
        seen.clear()
        with NoteOperators(note), Reads() as reads:
            out_TD = made.ffn(x_TD)
            assert reads.count == 1, "of the tokens that each expert gets"
            out_TD.sum().backward()
        assert (seen["waiting"], reads.count) == (0, 1)
        activations.append(seen["activations"])
    assert activations[0] == activations[1]
