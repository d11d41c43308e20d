"""Rotary positions of packed documents: those of each document alone, in one copy to the device."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from resihp.elastic.models.rope import DynamicRope, LinearRope, Llama3Rope, Rope, YarnRope, rotary
from tests.elastic.operators import NoteOperators

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
    seen: Counter[str] = Counter()

    def note(func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if isinstance(result, torch.Tensor) and result.device == META:
            sources = [arg for arg in args if isinstance(arg, torch.Tensor)]
            seen["operators"] += 1
            seen["from host"] += any(source.device == CPU for source in sources)

    operators = []
    for seq_lens in ((33,), (5, 7, 9, 12) * 8):
        seen.clear()
        with NoteOperators(note):
            rotary(rope, seq_lens, HEAD_DIM, META)
        assert seen["from host"] == 1
        operators.append(seen["operators"])
    assert operators[0] == operators[1]
