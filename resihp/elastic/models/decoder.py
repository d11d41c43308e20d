"""Common part of the architectures: equal layers between an embedding and a head."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from resihp.contracts import ModelShape
from resihp.layout import Param, Range

from .base import Packed, Part
from .weights import normal, width

Entry = tuple[str, tuple[int, ...], int | None, int]
"""Name within the layer, unsharded shape, dimension that is split, unit."""


class Decoder:
    """Decoder of a `ModelShape`; matrices of a layer begin with "w", biases with "b"."""

    def __init__(self, shape: ModelShape, *, seed: int) -> None:
        self.shape, self.seed, self.width = shape, seed, shape.hidden

    def layers(self, entries: tuple[Entry, ...]) -> tuple[tuple[Param, ...], ...]:
        """Parameters of all layers."""
        return tuple(
            tuple(
                Param(f"layers.{i}.{name}", shape, dim, unit) for name, shape, dim, unit in entries
            )
            for i in range(self.shape.layers)
        )

    def initial(self, key: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Ones for norms, zeros for biases, else normal with deviation 0.02.

        It is 0.02 / sqrt(2 L) for the matrices into the residual, as in GPT-2.
        """
        name = key.rsplit(".", 1)[1]
        if "norm" in name:
            return torch.ones(shape)
        if name.startswith("b"):
            return torch.zeros(shape)
        into_residual = name in {"wo", "w_out", "w_down"}
        scale = 0.02 / (2 * self.shape.layers) ** 0.5 if into_residual else 0.02
        return normal(key, shape, seed=self.seed, scale=scale)

    def flops(self, part: Part, ranges: Mapping[str, Range], packed: Packed) -> float:
        """Return 2 per weight and token, plus causal attention over each document."""
        tokens, hidden = len(packed.tokens), self.shape.hidden
        if part == "first":
            return 0.0
        if part == "last":
            return 2.0 * tokens * hidden * width(ranges["table"])
        attention = 2.0 * packed.sum_sq_len * width(ranges["wq"])
        return 2.0 * tokens * hidden * self.columns(ranges) + attention

    def columns(self, ranges: Mapping[str, Range]) -> float:
        """Return the columns of matrices that each token passes on this rank."""
        return sum(width(span) for name, span in ranges.items() if name.startswith("w"))
