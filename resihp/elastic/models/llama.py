"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Its options make it a Mistral (sliding windows), a Qwen2 (biases) or a Qwen3 (normalised heads).

Shapes: T tokens of a microbatch, D hidden, N query heads and K key/value heads held here,
H head dim, F FFN columns held here, V vocabulary rows held here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import nn
from torch.nn import functional

from resihp.contracts import ContractError, ModelShape
from resihp.layout import Param, Parameters, Range

from ..process_groups.abortable import AbortableProcessGroup
from .base import Packed, Part
from .compilation import compilable
from .decoder import Decoder, Entry, attend, attended_pairs, empty, width
from .recomputation import attention_core
from .rope import Rope, rotary, rotate
from .tensor_parallel import copy_to_tp_region, in_matmul_precision, reduce_from_tp_region
from .vocabulary import VocabularyEmbedding, VocabularyHead


class Llama(Decoder):
    """`Model` for a `ModelShape`; embedding and head are tied where the shape says so.

    rope         rotary positions; default: theta 10000 without scaling
    norm_eps     added to the mean square in norms
    qkv_bias     biases on queries, keys and values
    output_bias  bias on the output of attention
    qk_norm      RMSNorm over each head of queries and keys
    windows      for each layer, how many tokens a token attends to, itself included; None: all that
                 precede it in its document. Default: None for all layers
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        rope: Rope | None = None,
        norm_eps: float = 1e-5,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm: bool = False,
        windows: Sequence[int | None] = (),
        seed: int = 0,
    ) -> None:
        super().__init__(shape, seed=seed)
        self.rope, self.norm_eps = rope or Rope(), norm_eps
        self.qkv_bias, self.output_bias, self.qk_norm = qkv_bias, output_bias, qk_norm
        self.windows = tuple(windows) or (None,) * shape.layers
        if len(self.windows) != shape.layers or any(w is not None and w < 1 for w in self.windows):
            raise ContractError("windows", f"must be {shape.layers}, each None or 1 or more")
        if shape.head_dim % 2:
            raise ContractError("head_dim", f"must be even, not {shape.head_dim}")

    @cached_property
    def parameters(self) -> Parameters:
        """All parameters, sharded by KV group, FFN column or vocabulary row."""
        s = self.shape
        table = Param("first.table", (s.vocab, s.hidden), 0)
        head = table if s.tied_embeddings else Param("last.table", (s.vocab, s.hidden), 0)
        return Parameters(
            self.layers(self.attention_entries() + self.ffn_entries()),
            (table,),
            (Param("last.norm", (s.hidden,)), head),
        )

    def attention_entries(self) -> tuple[Entry, ...]:
        """Parameters of the attention of one layer."""
        s, H = self.shape, self.shape.head_dim
        group = H * s.heads // s.kv_heads
        entries: list[Entry] = [
            ("attention_norm", (s.hidden,), None, 1),
            ("wq", (s.heads * H, s.hidden), 0, group),
            ("wk", (s.kv_heads * H, s.hidden), 0, H),
            ("wv", (s.kv_heads * H, s.hidden), 0, H),
            ("wo", (s.hidden, s.heads * H), 1, group),
        ]
        if self.qkv_bias:
            entries += [
                ("bq", (s.heads * H,), 0, group),
                ("bk", (s.kv_heads * H,), 0, H),
                ("bv", (s.kv_heads * H,), 0, H),
            ]
        if self.output_bias:
            entries.append(("bo", (s.hidden,), None, 1))
        if self.qk_norm:
            entries += [("q_norm", (H,), None, 1), ("k_norm", (H,), None, 1)]
        return tuple(entries)

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
            return LlamaHead(ranges["table"], self.shape.hidden, self.norm_eps, group)
        return self.layer(self.windows[int(part.removeprefix("layers."))], ranges, group)

    def layer(
        self, window: int | None, ranges: Mapping[str, Range], group: AbortableProcessGroup
    ) -> nn.Module:
        """One decoder layer."""
        return DecoderLayer(self, window, ranges, group)

    def attended(self, part: Part, packed: Packed) -> int:
        """Return the sum over tokens of the tokens that each attends to, twice."""
        return attended_pairs(packed.seq_lens, self.windows[int(part.removeprefix("layers."))])


class DecoderLayer(nn.Module):
    """One decoder layer with the heads and FFN columns of this rank."""

    def __init__(
        self,
        model: Llama,
        window: int | None,
        ranges: Mapping[str, Range],
        group: AbortableProcessGroup,
    ) -> None:
        super().__init__()
        D, self.head_dim, self.group = model.width, model.shape.head_dim, group
        self.rope, self.norm_eps, self.window = model.rope, model.norm_eps, window
        self.attention_norm = empty(D)
        self.wq = empty(width(ranges["wq"]), D)
        self.wk = empty(width(ranges["wk"]), D)
        self.wv = empty(width(ranges["wv"]), D)
        self.wo = empty(D, width(ranges["wo"]))
        self.bq = empty(width(ranges["wq"])) if model.qkv_bias else None
        self.bk = empty(width(ranges["wk"])) if model.qkv_bias else None
        self.bv = empty(width(ranges["wv"])) if model.qkv_bias else None
        self.bo = empty(D) if model.output_bias else None
        self.q_norm = empty(self.head_dim) if model.qk_norm else None
        self.k_norm = empty(self.head_dim) if model.qk_norm else None
        self.ffn_norm = empty(D)
        self.make_ffn(D, ranges)

    def make_ffn(self, D: int, ranges: Mapping[str, Range]) -> None:
        """Create the weights of the feed-forward network."""
        self.w_gate = empty(width(ranges["w_gate"]), D)
        self.w_up = empty(width(ranges["w_up"]), D)
        self.w_down = empty(D, width(ranges["w_down"]))

    def forward(self, x_TD: torch.Tensor, packed: Packed) -> torch.Tensor:
        """One layer forward, [T, D] -> [T, D]."""
        normed_TD = rms_norm(x_TD, self.attention_norm, self.norm_eps)
        added_TD = self.attention(normed_TD, packed)
        h_TD, normed_TD = add_and_norm(x_TD, added_TD, self.ffn_norm, self.norm_eps)
        return h_TD + self.ffn(normed_TD)

    def attention(self, x_TD: torch.Tensor, packed: Packed) -> torch.Tensor:
        """Causal attention inside each document; the output's bias counts once in the group."""
        x_TD = in_matmul_precision(copy_to_tp_region(x_TD, self.group, in_place=True))
        cos, sin = rotary(self.rope, packed.seq_lens, self.head_dim, x_TD.device)
        q_TNH, k_TKH, v_TKH = (
            functional.linear(x_TD, weight, bias).unflatten(-1, (-1, self.head_dim))
            for weight, bias in ((self.wq, self.bq), (self.wk, self.bk), (self.wv, self.bv))
        )
        q_TNH, k_TKH = self._normed(q_TNH, self.q_norm), self._normed(k_TKH, self.k_norm)
        out_TNH = attention_core(self._core, q_TNH, k_TKH, v_TKH, cos, sin, packed.seq_lens)
        out_TD = functional.linear(out_TNH.flatten(1), self.wo)
        out_TD = reduce_from_tp_region(out_TD, self.group, in_place=True)
        return out_TD if self.bo is None else out_TD + self.bo

    def ffn(self, x_TD: torch.Tensor) -> torch.Tensor:
        """SwiGLU."""
        x_TD = in_matmul_precision(copy_to_tp_region(x_TD, self.group, in_place=True))
        gate_TF, up_TF = (functional.linear(x_TD, w) for w in (self.w_gate, self.w_up))
        h_TF = gated(gate_TF, up_TF)
        return reduce_from_tp_region(
            functional.linear(h_TF, self.w_down), self.group, in_place=True
        )

    def _core(
        self,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        seq_lens: tuple[int, ...],
    ) -> torch.Tensor:
        q_TNH, k_TKH = rotate(q_TNH, cos, sin), rotate(k_TKH, cos, sin)
        return attend(q_TNH, k_TKH, v_TKH, seq_lens, window=self.window)

    def _normed(self, x_TNH: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Normalise each head; the weight is shared by heads on other ranks."""
        if weight is None:
            return x_TNH
        weight = copy_to_tp_region(weight, self.group)
        return rms_norm(x_TNH.float(), weight, self.norm_eps).to(x_TNH.dtype)


class LlamaHead(VocabularyHead):
    """Final norm, vocabulary-sharded projection, and the sum of the token losses."""

    def __init__(
        self, rows: Range, hidden: int, norm_eps: float, group: AbortableProcessGroup
    ) -> None:
        super().__init__(rows, hidden, group)
        self.norm, self.norm_eps = empty(hidden), norm_eps

    def forward(self, x_TD: torch.Tensor, packed: Packed) -> torch.Tensor:
        """Scalar sum of the cross entropy over the T targets."""
        return self.loss(rms_norm(x_TD, self.norm, self.norm_eps), packed)


@compilable
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm (Zhang & Sennrich, arXiv 1910.07467) over the last dimension."""
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


@compilable
def add_and_norm(
    x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of two tensors, and its RMSNorm."""
    total = x + added
    return total, functional.rms_norm(total, (total.shape[-1],), weight, eps)


@compilable
def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return SiLU(gate) * up, as SwiGLU (Shazeer, arXiv 2002.05202) has it."""
    return functional.silu(gate) * up
