"""A Llama whose feed-forward networks are mixtures of experts with top-k routing.

Shapes as in `llama`, and E experts, F columns of every expert held here, K experts of a token,
S = T K pairs of a token and an expert.

Tensor parallelism shards the columns of every expert, not the list of experts: the work of a rank
is then proportional to its share for any routing. With whole experts a healthy rank would look slow
whenever its experts are popular, and shares would be multiples of one expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from resihp.contracts import ContractError, ModelShape
from resihp.layout import Range

from ..process_groups.abortable import AbortableProcessGroup
from .decoder import Entry, empty, width
from .llama import DecoderLayer, Llama, gated
from .rope import Rope
from .tensor_parallel import copy_to_tp_region, in_matmul_precision, reduce_from_tp_region


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
        x_TD = in_matmul_precision(copy_to_tp_region(x_TD, self.group, in_place=True))
        routing = _Routing.of(chosen_TK, self.experts)
        weights = zip(self.w_gate.unbind(), self.w_up.unbind(), self.w_down.unbind(), strict=True)
        outputs = []
        for picked, (gate_FD, up_FD, down_DF) in zip(routing.by_expert(x_TD), weights, strict=True):
            h = gated(functional.linear(picked, gate_FD), functional.linear(picked, up_FD))
            outputs.append(functional.linear(h, down_DF))
        out_TKD = routing.by_token(torch.cat(outputs))
        out_TD = (out_TKD * gates_TK.unsqueeze(-1)).sum(dim=1)
        return reduce_from_tp_region(out_TD, self.group, in_place=True)


@dataclass(frozen=True)
class _Routing:
    """Order of the T K pairs of a token and one of its experts, by expert and then by token.

    order   [S] pair at each place of that order; pairs are counted by token
    places  [T, K] place of each pair
    counts  pairs of each expert
    """

    order: torch.Tensor
    places: torch.Tensor
    counts: list[int]

    @classmethod
    def of(cls, chosen_TK: torch.Tensor, experts: int) -> _Routing:
        """Sort the chosen experts; the counts are all that the host waits for."""
        sorted_S, order_S = chosen_TK.flatten().sort(stable=True)
        all_experts = torch.arange(experts, device=sorted_S.device)
        ends = torch.searchsorted(sorted_S, all_experts, right=True)
        along_S = torch.arange(len(order_S), device=order_S.device)
        places_TK = torch.empty_like(order_S).scatter_(0, order_S, along_S).view_as(chosen_TK)
        return cls(order_S, places_TK, ends.diff(prepend=ends.new_zeros(1)).tolist())

    def by_expert(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the tokens of each expert."""
        tokens_S = self.order // self.places.shape[1]
        x_SD = _rows(x_TD, tokens_S, self.places)
        return torch.split(x_SD, self.counts)

    def by_token(self, y_SD: torch.Tensor) -> torch.Tensor:
        """Return what the K experts of each token gave, [T, K, D]."""
        y_SD = _rows(y_SD, self.places.flatten(), self.order)
        return y_SD.view(*self.places.shape, -1)


class _Rows(torch.autograd.Function):
    """Rows of a matrix, whose backward pass gathers as well: a scatter on an accelerator adds up
    what meets in one row in any order."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, rows: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(places)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (places,) = ctx.saved_tensors
        gathered = grad.index_select(0, places.flatten()).view(*places.shape, -1)
        return gathered.sum(dim=1) if places.dim() == 2 else gathered, None, None


def _rows(x: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return `x[rows]`; `places` says where each row of `x` went, or the K places of each."""
    return cast(torch.Tensor, _Rows.apply(x, rows, places))  # type: ignore[no-untyped-call]
