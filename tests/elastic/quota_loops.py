"""A plain loop whose ranks run as many microbatches as they are told, and its undisturbed twin."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from resihp.contracts import Plan
from resihp.elastic import Quotas
from resihp.elastic.planning.sources import NoPlans

WIDTH, MICROBATCHES = 8, 9
WAIT_S = 120


@dataclass(frozen=True)
class QuotaLoop:
    """A loop of `ranks` ranks.

    kind    `mean`: losses are means; `tokens`: sums over the tokens of unequal microbatches;
            `work`: means, assigned by work
    offers  answers of the plan source on rank 0, one after the other; an error is raised
    sharded  by FSDP2 instead of replicated by DDP
    deaf_at (step) rank 1 cannot take part in the agreement of this step; -1: it always can
    due     (step, version): the first rank does not begin a step before that plan was taken
    every   steps from one offer to the next; 0: all are made at once
    ahead   steps whose microbatches are known before
    """

    kind: str = "mean"
    ranks: int = 3
    steps: int = 6
    sharded: bool = False
    deaf_at: int = -1
    offers: tuple[Any, ...] = ()
    due: tuple[tuple[int, int], ...] = ()
    every: int = 0
    ahead: int = 0


class Offers(NoPlans):
    """Gives each answer once; `allowed` of them for now."""

    def __init__(self, answers: Collection[Any], allowed: int) -> None:
        self._answers, self.allowed = list(answers), allowed
        self._changed = threading.Condition()
        self._after = 0
        self.told: list[tuple[str, int]] = []

    def wait(self, after: int, seconds: float) -> Plan | None:
        with self._changed:
            self._after = after
            self._changed.notify_all()
        answer = None
        if self._answers and self.allowed:
            self.allowed -= 1
            answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def applied(self, plan: Plan, rank: int, step: int, pause_ms: float) -> None:
        with self._changed:
            self.told.append(("applied", plan.version))
            self._changed.notify_all()

    def refused(self, plan: Plan, rank: int, why: str) -> None:
        self.told.append(("refused", plan.version))

    def until_taken(self, version: int) -> None:
        """Wait until a plan of this version was taken or refused."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._after >= version, WAIT_S)

    def until_told(self, *told: tuple[str, int]) -> None:
        """Wait until all of this was told."""
        with self._changed:
            assert self._changed.wait_for(lambda: set(told) <= set(self.told), WAIT_S), self.told


@dataclass
class Noted:
    """Monitor that notes the version of the plan."""

    plan_version: int = 0


def tokens_of(step: int, index: int) -> int:
    return 1 + (3 * step + 5 * index) % 7


def batch(loop: QuotaLoop, step: int, index: int) -> torch.Tensor:
    rows = 4 if loop.kind == "mean" else tokens_of(step, index)
    generator = torch.Generator().manual_seed(100 * step + index)
    return torch.randn(rows, WIDTH, generator=generator)


def build_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(loop: QuotaLoop, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    error = functional.mse_loss(model(x), x.roll(1, dims=1), reduction="none").mean(1)
    return error.sum() if loop.kind == "tokens" else error.mean()


def run(rank: int, host: str, port: int, loop: QuotaLoop, folder: Path) -> None:
    """One rank."""
    torch.set_num_threads(1)
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=WAIT_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=loop.ranks)
    inner = build_model()
    if loop.sharded:
        for layer in inner[0], inner[2]:
            fully_shard(layer)
        model: nn.Module = fully_shard(inner)
    else:
        model = DistributedDataParallel(inner, bucket_cap_mb=0.0005)
    optimizer = build_optimizer(inner)
    source, monitor = Offers(loop.offers, 0 if loop.every else len(loop.offers)), Noted()
    quotas = Quotas(
        microbatches=MICROBATCHES,
        plans=source,
        work=(lambda step: [tokens_of(step, index) for index in range(MICROBATCHES)])
        if loop.kind == "work"
        else None,
        monitor=monitor,
        ahead=loop.ahead,
    )
    foretold: dict[int, tuple[int, ...]] = {}
    if rank == 1:
        _cut_off(quotas, loop.deaf_at)
    kept: list[dict[str, Any]] = []
    for step in quotas.steps(loop.steps):
        optimizer.zero_grad()
        assert foretold.get(step.number, step.microbatches) == step.microbatches
        foretold[step.number + loop.ahead] = quotas.assigned(step.number + loop.ahead)
        scale = step.scale
        if loop.kind == "tokens":
            own = sum(tokens_of(step.number, index) for index in step.microbatches)
            scale = step.scale_for(1.0, quotas.total(own))
        for index in step:
            with step.sync(model):
                (loss_of(loop, model, batch(loop, step.number, index)) * scale).backward()
        gradients = [_whole(parameter.grad) for parameter in inner.parameters()]
        optimizer.step()
        told = {"quotas": step.quotas, "own": step.microbatches, "version": step.plan_version}
        assert monitor.plan_version == step.plan_version
        _await_acknowledged()
        open_files = len(os.listdir("/proc/self/fd"))
        open_now = {"threads": threading.active_count(), "files": open_files}
        kept.append({**told, **open_now, "gradients": gradients})
        if rank == 0 and loop.every and step.number % loop.every == 0:
            offer = step.number // loop.every
            source.allowed += 1
            source.until_taken(loop.offers[min(offer, len(loop.offers) - 1)].version)
        for number, version in loop.due:
            if rank == 0 and number == step.number + 1:
                source.until_taken(version)
    if rank == 0:
        source.until_told(*(("applied", one["version"]) for one in kept if one["version"]))
    kept.append({"told": source.told, "failures": quotas.failures})
    torch.save(kept, folder / f"rank-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _cut_off(quotas: Quotas, step: int) -> None:
    """Let the agreement of a step fail on this rank, as a lost connection does."""
    original, left = quotas._agreement.start, [step]

    def start(numbers: list[float]) -> Any:
        left[0] -= 1
        if left[0] == -1:
            raise RuntimeError("connection reset by peer")
        return original(numbers)

    if step >= 0:
        quotas._agreement.start = start


def _await_acknowledged() -> None:
    """Wait until the threads that tell the source of a plan have ended."""
    for thread in threading.enumerate():
        if thread.name == "resihp-acknowledge":
            thread.join(WAIT_S)


def _whole(gradient: Any) -> torch.Tensor:
    """A copy of the gradient that no later step changes."""
    whole: torch.Tensor = getattr(gradient, "full_tensor", gradient.clone)()
    return whole


def undisturbed(loop: QuotaLoop) -> list[list[torch.Tensor]]:
    """Gradients of each step of the job on one process without quotas."""
    model = build_model()
    optimizer = build_optimizer(model)
    kept = []
    for step in range(loop.steps):
        optimizer.zero_grad()
        total = float(MICROBATCHES)
        if loop.kind == "tokens":
            total = float(sum(tokens_of(step, index) for index in range(MICROBATCHES)))
        for index in range(MICROBATCHES):
            (loss_of(loop, model, batch(loop, step, index)) / total).backward()
        kept.append([parameter.grad.clone() for parameter in model.parameters()])  # type: ignore[union-attr]
        optimizer.step()
    return kept
