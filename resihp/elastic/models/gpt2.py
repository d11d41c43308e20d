"""GPT-2: learned positions, LayerNorm, GELU, biases, dropout, embedding and head tied.

Radford et al., 2019. Shapes as in `llama`. Heads are cut one by one, the FFN by column.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import nn
from torch.nn import functional

from resihp.contracts import ContractError, ModelShape
from resihp.layout import Param, Parameters, Range

from ..process_groups.abortable import AbortableProcessGroup
from .base import Packed, Part
from .compilation import compilable
from .decoder import Decoder, attend, empty, positions, width
from .randomness import Dropout
from .recomputation import attention_core
from .tensor_parallel import copy_to_tp_region, in_matmul_precision, reduce_from_tp_region
from .vocabulary import VocabularyEmbedding, VocabularyHead


class Gpt2(Decoder):
    """`resihp.elastic.models.Model` for a `ModelShape` without KV groups and gates.

    context  longest document, the number of learned positions
    dropout  on the embedding, on attention weights, and on additions to the residual
    norm_eps added to the variance in norms
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        context: int,
        dropout: float = 0.1,
        norm_eps: float = 1e-5,
        seed: int = 0,
    ) -> None:
        if shape.kv_heads != shape.heads or shape.gated or not shape.tied_embeddings:
            raise ContractError("shape", "GPT-2 has one KV head per head, no gates, a tied head")
        if not 0.0 <= dropout < 1.0:
            raise ContractError("dropout", f"must be within [0, 1), not {dropout}")
        super().__init__(shape, seed=seed)
        if shape.heads * shape.head_dim != shape.hidden:
            raise ContractError("head_dim", f"must be hidden / heads, not {shape.head_dim}")
        self.context, self.dropout, self.norm_eps = context, dropout, norm_eps

    @cached_property
    def parameters(self) -> Parameters:
        """All parameters; the head is tied to the embedding's table."""
        s, H = self.shape, self.shape.head_dim
        D, F = s.hidden, s.ffn
        layer = (
            ("norm1", (D,), None, 1),
            ("bias1", (D,), None, 1),
            ("wq", (D, D), 0, H),
            ("bq", (D,), 0, H),
            ("wk", (D, D), 0, H),
            ("bk", (D,), 0, H),
            ("wv", (D, D), 0, H),
            ("bv", (D,), 0, H),
            ("wo", (D, D), 1, H),
            ("bo", (D,), None, 1),
            ("norm2", (D,), None, 1),
            ("bias2", (D,), None, 1),
            ("w_in", (F, D), 0, 1),
            ("b_in", (F,), 0, 1),
            ("w_out", (D, F), 1, 1),
            ("b_out", (D,), None, 1),
        )
        table = Param("first.table", (s.vocab, D), 0)
        return Parameters(
            self.layers(layer),
            (table, Param("first.positions", (self.context, D))),
            (Param("last.norm", (D,)), Param("last.bias", (D,)), table),
        )

    def build(
        self, part: Part, ranges: Mapping[str, Range], group: AbortableProcessGroup
    ) -> nn.Module:
        """Build the module of one part with the given ranges, values unset."""
        if part == "first":
            return Embedding(self, ranges["table"], group)
        if part == "last":
            return Gpt2Head(ranges["table"], self.shape.hidden, self.norm_eps, group)
        return Block(self, part, ranges, group)


class Embedding(VocabularyEmbedding):
    """Token and position embedding."""

    def __init__(self, model: Gpt2, rows: Range, group: AbortableProcessGroup) -> None:
        super().__init__(rows, model.width, group)
        self.positions = empty(model.context, model.width)
        self.drop = Dropout(model.dropout, model.seed, "first")

    def forward(self, packed: Packed) -> torch.Tensor:
        """[T] ids -> [T, D]. Raises `ContractError` for a document that is too long."""
        if max(packed.seq_lens) > len(self.positions):
            held = f"holds {max(packed.seq_lens)} tokens, the context of GPT-2"
            raise ContractError("seq_lens", f"a document {held} is {len(self.positions)}")
        place_TD = functional.embedding(
            positions(packed.seq_lens, packed.tokens.device), self.positions
        )
        return self.drop(super().forward(packed) + place_TD, packed)


