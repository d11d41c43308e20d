"""Matrix products in low precision: activations are cast once for all that multiply them."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from resihp.elastic.models import Model, Packed
from resihp.elastic.process_groups.abortable import AbortableProcessGroup
from tests.elastic.test_models import MODELS, batch

LOW = torch.bfloat16


class Casts(TorchDispatchMode):
    """Counts casts to low precision of tensors of one shape."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is LOW:
            self.count += args[0].shape == self.shape
        return func(*args, **kwargs)


def casts_of(model: Model, packed: Packed, *, low: bool) -> int:
    """Casts of activations [T, D] in the forward pass of a layer."""
    group = AbortableProcessGroup(SimpleNamespace(device=torch.device("cpu"), rank=0), (0,), None)  # type: ignore[arg-type]
    params = model.parameters.layers[0]
    ranges = {param.key.removeprefix("layers.0."): (0, param.size) for param in params}
    module = model.build("layers.0", ranges, group)
    for parameter in module.parameters():
        torch.nn.init.ones_(parameter)
    x_TD = torch.ones(len(packed.tokens), model.width, requires_grad=True)
    with Casts(x_TD.shape) as casts, torch.autocast("cpu", LOW, enabled=low):
        module(x_TD, packed)
    return casts.count


@pytest.mark.parametrize(
    ("model", "expected"),
    [("llama", 2), ("llama with options", 2), ("gpt2", 2), ("mixture", 3)],
)
def test_activations_are_cast_once_for_all_their_products(model: str, expected: int) -> None:
    """Those of attention, and those of the feed-forward network; a mixture's router has its own."""
    assert casts_of(MODELS[model], batch(0, 0), low=True) == expected
    assert casts_of(MODELS[model], batch(0, 0), low=False) == 0
