"""Rotary positions of packed documents: those of each document alone, in one copy to the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from resihp.elastic.models.rope import DynamicRope, LinearRope, Llama3Rope, Rope, YarnRope, rotary

HEAD_DIM, CPU, META = 16, torch.device("cpu"), torch.device("meta")
ROPES = {
    "default": Rope(),
    "linear": LinearRope(factor=3.0),
    "dynamic": DynamicRope(factor=4.0, max_position_embeddings=8),
    "llama3": Llama3Rope(
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    ),
    "yarn": YarnRope(factor=8.0, original_max_position_embeddings=64),
}


class Copies(TorchDispatchMode):
    """Counts operators, and copies from the host to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.from_host = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.device == META:
            sources = [arg for arg in args if isinstance(arg, torch.Tensor)]
            self.operators += 1
            self.from_host += any(source.device == CPU for source in sources)
        return result


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize("seq_lens", [(1,), (7,), (5, 70, 9, 1), (9, 20_000, 1)])
def test_positions_restart_with_each_document(rope: Rope, seq_lens: tuple[int, ...]) -> None:
    alone = [
        torch.outer(torch.arange(length, dtype=torch.float32), rope.frequencies(HEAD_DIM, length))
        for length in seq_lens
    ]
    angles = torch.cat(alone).unsqueeze(1)
    cos, sin = rotary(rope, seq_lens, HEAD_DIM, CPU)
    assert torch.equal(cos, angles.cos() * rope.scale)
    assert torch.equal(sin, angles.sin() * rope.scale)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_one_copy_reaches_the_device_for_any_number_of_documents(rope: Rope) -> None:
    operators = []
    for seq_lens in ((33,), (5, 7, 9, 12) * 8):
        with Copies() as copies:
            rotary(rope, seq_lens, HEAD_DIM, META)
        assert copies.from_host == 1
        operators.append(copies.operators)
    assert operators[0] == operators[1]