class Block(nn.Module):
    """One layer with the heads and FFN columns of this rank."""

    def __init__(
        self, model: Gpt2, part: Part, ranges: Mapping[str, Range], group: AbortableProcessGroup
    ) -> None:
        super().__init__()
        D, N, F = model.width, width(ranges["wq"]), width(ranges["w_in"])
        self.head_dim, self.group, self.norm_eps = model.shape.head_dim, group, model.norm_eps
        self.all_heads = model.shape.heads
        self.heads = (ranges["wq"][0] // self.head_dim, ranges["wq"][1] // self.head_dim)
        self.norm1, self.bias1, self.norm2, self.bias2 = empty(D), empty(D), empty(D), empty(D)
        self.wq, self.wk, self.wv, self.wo = empty(N, D), empty(N, D), empty(N, D), empty(D, N)
        self.bq, self.bk, self.bv, self.bo = empty(N), empty(N), empty(N), empty(D)
        self.w_in, self.b_in, self.w_out, self.b_out = empty(F, D), empty(F), empty(D, F), empty(D)
        rate, seed = model.dropout, model.seed
        self.drop_weights = Dropout(rate, seed, f"{part}.weights")
        self.drop_attention = Dropout(rate, seed, f"{part}.attention")
        self.drop_ffn = Dropout(rate, seed, f"{part}.ffn")

    def forward(self, x_TD: torch.Tensor, packed: Packed) -> torch.Tensor:
        """One layer forward, [T, D] -> [T, D]."""
        normed_TD = _layer_norm(x_TD, self.norm1, self.bias1, self.norm_eps)
        added_TD = self.drop_attention(self.attention(normed_TD, packed), packed)
        x_TD, normed_TD = _add_and_norm(x_TD, added_TD, self.norm2, self.bias2, self.norm_eps)
        return x_TD + self.drop_ffn(self.ffn(normed_TD), packed)

    def attention(self, x_TD: torch.Tensor, packed: Packed) -> torch.Tensor:
        """Causal attention inside each document; the output's bias counts once in the group."""
        x_TD = in_matmul_precision(copy_to_tp_region(x_TD, self.group, in_place=True))
        q_TNH, k_TNH, v_TNH = (
            functional.linear(x_TD, weight, bias).unflatten(-1, (-1, self.head_dim))
            for weight, bias in ((self.wq, self.bq), (self.wk, self.bk), (self.wv, self.bv))
        )
        if self.drop_weights.rate:
            out_TNH = attention_core(self._attend_dropping, q_TNH, k_TNH, v_TNH, packed)
        else:
            out_TNH = attention_core(attend, q_TNH, k_TNH, v_TNH, packed.seq_lens)
        out_TD = functional.linear(out_TNH.flatten(1), self.wo)
        return reduce_from_tp_region(out_TD, self.group, in_place=True) + self.bo

    def ffn(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Two matrices with a GELU (tanh form) between them."""
        x_TD = copy_to_tp_region(x_TD, self.group, in_place=True)
        h_TF = functional.gelu(functional.linear(x_TD, self.w_in, self.b_in), approximate="tanh")
        out_TD = functional.linear(h_TF, self.w_out)
        return reduce_from_tp_region(out_TD, self.group, in_place=True) + self.b_out

    def _attend_dropping(
        self, q_TNH: torch.Tensor, k_TNH: torch.Tensor, v_TNH: torch.Tensor, packed: Packed
    ) -> torch.Tensor:
        """Compute attention explicitly, with the layout-independent dropout mask."""
        outputs = []
        cut = [t.transpose(0, 1).split(packed.seq_lens, 1) for t in (q_TNH, k_TNH, v_TNH)]
        for item, (q_NLH, k_NLH, v_NLH) in enumerate(zip(*cut, strict=True)):
            length = q_NLH.shape[1]
            scores_NLL = q_NLH @ k_NLH.transpose(1, 2) / self.head_dim**0.5
            future = torch.ones(length, length, dtype=torch.bool, device=q_NLH.device).triu(1)
            weights_NLL = scores_NLL.masked_fill(future, -torch.inf).softmax(dim=-1)
            shape = (self.all_heads, length, length)
            window = (self.heads, (0, length), (0, length))
            weights_NLL = self.drop_weights(weights_NLL, packed, shape, window, item=item)
            outputs.append((weights_NLL @ v_NLH).transpose(0, 1))
        return torch.cat(outputs)


class Gpt2Head(VocabularyHead):
    """Final norm, projection on the tied table, and the sum of the token losses."""

    def __init__(
        self, rows: Range, hidden: int, norm_eps: float, group: AbortableProcessGroup
    ) -> None:
        super().__init__(rows, hidden, group)
        self.norm, self.bias, self.norm_eps = empty(hidden), empty(hidden), norm_eps

    def forward(self, x_TD: torch.Tensor, packed: Packed) -> torch.Tensor:
        """Scalar sum of the cross entropy over the T targets."""
        return self.loss(_layer_norm(x_TD, self.norm, self.bias, self.norm_eps), packed)


@compilable
def _layer_norm(
    x_TD: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    return functional.layer_norm(x_TD, (x_TD.shape[-1],), weight, bias, eps)


@compilable
def _add_and_norm(
    x_TD: torch.Tensor,
    added_TD: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    total_TD = x_TD + added_TD
    return total_TD, functional.layer_norm(total_TD, (total_TD.shape[-1],), weight, bias, eps)
