"""A DDP loop on real text whose ranks are held to the speed of emulated devices.

The model and its gradients are real and small; each pass then lasts as long as its microbatch's
work would take a device of the rank's speed.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import resihp
from resihp.client import Client
from resihp.contracts import Job, Layout, ModelShape, Plan
from resihp.demo.training.dataset import documents
from resihp.elastic import NoPlans, Pacer, Quotas, ServicePlans, microbatch_flops

MICROBATCHES, SLOW_RANK = 16, 3
SHAPE = ModelShape(layers=1, hidden=32, heads=2, kv_heads=2, ffn=64, vocab=256, gated=False)
TOKENS, SHORTEST, LONGEST = 192, 48, 512
_KEEP: list[object] = []


@dataclass(frozen=True)
class Case:
    """A job to run.

    ranks     4, or 3 where the slow one was left out
    factor    slowdown of the last of four ranks, from step `since` on
    unequal   microbatches hold a document each, of any length, instead of 192 tokens each
    quotas    `none`: plain DDP, even; `count` and `work`: `Quotas`, by number and by work
    planned   quotas of a plan that the source offers from the begin on; empty: none
    url       of the sidecar that decides; empty: none
    ms        of a microbatch of 192 tokens on a healthy device
    left_out  slowdown of the rank that was left out; 0.0: none was
    """

    name: str
    steps: int
    ranks: int = 4
    factor: float = 1.0
    since: int = 0
    unequal: bool = False
    quotas: str = "none"
    planned: tuple[int, ...] = ()
    url: str = ""
    ms: float = 100.0
    left_out: float = 0.0

    def speeds(self, step: int) -> list[float]:
        """Speed of each rank."""
        is_slow = self.factor > 1.0 and step >= self.since
        return [1 / self.factor if is_slow and r == SLOW_RANK else 1.0 for r in range(self.ranks)]

    def layout(self) -> Layout:
        """Return the layout of all ranks."""
        return Layout.grid(dp=self.ranks, pp=1, tp=1, layers=1)


@lru_cache(maxsize=1)
def _texts() -> tuple[bytes, ...]:
    return tuple(text for text in documents() if len(text) > SHORTEST)


def text_of(case: Case, step: int, index: int) -> bytes:
    """Return a microbatch: one byte more than its tokens."""
    chosen = random.Random(f"{step}/{index}")
    if case.unequal:
        return chosen.choice(_texts())[: LONGEST + 1]
    joined = b""
    while len(joined) <= TOKENS:
        joined += chosen.choice(_texts())
    return joined[: TOKENS + 1]


def work_of(case: Case, step: int) -> list[float]:
    """Work of each microbatch of a step; 1.0 is one of 192 tokens."""
    one = microbatch_flops([TOKENS], SHAPE)
    sizes = [len(text_of(case, step, index)) - 1 for index in range(MICROBATCHES)]
    return [microbatch_flops([size], SHAPE) / one for size in sizes]


def tokens_of(case: Case, step: int) -> int:
    """Tokens of a whole step."""
    return sum(len(text_of(case, step, index)) - 1 for index in range(MICROBATCHES))


class _Hold(torch.autograd.Function):
    """Calls `then` in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, then: Callable[[], None]) -> torch.Tensor:
        ctx.then = then
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.then()
        return gradients[0], None


class PacedDecoder(nn.Module):
    """A decoder of one layer over bytes. `pacer` None: as fast as this machine is.

    work_ms  time of the present microbatch on a device of speed 1, set before each call
    """

    def __init__(self, pacer: Pacer | None) -> None:
        super().__init__()
        width = SHAPE.hidden
        self.embedding = nn.Embedding(SHAPE.vocab, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, SHAPE.ffn), nn.Linear(SHAPE.ffn, width)
        self.head = nn.Linear(width, SHAPE.vocab)
        self.pacer, self.step, self.work_ms = pacer, 0, 0.0
        self._backward_began = 0.0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits [1, T, vocab] of `tokens` [1, T]."""
        began = time.perf_counter()
        hold: Callable[..., torch.Tensor] = _Hold.apply
        x = hold(self.embedding(tokens), self._end_backward)
        shape = (1, tokens.shape[1], 3, SHAPE.heads, SHAPE.head_dim)
        query, key, value = self.qkv(self.norms[0](x)).view(shape).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        x = x + self.down(functional.gelu(self.up(self.norms[1](x))))
        logits = hold(self.head(self.norms[2](x)), self._begin_backward)
        self._pace(1 / 3, time.perf_counter() - began)
        return logits

    def _begin_backward(self) -> None:
        self._backward_began = time.perf_counter()

    def _end_backward(self) -> None:
        self._pace(2 / 3, time.perf_counter() - self._backward_began)

    def _pace(self, part: float, spent_s: float) -> None:
        if self.pacer is not None:
            self.pacer.hold(part * self.work_ms, self.step, spent_s)


class OfferedPlan(NoPlans):
    """Offers one plan with the slowdown behind it, as the sidecar does once it knows of it."""

    def __init__(self, case: Case) -> None:
        self._plan = Plan(version=1, layout=case.layout(), quotas=case.planned)
        self._slowdowns = {SLOW_RANK: case.factor}

    def wait(self, after: int, seconds: float) -> Plan | None:
        """Return the plan; None once it is known."""
        return self._plan if after < 1 else super().wait(after, seconds)

    def slowdowns(self) -> Mapping[int, float]:
        """Slowdown of the slow rank."""
        return self._slowdowns


def build(pacer: Pacer | None) -> tuple[PacedDecoder, torch.optim.Optimizer]:
    """Return model and optimizer, the same on every rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = PacedDecoder(pacer)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)


