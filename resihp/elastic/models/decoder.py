"""Common part of the architectures: equal layers between an embedding and a head."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional

from resihp.contracts import ModelShape
from resihp.layout import Param, Range

from .base import Packed, Part

Entry = tuple[str, tuple[int, ...], int | None, int]
"""Name within the layer, unsharded shape, dimension that is split, unit."""


class Decoder:
    """Decoder of a `ModelShape`; matrices of a layer begin with "w", biases with "b"."""

    def __init__(self, shape: ModelShape, *, seed: int = 0) -> None:
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


def attend(
    q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, seq_lens: tuple[int, ...]
) -> torch.Tensor:
    """Attention of N query heads over K key/value heads, [T, N, H]; N is a multiple of K."""
    per_document = [
        functional.scaled_dot_product_attention(
            q.transpose(0, 1),
            k.transpose(0, 1),
            v.transpose(0, 1),
            is_causal=True,
            enable_gqa=q_TNH.shape[1] != k_TKH.shape[1],
        ).transpose(0, 1)
        for q, k, v in zip(
            q_TNH.split(seq_lens), k_TKH.split(seq_lens), v_TKH.split(seq_lens), strict=True
        )
    ]
    return per_document[0] if len(per_document) == 1 else torch.cat(per_document)


def empty(*shape: int) -> nn.Parameter:
    """Create a parameter with values unset."""
    return nn.Parameter(torch.empty(shape))


def width(span: Range) -> int:
    """Return the number of rows or columns in a range."""
    return span[1] - span[0]


def normal(key: str, shape: tuple[int, ...], *, seed: int, scale: float) -> torch.Tensor:
    """Return normal values with deviation `scale`: a function of seed and key."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{key}".encode()))
    return torch.randn(shape, generator=generator) * scale


def positions(seq_lens: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return the position [T] of each token in its document."""
    return torch.cat([torch.arange(length, device=device) for length in seq_lens])
