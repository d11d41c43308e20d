"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Shapes: T tokens of a microbatch, D hidden, N query heads and K key/value heads held here,
H head dim, F FFN columns held here, V vocabulary rows held here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, lru_cache

import torch
from torch import nn
from torch.nn import functional

from resihp.contracts import ModelShape
from resihp.layout import Param, Parameters, Range

from ..process_groups.abortable import AbortableProcessGroup
from .base import Packed, Part
from .decoder import Decoder, Entry, attend, empty, positions, width
from .tensor_parallel import copy_to_tp_region, reduce_from_tp_region
from .vocabulary import VocabularyEmbedding, VocabularyHead


class Llama(Decoder):
    """`Model` for a `ModelShape`; embedding and head are tied where the shape says so."""

    @cached_property
    def parameters(self) -> Parameters:
        """All parameters, sharded by KV group, FFN column or vocabulary row."""
        s = self.shape
        group = s.head_dim * s.heads // s.kv_heads
        attention = (
            ("attention_norm", (s.hidden,), None, 1),
            ("wq", (s.heads * s.head_dim, s.hidden), 0, group),
            ("wk", (s.kv_heads * s.head_dim, s.hidden), 0, s.head_dim),
            ("wv", (s.kv_heads * s.head_dim, s.hidden), 0, s.head_dim),
            ("wo", (s.hidden, s.heads * s.head_dim), 1, group),
        )
        table = Param("first.table", (s.vocab, s.hidden), 0)
        head = table if s.tied_embeddings else Param("last.table", (s.vocab, s.hidden), 0)
        return Parameters(
            self.layers(attention + self.ffn_entries()),
            (table,),
            (Param("last.norm", (s.hidden,)), head),
        )

    def ffn_entries(self) -> tuple[Entry, ...]:
        """Parameters of the feed-forward network of one layer."""
        s = self.shape
        return (
            ("ffn_norm", (s.hidden,), None, 1),
            ("w_gate", (s.ffn, s.hidden), 0, 1),
            ("w_up", (s.ffn, s.hidden), 0, 1),
            ("w_down", (s.hidden, s.ffn), 1, 1),
        )

    def build(
        self, part: Part, ranges: Mapping[str, Range], group: AbortableProcessGroup
    ) -> nn.Module:
        """Build the module of one part with the given ranges, values unset."""
        if part == "first":
            return VocabularyEmbedding(ranges["table"], self.shape.hidden, group)
        if part == "last":
            return LlamaHead(ranges["table"], self.shape.hidden, group)
        return self.layer(ranges, group)

    def layer(self, ranges: Mapping[str, Range], group: AbortableProcessGroup) -> nn.Module:
        """One decoder layer."""
        return DecoderLayer(self.shape, ranges, group)


class DecoderLayer(nn.Module):
    """One decoder layer with the heads and FFN columns of this rank."""

    def __init__(
        self, shape: ModelShape, ranges: Mapping[str, Range], group: AbortableProcessGroup
    ) -> None:
        super().__init__()
        D, self.head_dim, self.group = shape.hidden, shape.head_dim, group
        self.attention_norm = empty(D)
        self.wq = empty(width(ranges["wq"]), D)
        self.wk = empty(width(ranges["wk"]), D)
        self.wv = empty(width(ranges["wv"]), D)
        self.wo = empty(D, width(ranges["wo"]))
        self.ffn_norm = empty(D)
        self.make_ffn(D, ranges)

    def make_ffn(self, D: int, ranges: Mapping[str, Range]) -> None:
        """Create the weights of the feed-forward network."""
        self.w_gate = empty(width(ranges["w_gate"]), D)
        self.w_up = empty(width(ranges["w_up"]), D)
        self.w_down = empty(D, width(ranges["w_down"]))

    def forward(self, x_TD: torch.Tensor, packed: Packed) -> torch.Tensor:
        """One layer forward, [T, D] -> [T, D]."""
        h_TD = x_TD + self.attention(rms_norm(x_TD, self.attention_norm), packed)
        return h_TD + self.ffn(rms_norm(h_TD, self.ffn_norm))

    def attention(self, x_TD: torch.Tensor, packed: Packed) -> torch.Tensor:
        """Causal attention inside each document."""
        x_TD = copy_to_tp_region(x_TD, self.group, in_place=True)
        cos, sin = _rotary(packed.seq_lens, self.head_dim, x_TD.device)
        q_TNH = functional.linear(x_TD, self.wq).unflatten(-1, (-1, self.head_dim))
        k_TKH = functional.linear(x_TD, self.wk).unflatten(-1, (-1, self.head_dim))
        v_TKH = functional.linear(x_TD, self.wv).unflatten(-1, (-1, self.head_dim))
        q_TNH, k_TKH = _rotate(q_TNH, cos, sin), _rotate(k_TKH, cos, sin)
        out_TNH = attend(q_TNH, k_TKH, v_TKH, packed.seq_lens)
        out_TD = functional.linear(out_TNH.flatten(1), self.wo)
        return reduce_from_tp_region(out_TD, self.group, in_place=True)

    def ffn(self, x_TD: torch.Tensor) -> torch.Tensor:
        """SwiGLU."""
        x_TD = copy_to_tp_region(x_TD, self.group, in_place=True)
        h_TF = functional.silu(functional.linear(x_TD, self.w_gate))
        h_TF = h_TF * functional.linear(x_TD, self.w_up)
        return reduce_from_tp_region(
            functional.linear(h_TF, self.w_down), self.group, in_place=True
        )


class LlamaHead(VocabularyHead):
    """Final norm, vocabulary-sharded projection, and the sum of the token losses."""

    def __init__(self, rows: Range, hidden: int, group: AbortableProcessGroup) -> None:
        super().__init__(rows, hidden, group)
        self.norm = empty(hidden)

    def forward(self, x_TD: torch.Tensor, packed: Packed) -> torch.Tensor:
        """Scalar sum of the cross entropy over the T targets."""
        return self.loss(rms_norm(x_TD, self.norm), packed)


def rms_norm(x_TD: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMSNorm (Zhang & Sennrich, arXiv 1910.07467) over the last dimension."""
    return functional.rms_norm(x_TD, (x_TD.shape[-1],), weight, 1e-5)


def _rotate(x_TNH: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x_TNH.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x_TNH.dtype)


@lru_cache(maxsize=64)
def _rotary(
    seq_lens: tuple[int, ...], head_dim: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine [T, 1, H/2]; positions restart with each document (RoFormer, eq. 34)."""
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
    angles = torch.outer(positions(seq_lens, device), frequencies).unsqueeze(1)
    return angles.cos(), angles.sin()
