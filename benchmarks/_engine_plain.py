"""The peer of the engine's benchmark: the same decoder and step, written plainly for torch.

Tensor parallelism as in Megatron-LM (arXiv 1909.08053), with `torch.distributed.all_reduce`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from resihp.contracts import ModelShape
from resihp.elastic.models import Packed


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def enter(x: torch.Tensor, degree: int) -> torch.Tensor:
    """Identity forward, sum backward."""
    return x if degree == 1 else _Enter.apply(x)  # type: ignore[no-untyped-call]


def leave(x: torch.Tensor, degree: int) -> torch.Tensor:
    """Sum forward, identity backward."""
    return x if degree == 1 else _Leave.apply(x)  # type: ignore[no-untyped-call]


class Layer(nn.Module):
    """One decoder layer, an equal part of it on each of `degree` ranks."""

    def __init__(self, shape: ModelShape, degree: int) -> None:
        super().__init__()
        hidden, self.degree, self.head_dim = shape.hidden, degree, shape.head_dim

        def linear(inside: int, outside: int) -> nn.Linear:
            return nn.Linear(inside, outside, bias=False)

        self.attention_norm, self.ffn_norm = _norm(hidden), _norm(hidden)
        queries = shape.heads // degree * self.head_dim
        keys, inner = shape.kv_heads // degree * self.head_dim, shape.ffn // degree
        self.wq, self.wk, self.wv = (linear(hidden, n) for n in (queries, keys, keys))
        self.wo, self.w_down = linear(queries, hidden), linear(inner, hidden)
        self.w_gate, self.w_up = linear(hidden, inner), linear(hidden, inner)

    def forward(
        self, x: torch.Tensor, seq_lens: Sequence[int], cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """[T, D] -> [T, D]."""
        h = enter(self.attention_norm(x), self.degree)
        q, k, v = (w(h).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = [
            functional.scaled_dot_product_attention(
                q_.transpose(0, 1).unsqueeze(0),
                k_.transpose(0, 1).unsqueeze(0),
                v_.transpose(0, 1).unsqueeze(0),
                is_causal=True,
                enable_gqa=True,
            )[0].transpose(0, 1)
            for q_, k_, v_ in zip(*(t.split(list(seq_lens)) for t in (q, k, v)), strict=True)
        ]
        x = x + leave(self.wo(torch.cat(mixed).flatten(1)), self.degree)
        h = enter(self.ffn_norm(x), self.degree)
        return x + leave(self.w_down(functional.silu(self.w_gate(h)) * self.w_up(h)), self.degree)


class Decoder(nn.Module):
    """The whole model, an equal part of it on each of `degree` ranks."""

    def __init__(self, shape: ModelShape, rank: int, degree: int) -> None:
        super().__init__()
        self.degree, rows = degree, shape.vocab // degree
        self.first_row, self.rows, self.head_dim = rank * rows, rows, shape.head_dim
        self.recomputes = False
        self.table = nn.Embedding(rows, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, degree) for _ in range(shape.layers))
        self.norm = _norm(shape.hidden)
        self.head = nn.Linear(shape.hidden, rows, bias=False)

    def forward(self, packed: Packed) -> torch.Tensor:
        """Sum of the token losses."""
        cos, sin = rotary(packed.seq_lens, self.head_dim)
        x = self.embed(packed.tokens)
        for layer in self.layers:
            if self.recomputes:
                x = checkpoint(layer, x, packed.seq_lens, cos, sin, use_reentrant=False)
            else:
                x = layer(x, packed.seq_lens, cos, sin)
        logits = self.head(enter(self.norm(x), self.degree))
        if self.degree == 1:
            return functional.cross_entropy(logits, packed.targets, reduction="sum")
        return self.sharded_loss(logits, packed.targets)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, D]; rows of other ranks come from there."""
        if self.degree == 1:
            return self.table(tokens)  # type: ignore[no-any-return]
        local, elsewhere = self.localise(tokens)
        return leave(self.table(local).masked_fill(elsewhere.unsqueeze(-1), 0.0), self.degree)

    def sharded_loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Cross entropy without any rank ever holding a whole row of logits."""
        peak = logits.detach().amax(-1)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        shifted = logits - peak.unsqueeze(-1)
        local, elsewhere = self.localise(targets)
        picked = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0.0)
        total, picked = leave(torch.stack((shifted.exp().sum(-1), picked)), self.degree)
        losses: torch.Tensor = (total.log() - picked) * (targets >= 0)
        return losses.sum()

    def localise(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids among this rank's rows, and which of them are elsewhere."""
        inside = ids - self.first_row
        return inside.clamp(0, self.rows - 1), (inside < 0) | (inside >= self.rows)


def _norm(hidden: int) -> nn.RMSNorm:
    return nn.RMSNorm(hidden, eps=1e-5)


def rotary(seq_lens: Sequence[int], head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine for positions that restart with each document."""
    positions = torch.cat([torch.arange(length) for length in seq_lens])
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(positions, frequencies).unsqueeze(1)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of channels by their position's angles."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class PlainTrainer:
    """A training step as a user of torch would write it."""

    def __init__(
        self, shape: ModelShape, optimizer: Any, rank: int, degree: int, max_norm: float
    ) -> None:
        self.model, self.degree, self.max_norm = Decoder(shape, rank, degree), degree, max_norm
        self.optimizer: torch.optim.Optimizer = optimizer(self.model.parameters())

    def step(self, batches: Sequence[Packed]) -> float:
        """One step over all microbatches; the mean loss."""
        tokens = sum(len(packed.tokens) for packed in batches)
        total = 0.0
        for packed in batches:
            loss = self.model(packed) / tokens
            loss.backward()
            total += loss.item()
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def clip(self) -> None:
        """By the norm over the whole model; norms' weights count once."""
        split = [p.grad for p in self.model.parameters() if p.ndim > 1]
        squared = torch.stack([g.square().sum() for g in split if g is not None]).sum()
        if self.degree > 1:
            dist.all_reduce(squared)
        whole = [p.grad for p in self.model.parameters() if p.ndim == 1]
        squared = squared + torch.stack([g.square().sum() for g in whole if g is not None]).sum()
        norm = float(squared.sqrt())
        if norm > self.max_norm:
            for param in self.model.parameters():
                assert param.grad is not None
                param.grad.mul_(self.max_norm / norm)
