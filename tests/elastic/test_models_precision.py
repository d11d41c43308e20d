"""Matrix products in low precision: activations are cast once for all that multiply them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from resihp.elastic.models import Model, Packed
from resihp.elastic.process_groups.abortable import AbortableProcessGroup
from tests.elastic.operators import NoteOperators
from tests.elastic.test_models import MODELS, batch

LOW = torch.bfloat16


def casts_of(model: Model, packed: Packed, *, low: bool) -> int:
    """Casts of activations [T, D] in the forward pass of a layer."""
    group = AbortableProcessGroup(SimpleNamespace(device=torch.device("cpu"), rank=0), (0,), None)  # type: ignore[arg-type]
    params = model.parameters.layers[0]
    ranges = {param.key.removeprefix("layers.0."): (0, param.size) for param in params}
    module = model.build("layers.0", ranges, group)
    for parameter in module.parameters():
        torch.nn.init.ones_(parameter)
    x_TD = torch.ones(len(packed.tokens), model.width, requires_grad=True)
    casts: list[Any] = []

    def note(func: Any, args: Any, kwargs: Any, result: Any) -> None:
        is_cast = func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is LOW
        if is_cast and args[0].shape == x_TD.shape:
            casts.append(func)

    with NoteOperators(note), torch.autocast("cpu", LOW, enabled=low):
        module(x_TD, packed)
    return len(casts)


@pytest.mark.parametrize(
    ("model", "expected"),
    [("llama", 2), ("llama with options", 2), ("gpt2", 2), ("mixture", 3)],
)
def test_activations_are_cast_once_for_all_their_products(model: str, expected: int) -> None:
    """Those of attention, and those of the feed-forward network; a mixture's router has its own."""
    assert casts_of(MODELS[model], batch(0, 0), low=True) == expected
    assert casts_of(MODELS[model], batch(0, 0), low=False) == 0
