"""A Llama whose feed-forward networks are mixtures of experts with top-k routing.

Shapes as in `llama`, and E experts, F columns of every expert held here.

Tensor parallelism shards the columns of every expert, not the list of experts: the work of a rank
is then proportional to its share for any routing. With whole experts a healthy rank would look slow
whenever its experts are popular, and shares would be multiples of one expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn import functional

from resihp.contracts import ContractError, ModelShape
from resihp.layout import Range

from ..process_groups.abortable import AbortableProcessGroup
from .decoder import Entry, empty, width
from .llama import DecoderLayer, Llama
from .rope import Rope
from .tensor_parallel import copy_to_tp_region, reduce_from_tp_region


class Mixture(Llama):
    """A Llama with `experts` experts of `shape.ffn` columns in each layer, `top_k` per token."""

    def __init__(
        self,
        shape: ModelShape,
        *,
        experts: int,
        top_k: int,
        rope: Rope | None = None,
        norm_eps: float = 1e-5,
        windows: Sequence[int | None] = (),
        seed: int = 0,
    ) -> None:
        super().__init__(shape, rope=rope, norm_eps=norm_eps, windows=windows, seed=seed)
        if not 1 <= top_k <= experts:
            raise ContractError("top_k", f"must be within 1..{experts}, not {top_k}")
        self.experts, self.top_k = experts, top_k

    def ffn_entries(self) -> tuple[Entry, ...]:
        """Router, and the three matrices of all experts, cut along the columns."""
        s, E = self.shape, self.experts
        return (
            ("ffn_norm", (s.hidden,), None, 1),
            ("router", (E, s.hidden), None, 1),
            ("w_gate", (E, s.ffn, s.hidden), 1, 1),
            ("w_up", (E, s.ffn, s.hidden), 1, 1),
            ("w_down", (E, s.hidden, s.ffn), 2, 1),
        )

    def layer(
        self, window: int | None, ranges: Mapping[str, Range], group: AbortableProcessGroup
    ) -> nn.Module:
        """One decoder layer."""
        return MixtureLayer(self, window, ranges, group)

    def columns(self, ranges: Mapping[str, Range]) -> float:
        """Return the columns of attention, of `top_k` experts and of the router."""
        expert = sum(width(ranges[name]) for name in ("w_gate", "w_up", "w_down"))
        return super().columns(ranges) + (self.top_k - 1) * expert + self.experts


class MixtureLayer(DecoderLayer):
    """One decoder layer with this rank's heads and its columns of every expert."""

    def __init__(
        self,
        model: Mixture,
        window: int | None,
        ranges: Mapping[str, Range],
        group: AbortableProcessGroup,
    ) -> None:
        self.experts, self.top_k = model.experts, model.top_k
        super().__init__(model, window, ranges, group)

    def make_ffn(self, D: int, ranges: Mapping[str, Range]) -> None:
        """Create the weights of router and experts."""
        F, E = width(ranges["w_gate"]), self.experts
        self.router = empty(E, D)
        self.w_gate, self.w_up, self.w_down = empty(E, F, D), empty(E, F, D), empty(E, D, F)

    def ffn(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Route each token to its `top_k` experts, weighted by a softmax over their scores."""
        scores_TK, chosen_TK = functional.linear(x_TD, self.router).float().topk(self.top_k)
        gates_TK = copy_to_tp_region(scores_TK.softmax(dim=-1), self.group)
        x_TD = copy_to_tp_region(x_TD, self.group)
        out_TD = torch.zeros_like(x_TD)
        weights = zip(self.w_gate.unbind(), self.w_up.unbind(), self.w_down.unbind(), strict=True)
        for expert, (gate_FD, up_FD, down_DF) in enumerate(weights):
            token, rank = (chosen_TK == expert).nonzero(as_tuple=True)
            picked = x_TD[token]
            h = functional.silu(functional.linear(picked, gate_FD))
            y = functional.linear(h * functional.linear(picked, up_FD), down_DF)
            gated = (y * gates_TK[token, rank].unsqueeze(-1)).to(out_TD.dtype)
            out_TD = out_TD.index_add(0, token, gated)
        return reduce_from_tp_region(out_TD, self.group)