def loss_of(case: Case, model: nn.Module, step: int, index: int) -> torch.Tensor:
    """Sum of the losses of a microbatch's tokens."""
    ids = torch.tensor(list(text_of(case, step, index)))
    logits = model(ids[None, :-1])
    return functional.cross_entropy(logits[0], ids[1:], reduction="sum")


def run_rank(rank: int, host: str, port: int, case: Case, folder: Path) -> None:
    """Train as one rank; a line a step in the folder: time, quotas, losses of its microbatches."""
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=120))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.ranks)
    pacer = Pacer(1.0, speed=lambda step: case.speeds(step)[rank])
    inner, optimizer = build(pacer)
    model = DistributedDataParallel(inner)
    _KEEP.extend((store, model))
    monitor = None
    if case.url:
        monitor = resihp.instrument(
            model, optimizer, job=case.name, layout=case.layout(), microbatches=MICROBATCHES,
            actions=("quotas",), url=case.url,
            probes=False,  # a probe would find the real device, which is healthy
        )  # fmt: skip
    # Read from the disk and reckoned before the first step: no part of what is measured.
    works = [work_of(case, step) for step in range(case.steps)]
    totals = [tokens_of(case, step) for step in range(case.steps)]
    lines = []
    began = time.perf_counter()
    for step in _steps(case, rank, works, monitor):
        inner.step = step.number
        losses = {}
        for index in step:
            inner.work_ms = case.ms * works[step.number][index]
            with step.sync(model):
                loss = loss_of(case, model, step.number, index)
                (loss * step.scale_for(1.0, totals[step.number])).backward()
            losses[index] = float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        now = time.perf_counter()
        lines.append({"ms": (now - began) * 1e3, "version": step.plan_version,
                      "quotas": step.quotas, "losses": losses})  # fmt: skip
        began = now
    (folder / f"rank-{rank}.json").write_text(json.dumps(lines))
    if monitor is not None:
        monitor.close(10.0)
    dist.barrier()


def _steps(case: Case, rank: int, works: list[list[float]], monitor: Any) -> Any:
    if case.quotas == "none":
        return (_EvenStep(number, case.ranks, rank) for number in range(case.steps))
    plans: Any = OfferedPlan(case) if case.planned else None
    if case.url:
        job = Job(name=case.name, layout=case.layout(), microbatches=MICROBATCHES)
        plans = ServicePlans(Client(case.url), job, patience=timedelta(seconds=10))
    work = works.__getitem__ if case.quotas == "work" else None
    quotas = Quotas(microbatches=MICROBATCHES, plans=plans, work=work, monitor=monitor)
    return quotas.steps(case.steps)


class _EvenStep:
    """A step of a plain DDP loop: as many microbatches on each rank."""

    def __init__(self, number: int, ranks: int, rank: int) -> None:
        self.number, self.plan_version = number, 0
        each = MICROBATCHES // ranks
        self.quotas, self._own = (each,) * ranks, range(rank * each, (rank + 1) * each)
        self._present = -1

    def __iter__(self) -> Any:
        for index in self._own:
            self._present = index
            yield index

    def sync(self, model: Any) -> Any:
        """Sum gradients behind the last microbatch."""
        return nullcontext() if self._present == self._own[-1] else model.no_sync()

    def scale_for(self, weight: float, total: float) -> float:
        """Factor on a sum over tokens."""
        return weight * len(self.quotas) / total


def undisturbed_losses(case: Case) -> list[float]:
    """Loss of each step of the job on one process that computes all microbatches itself."""
    model, optimizer = build(None)
    found = []
    for step in range(case.steps):
        total, losses = tokens_of(case, step), []
        for index in range(MICROBATCHES):
            loss = loss_of(case, model, step, index)
            (loss / total).backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
        found.append(sum(losses) / total)
    return found
