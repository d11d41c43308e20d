"""ResiHP's engine in `benchmarks.recovery`: pipelines of two stages, summed in two ways."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from benchmarks._recovery_job import Diary
from benchmarks._recovery_ours import TIMEOUTS
from resihp.contracts import Layout, ModelShape, Op, Plan, even_quotas
from resihp.elastic.models import Llama, Packed
from resihp.elastic.optim import Optimizer
from resihp.elastic.planning.sources import NoPlans
from resihp.elastic.rendezvous.membership import Rendezvous
from resihp.elastic.rendezvous.store import connect
from resihp.elastic.state.events import Callbacks
from resihp.elastic.step import Setup
from resihp.elastic.step.pacing import Pacer
from resihp.elastic.trainer import Trainer
from resihp.testing.local_ranks import LocalRanks

SHAPE = ModelShape(layers=4, hidden=256, heads=4, kv_heads=4, ffn=768, vocab=1024)
LAYOUT = Layout.grid(dp=3, pp=2, tp=1, layers=4, units=4)  # replica d: ranks d and d + 3
MICROBATCHES, TOKENS, STEPS, AT, VICTIM = 12, 32, 30, 15, 5
PASS_MS = 12.0
"""A device's time for a forward pass of its stage; backward takes twice as long."""


class WholeReplicas(NoPlans):
    """After a loss, goes on with the replicas that are whole."""

    def after_loss(self, current: Plan, survivors: Collection[int], step: int) -> Plan:
        """The replicas that lost nobody, with even quotas."""
        whole = tuple(r for r in current.layout.replicas if set(r.ranks) <= set(survivors))
        quotas = even_quotas(MICROBATCHES, len(whole))
        return Plan(version=current.version + 1, layout=Layout(whole), quotas=quotas)


def play(folder: Path, *, deterministic: bool) -> None:
    """Run the job; every rank writes its diary into `folder`."""
    with LocalRanks("engine", folder) as processes:
        processes.start(LAYOUT.ranks, run_rank, folder, deterministic)
        processes.wait(300)


def run_rank(rank: int, host: str, port: int, folder: Path, deterministic: bool) -> None:
    """One rank."""
    torch.set_num_threads(1)
    model, diary = Llama(SHAPE), Diary(rank, folder / f"diary-{rank}.jsonl")
    done: list[int] = []

    def record(**seen: Any) -> None:
        if seen["op"] is Op.BACKWARD and rank < len(LAYOUT.replicas):  # first stages: all is done
            diary.tell("microbatch", seen["step"])
        if (rank, seen["step"]) == (VICTIM, AT) and seen["op"] is Op.BACKWARD:
            done.append(seen["microbatch"])
            if len(done) == MICROBATCHES // len(LAYOUT.replicas) // 2:
                diary.tell("killed", AT)
                os.kill(os.getpid(), signal.SIGKILL)

    ranges = {p.key.split(".")[-1]: (0, p.size) for p in model.parameters.layers[0]}
    flops = 2 * model.flops("layers.0", ranges, batch(0, 0))
    trainer = Trainer(
        Setup(
            model,
            Optimizer(torch.optim.AdamW, lr=1e-4),
            batch,
            record,
            Pacer(flops_per_ms=flops / PASS_MS),
            deterministic=deterministic,
        ),
        Plan(version=0, layout=LAYOUT, quotas=even_quotas(MICROBATCHES, 3)),
        Rendezvous(lambda: connect(host, port, "engine", TIMEOUTS), rank, LAYOUT.ranks, TIMEOUTS),
        WholeReplicas(),
        callbacks=Callbacks(on_step=lambda reduced, ms, plan: diary.tell("step", reduced.step)),
    )
    trainer.run(STEPS)


def batch(step: int, index: int) -> Packed:
    """Random tokens."""
    chosen = torch.Generator().manual_seed(100 * step + index)
    ids = torch.randint(0, SHAPE.vocab, (TOKENS + 1,), generator=chosen)
    return Packed(ids[:-1], ids[1:], (TOKENS,))
