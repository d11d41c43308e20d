"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Shapes: T tokens of a microbatch, D hidden, N query heads and K key/value heads held here,
H head dim, F FFN columns held here, V vocabulary rows held here.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import cached_property, lru_cache

import torch
from torch import nn
from torch.nn import functional

from resihp.contracts import ModelShape
from resihp.layout import Param, Parameters, Range

from ..worlds.comm import Group
from .contract import Packed, Part
from .tensor_parallel import enter_parallel, leave_parallel
from .vocabulary import VocabularyEmbedding, sharded_cross_entropy


class Llama:
    """`resihp.elastic.models.Model` for a `ModelShape`. Untied embeddings."""

    def __init__(self, shape: ModelShape, *, seed: int = 0) -> None:
        self.shape = shape
        self.seed = seed

    @property
    def width(self) -> int:
        """Width of the boundary activation."""
        return self.shape.hidden

    @cached_property
    def parameters(self) -> Parameters:
        """Every parameter and how it may be cut: heads by KV group, FFN by column, vocabulary."""
        s = self.shape
        group = s.head_dim * s.heads // s.kv_heads
        layer = (
            ("attention_norm", (s.hidden,), None, 1),
            ("wq", (s.heads * s.head_dim, s.hidden), 0, group),
            ("wk", (s.kv_heads * s.head_dim, s.hidden), 0, s.head_dim),
            ("wv", (s.kv_heads * s.head_dim, s.hidden), 0, s.head_dim),
            ("wo", (s.hidden, s.heads * s.head_dim), 1, group),
            ("ffn_norm", (s.hidden,), None, 1),
            ("w_gate", (s.ffn, s.hidden), 0, 1),
            ("w_up", (s.ffn, s.hidden), 0, 1),
            ("w_down", (s.hidden, s.ffn), 1, 1),
        )
        return Parameters(
            tuple(
                tuple(Param(f"layers.{i}.{name}", shape, dim, u) for name, shape, dim, u in layer)
                for i in range(s.layers)
            ),
            (Param("first.table", (s.vocab, s.hidden), 0),),
            (Param("last.norm", (s.hidden,)), Param("last.head", (s.vocab, s.hidden), 0)),
        )

    def build(self, part: Part, ranges: Mapping[str, Range], group: Group) -> nn.Module:
        """The module of one part with the given ranges, values unset."""
        if part == "first":
            return VocabularyEmbedding(ranges["table"], self.shape.hidden, group)
        if part == "last":
            return Head(ranges["head"], self.shape.hidden, group)
        return DecoderLayer(self.shape, ranges, group)

    def initial(self, key: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Ones for norms, else normal with deviation 0.02 (0.02 / sqrt(2 L) into the residual)."""
        if key.endswith("norm"):
            return torch.ones(shape)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed}/{key}".encode()))
        scale = 0.02
        if key.endswith(("wo", "w_down")):
            scale /= (2 * self.shape.layers) ** 0.5
        return torch.randn(shape, generator=generator) * scale

    def flops(self, part: Part, ranges: Mapping[str, Range], packed: Packed) -> float:
        """2 per parameter and token, plus causal attention over each document."""
        tokens, hidden = len(packed.tokens), self.shape.hidden
        if part == "first":
            return 0.0
        if part == "last":
            return 2.0 * tokens * hidden * _width(ranges["head"])
        rows = sum(_width(span) for name, span in ranges.items() if not name.endswith("norm"))
        return 2.0 * tokens * hidden * rows + 2.0 * packed.sum_sq_len * _width(ranges["wq"])


class DecoderLayer(nn.Module):
    """One decoder layer with the heads and FFN columns of this rank."""

    def __init__(self, shape: ModelShape, ranges: Mapping[str, Range], group: Group) -> None:
        super().__init__()
        D, self.head_dim, self.group = shape.hidden, shape.head_dim, group
        self.attention_norm = _empty(D)
        self.wq = _empty(_width(ranges["wq"]), D)
        self.wk = _empty(_width(ranges["wk"]), D)
        self.wv = _empty(_width(ranges["wv"]), D)
        self.wo = _empty(D, _width(ranges["wo"]))
        self.ffn_norm = _empty(D)
        self.w_gate = _empty(_width(ranges["w_gate"]), D)
        self.w_up = _empty(_width(ranges["w_up"]), D)
        self.w_down = _empty(D, _width(ranges["w_down"]))

    def forward(self, x_TD: torch.Tensor, packed: Packed) -> torch.Tensor:
        """One layer forward, [T, D] -> [T, D]."""
        h_TD = x_TD + self.attention(_rms_norm(x_TD, self.attention_norm), packed)
        return h_TD + self.ffn(_rms_norm(h_TD, self.ffn_norm))

    def attention(self, x_TD: torch.Tensor, packed: Packed) -> torch.Tensor:
        """Causal attention inside each document."""
        x_TD = enter_parallel(x_TD, self.group)
        cos, sin = _rotary(packed.seq_lens, self.head_dim)
        q_TNH = _rotate(
            functional.linear(x_TD, self.wq).unflatten(-1, (-1, self.head_dim)), cos, sin
        )
        k_TKH = _rotate(
            functional.linear(x_TD, self.wk).unflatten(-1, (-1, self.head_dim)), cos, sin
        )
        v_TKH = functional.linear(x_TD, self.wv).unflatten(-1, (-1, self.head_dim))
        per_document = [
            functional.scaled_dot_product_attention(
                q.transpose(0, 1),
                k.transpose(0, 1),
                v.transpose(0, 1),
                is_causal=True,
                enable_gqa=True,
            ).transpose(0, 1)
            for q, k, v in zip(
                q_TNH.split(packed.seq_lens),
                k_TKH.split(packed.seq_lens),
                v_TKH.split(packed.seq_lens),
                strict=True,
            )
        ]
        out_TD = functional.linear(torch.cat(per_document).flatten(1), self.wo)
        return leave_parallel(out_TD, self.group)

    def ffn(self, x_TD: torch.Tensor) -> torch.Tensor:
        """SwiGLU."""
        x_TD = enter_parallel(x_TD, self.group)
        h_TF = functional.silu(functional.linear(x_TD, self.w_gate))
        h_TF = h_TF * functional.linear(x_TD, self.w_up)
        return leave_parallel(functional.linear(h_TF, self.w_down), self.group)


class Head(nn.Module):
    """Final norm, vocabulary-sharded projection, and the sum of the token losses."""

    def __init__(self, rows: Range, hidden: int, group: Group) -> None:
        super().__init__()
        self.rows, self.group = rows, group
        self.norm = _empty(hidden)
        self.head = _empty(_width(rows), hidden)

    def forward(self, x_TD: torch.Tensor, packed: Packed) -> torch.Tensor:
        """Scalar sum of the cross entropy over the T targets."""
        x_TD = enter_parallel(_rms_norm(x_TD, self.norm), self.group)
        logits_TV = functional.linear(x_TD, self.head)
        return sharded_cross_entropy(logits_TV, packed.targets, self.rows, self.group)


def _empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape))


def _width(span: Range) -> int:
    return span[1] - span[0]


def _rms_norm(x_TD: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x_TD, (x_TD.shape[-1],), weight, 1e-5)


def _rotate(x_TNH: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x_TNH.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


@lru_cache(maxsize=64)
def _rotary(seq_lens: tuple[int, ...], head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine [T, 1, H/2]; positions restart with each document (RoFormer, eq. 34)."""
    positions = torch.cat([torch.arange(length) for length in seq_lens])
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(positions, frequencies).unsqueeze(1)
    return angles.cos(), angles.sin()
