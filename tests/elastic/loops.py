"""A user's own training loops, plain and FSDP2, made resilient: what the documentation shows."""

from __future__ import annotations

import json
import os
import signal
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

from resihp.elastic.instep.replicas import Replicas, Seat, Step
from resihp.elastic.local import LocalRanks
from resihp.elastic.membership.store import Timeouts, connect

MICROBATCHES, WIDTH = 8, 12
TIMEOUTS = Timeouts(heartbeat=timedelta(seconds=5), poll=timedelta(milliseconds=50))


@dataclass(frozen=True)
class Blow:
    """Process `rank` is killed in step `step`, behind its `count`-th microbatch or at `at`."""

    rank: int
    step: int
    count: int = 1
    at: str = "microbatch"


@dataclass(frozen=True)
class Loop:
    """A loop over `replicas` replicas of `members` processes, FSDP2 or DDP among these."""

    replicas: int
    members: int = 1
    inner: str = "fsdp2"
    steps: int = 4
    blows: tuple[Blow, ...] = ()
    deterministic: bool = False


@dataclass
class Trace:
    """What the processes wrote down: losses by step, microbatches by (rank, step), final model."""

    exit_codes: dict[int, int]
    logs: str
    losses: dict[int, float]
    taken: dict[tuple[int, int], list[int]]
    models: dict[int, dict[str, torch.Tensor]]


def play(loop: Loop, folder: Path, *, timeout_s: float = 60.0) -> Trace:
    """Run a loop to its end. Raises `TimeoutError` with every process's log."""
    with LocalRanks("loops", folder) as processes:
        processes.start(range(loop.replicas * loop.members), run, loop, folder)
        processes.wait(timeout_s)
        trace = Trace(dict(processes.exit_codes), processes.logs(), {}, {}, {})
    for rank in trace.exit_codes:
        path = folder / f"steps-{rank}.jsonl"
        for line in path.read_text().splitlines() if path.exists() else []:
            told = json.loads(line)
            if "loss" in told:
                known = trace.losses.setdefault(told["step"], told["loss"])
                assert known == told["loss"], trace.logs
            else:
                trace.taken.setdefault((rank, told["step"]), []).append(told["microbatch"])
        if (folder / f"model-{rank}.pt").exists():
            trace.models[rank] = torch.load(folder / f"model-{rank}.pt")
    return trace


def build_model() -> nn.Module:
    """The same on every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))


def batch(step: int, index: int) -> torch.Tensor:
    """Predictable numbers."""
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(100 * step + index))


def train(model: nn.Module, replicas: Replicas, loop: Loop, tell: Any) -> None:
    """The user's loop; only the two `for` lines and `report` are ours."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in replicas.steps(loop.steps):
        for index in step:
            x = batch(step.number, index)
            loss = functional.mse_loss(model(x), x.roll(1, dims=1)) / MICROBATCHES
            loss.backward()
            step.report(loss)
            tell(step, index)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        tell(step, None)


def run(rank: int, host: str, port: int, loop: Loop, folder: Path) -> None:
    """One process."""
    torch.set_num_threads(1)
    seat = Seat(rank // loop.members, loop.replicas, rank % loop.members, loop.members)
    model = build_model()
    if loop.members > 1:
        # Within a replica torch's own groups do the work, as ever; each replica has its own.
        store = dist.PrefixStore(f"fsdp{seat.replica}", dist.TCPStore(host, port))
        dist.init_process_group(
            "gloo", store=store, rank=seat.index, world_size=seat.members,
            timeout=timedelta(seconds=30),
        )  # fmt: skip
        model = DistributedDataParallel(model) if loop.inner == "ddp" else fully_shard(model)
    replicas = Replicas(
        lambda: connect(host, port, "loops", TIMEOUTS),
        seat,
        model.parameters(),
        microbatches=MICROBATCHES,
        timeouts=TIMEOUTS,
        deterministic=loop.deterministic,
    )
    _strike_when_reducing(replicas, rank, loop)
    steps = (folder / f"steps-{rank}.jsonl").open("a", buffering=1)

    def tell(step: Step, index: int | None) -> None:
        if index is None:
            steps.write(json.dumps({"step": step.number, "loss": step.loss}) + "\n")
            return
        steps.write(json.dumps({"step": step.number, "microbatch": index}) + "\n")
        blow = Blow(rank, step.number, len(step.reported))
        if blow in loop.blows:
            os.kill(os.getpid(), signal.SIGKILL)

    train(model, replicas, loop, tell)
    model = getattr(model, "module", model)
    whole = {k: getattr(v, "full_tensor", lambda v=v: v)() for k, v in model.state_dict().items()}
    torch.save(whole, folder / f"model-{rank}.pt")


def _strike_when_reducing(replicas: Replicas, rank: int, loop: Loop) -> None:
    """Kill at the points inside the runtime: `sum`, `vote`, `commit`, `recovery`."""
    inside = {"sum": "_reduce", "vote": "_vote", "commit": "_complete", "recovery": "_take_leave"}
    for blow in loop.blows:
        if blow.rank == rank and blow.at in inside:
            original = getattr(replicas, inside[blow.at])

            def entered(*arguments: Any, blow: Blow = blow, original: Any = original) -> None:
                if replicas.completed == blow.step:
                    os.kill(os.getpid(), signal.SIGKILL)
                original(*arguments)

            setattr(replicas, inside[blow.at], entered)
