"""A user's own training loop, plain, FSDP2 or DDP within a replica, killed and come back to."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from resihp.contracts import Plan, ResiHPError
from resihp.elastic.ddp.init import init_replica_group
from resihp.elastic.ddp.replicas import Replicas
from resihp.elastic.ddp.step import Step
from resihp.elastic.rendezvous.environment import Environment
from resihp.elastic.rendezvous.store import Timeouts
from resihp.testing.local_ranks import LocalRanks
from tests.elastic.ddp_faults import (
    LoopFault,
    inject,
    inject_in_exchange,
    inject_in_passes,
    inject_inside,
    is_stopped,
)
from tests.elastic.engine_job import TIMEOUTS
from tests.elastic.scripted import Scripted

WIDTH, STAGES = 12, 2


@dataclass(frozen=True)
class Loop:
    """A loop over `replicas` replicas of `members` processes, FSDP2 or DDP among these.

    inner    or "sequence parallel"; or "pipeline": stages of a process each; "pipeline of fsdp2",
             "pipeline of tensor parallel": of two
    kills    (seconds after the first microbatch, rank): whatever it does then
    returns  (replica, step): it comes back, as soon as it is dead, and the others wait for it
             behind that step, the one in which it has died or a later one
    plans    that the source offers; the first process has taken the first of them behind step 0
    by_work  microbatches are assigned by `work_of`
    """

    replicas: int
    members: int = 1
    inner: str = "fsdp2"
    steps: int = 4
    microbatches: int = 8
    faults: tuple[LoopFault, ...] = ()
    kills: tuple[tuple[float, int], ...] = ()
    returns: tuple[tuple[int, int], ...] = ()
    plans: tuple[Plan, ...] = ()
    by_work: bool = False
    deterministic: bool = False
    bucket_bytes: int = 25 << 20
    timeouts: Timeouts = TIMEOUTS
    train: Callable[..., None] | None = None


@dataclass
class Trace:
    """What the processes wrote down.

    losses   by step; all processes agree
    taken    microbatches that were computed by (rank, step)
    summed   samples in the sum that each step was completed with, by step
    sent     buckets that started to travel, by (rank, step): in each attempt
    alive    replicas that took part in a step
    models   final parameters by rank
    """

    exit_codes: dict[int, int]
    logs: str
    losses: dict[int, float]
    taken: dict[tuple[int, int], list[int]]
    summed: dict[int, list[int]]
    alive: dict[int, list[int]]
    sent: dict[tuple[int, int], dict[int, int]]
    models: dict[int, dict[str, torch.Tensor]]


def play(loop: Loop, folder: Path, *, timeout_s: float = 300.0) -> Trace:
    """Run a loop to its end. Raises `TimeoutError` with every process's log."""
    with LocalRanks("loops", folder) as processes:
        processes.start(range(loop.replicas * loop.members), run, loop, folder)
        _look_after(processes, loop, folder, timeout_s)
        trace = Trace(dict(processes.exit_codes), processes.logs(), {}, {}, {}, {}, {}, {})
    attempts: dict[int, dict[int, list[int]]] = {}
    for rank in trace.exit_codes:
        path = folder / f"steps-{rank}.jsonl"
        for line in path.read_text().splitlines() if path.exists() else []:
            told = json.loads(line)
            if "loss" in told:
                known = trace.losses.setdefault(told["step"], told["loss"])
                assert known == told["loss"] or math.isnan(known), trace.logs
                trace.alive[told["step"]] = told["alive"]
            elif "samples" in told:
                tries = attempts.setdefault(told["step"], {})
                tries.setdefault(told["attempt"], []).extend(told["samples"])
            elif "sent" in told:
                sent = trace.sent.setdefault((rank, told["step"]), {})
                sent[told["sent"]] = sent.get(told["sent"], 0) + 1
            else:
                trace.taken.setdefault((rank, told["step"]), []).append(told["microbatch"])
        if trace.exit_codes[rank] == 0 and (folder / f"model-{rank}.pt").exists():
            trace.models[rank] = torch.load(folder / f"model-{rank}.pt")
    trace.summed = {step: sorted(tries[max(tries)]) for step, tries in attempts.items()}
    return trace


def _look_after(processes: LocalRanks, loop: Loop, folder: Path, timeout_s: float) -> None:
    """Start again what comes back, let go on what was stopped, until all have ended."""
    returns, deadline = list(loop.returns), time.monotonic() + timeout_s
    stopped: dict[int, float] = {}
    lives: dict[int, int] = {}
    kills, begun = sorted(loop.kills), math.inf
    while running := processes.poll(0.005 if kills else 0.02):
        if begun == math.inf and any(path.stat().st_size for path in folder.glob("steps-*")):
            begun = time.monotonic()
        if kills and time.monotonic() > begun + kills[0][0]:
            _, rank = kills.pop(0)
            if rank not in processes.exit_codes:
                processes.kill(rank)
        for replica, step in returns:
            ranks = range(replica * loop.members, (replica + 1) * loop.members)
            if all(rank in processes.exit_codes for rank in ranks):
                returns.remove((replica, step))
                lives[replica] = lives.get(replica, 0) + 1
                processes.start(ranks, run, loop, folder, lives[replica])
                break
        for fault in loop.faults:
            if not fault.resume_s or not is_stopped(folder / f"stops-{fault.rank}"):
                continue
            since = stopped.setdefault(fault.rank, time.monotonic())
            if time.monotonic() > since + fault.resume_s or set(running) == {fault.rank}:
                (folder / f"stops-{fault.rank}").unlink()
                processes.kill(fault.rank, signal.SIGCONT)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes did not end in {timeout_s} s\n{processes.logs()}")


def build_model() -> nn.Module:
    """The same on every process."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, WIDTH)
    )


def batch(step: int, index: int) -> torch.Tensor:
    """Predictable numbers."""
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(100 * step + index))


def work_of(step: int) -> list[float]:
    """Work of the microbatches of a step of any loop here with eight of them."""
    return [1.0 + (3 * step + 5 * index) % 7 for index in range(8)]


def train(model: nn.Module, loop: Loop, begin: Callable[..., Replicas], tell: Any) -> None:
    """The user's loop; only `begin` (which calls `Replicas`), two `for` and `report` are ours."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
    replicas = begin(model, optimizer, state={"schedule": schedule})
    for step in replicas.steps(loop.steps):
        for index in step:
            # Dropout is the microbatch's own. torch.manual_seed also formats a stack per device.
            torch.default_generator.manual_seed(1000 * step.number + index)
            x = batch(step.number, index)
            loss = functional.mse_loss(model(x), x.roll(1, dims=1)) / loop.microbatches
            loss.backward()
            step.report(loss)
            tell(step, index)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        tell(step, None)


def train_evaluated(
    model: nn.Module, loop: Loop, begin: Callable[..., Replicas], tell: Any
) -> None:
    """The user's loop, which evaluates the model before the first step and before each update."""

    def evaluate(*_: Any) -> None:
        with torch.no_grad():
            model(batch(0, 0))

    def begin_evaluated(model: nn.Module, optimizer: Any, **options: Any) -> Replicas:
        optimizer.register_step_pre_hook(evaluate)
        replicas = begin(model, optimizer, **options)
        evaluate()
        return replicas

    train(model, loop, begin_evaluated, tell)


def train_pipeline(model: nn.Module, loop: Loop, begin: Callable[..., Replicas], tell: Any) -> None:
    """The user's loop around a schedule of torch; a replica of one process is the whole model."""
    model.eval()  # no dropout: a schedule does not tell which microbatch it computes
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    stages = STAGES if loop.members > 1 else 1
    place = int(os.environ["RANK"]) % loop.members * stages // loop.members
    group = None
    if stages < loop.members:
        group = model_mesh(loop)["stage"].get_group()
    stage = PipelineStage(model, place, stages, torch.device("cpu"), group=group)

    @lru_cache(maxsize=1)  # a schedule prepares its stage for its number of microbatches
    def schedule_of(microbatches: int) -> Schedule1F1B | ScheduleGPipe:
        kind = Schedule1F1B if microbatches >= stages else ScheduleGPipe
        return kind(stage, microbatches, loss_fn=loss_fn, scale_grads=False)

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(output, target) / loop.microbatches

    replicas = begin(model, optimizer)
    for step in replicas.steps(loop.steps):
        for indices in step.batches():
            x = torch.cat([batch(step.number, index) for index in indices])
            target = torch.cat([batch(step.number, index).roll(1, dims=1) for index in indices])
            losses: list[torch.Tensor] = []
            schedule_of(len(indices)).step(
                *([x] if stage.is_first else []),
                **({"target": target, "losses": losses} if stage.is_last else {}),
            )
            if stage.is_last:
                step.report(losses)
            for index in indices:
                tell(step, index)
        optimizer.step()
        tell(step, None)


def split(model: nn.Module, loop: Loop) -> nn.Module:
    """The model as `loop.inner` says."""
    if loop.inner == "ddp":
        return DistributedDataParallel(model)
    if loop.inner == "sequence parallel":
        return share_rows(model, init_device_mesh("cpu", (loop.members,)))
    mesh = None
    if loop.inner.startswith("pipeline"):
        place = int(os.environ["RANK"]) % loop.members * STAGES // loop.members
        children = list(model.named_children())
        half = len(children) // 2
        model = nn.Sequential(OrderedDict(children[half:] if place else children[:half]))
        if loop.inner == "pipeline":
            return model
        mesh = model_mesh(loop)["shard"]
        if loop.inner == "pipeline of tensor parallel":
            style = RowwiseParallel if place else ColwiseParallel
            whole = {"input_layouts": Replicate()} if place else {"output_layouts": Replicate()}
            return parallelize_module(model, mesh, {"4" if place else "0": style(**whole)})
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def share_rows(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The model, whose norm runs on the rows of a member, between matrices that are split."""
    rows = Shard(0)
    styles = {
        "0": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=rows, use_local_output=False
        ),
        "1": SequenceParallel(sequence_dim=0),
        "4": ColwiseParallel(input_layouts=rows, output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, styles)


def model_mesh(loop: Loop) -> DeviceMesh:
    """Processes of a replica: stages, and those that share one."""
    shape = (STAGES, loop.members // STAGES)
    return init_device_mesh("cpu", shape, mesh_dim_names=("stage", "shard"))


def run(rank: int, host: str, port: int, loop: Loop, folder: Path, life: int = 0) -> None:
    """One process; it ends as one of the user's would."""
    try:
        _run(rank, host, port, loop, folder, life)
    except (RuntimeError, ResiHPError) as error:
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(1) from None


def _run(rank: int, host: str, port: int, loop: Loop, folder: Path, life: int) -> None:
    torch.set_num_threads(1)
    size = loop.replicas * loop.members
    environment = Environment(rank, size, host, port, "loops", False, life > 0)
    model = build_model()
    if loop.members > 1 or loop.train is train_pipeline:
        init_replica_group(
            loop.members, "gloo", timeout=timedelta(minutes=10), environment=environment
        )
    if loop.members > 1:
        model = split(model, loop)
    steps = (folder / f"steps-{rank}.jsonl").open("a", buffering=1)
    faults = [fault for fault in loop.faults if (fault.rank, fault.life) == (rank, life)]
    made: list[Replicas] = []

    def begin(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Replicas:
        replicas = Replicas(
            model,
            optimizer,
            microbatches=loop.microbatches,
            members=loop.members,
            timeouts=loop.timeouts,
            deterministic=loop.deterministic,
            bucket_bytes=loop.bucket_bytes,
            environment=environment,
            plans=Scripted(loop.plans, (), ()) if loop.plans else None,
            work=work_of if loop.by_work else None,
            **options,
        )
        inject_inside(replicas, faults, folder)
        inject_in_passes(replicas, model, faults, folder)
        inject_in_exchange(replicas, faults, folder, told_bucket)
        _record_votes(replicas, steps)
        made.append(replicas)
        return replicas

    def told_bucket() -> None:
        attempt = made[0]._rendezvous.recovery
        steps.write(json.dumps({"step": made[0].completed, "sent": attempt}) + "\n")

    def tell(step: Step, index: int | None) -> None:
        replicas = made[0]
        if index is not None:
            steps.write(json.dumps({"step": step.number, "microbatch": index}) + "\n")
            inject(faults, folder, "microbatch", step.number, len(step.done))
            return
        told = {"step": step.number, "loss": step.loss, "alive": replicas.alive}
        steps.write(json.dumps(told) + "\n")
        inject(faults, folder, "after", step.number)
        if loop.plans and step.number == 0:
            _await_plan(replicas, loop)
        _await_newcomers(replicas, loop, step.number)

    (loop.train or train)(model, loop, begin, tell)
    if made[0].completed < loop.steps:
        return  # it has come too late
    model = getattr(model, "module", model)
    whole = {k: getattr(v, "full_tensor", lambda v=v: v)() for k, v in model.state_dict().items()}
    kept = folder / f"model-{rank}.pt"
    torch.save(whole, kept.with_suffix(".part"))  # whole or not at all: a kill may fall here
    kept.with_suffix(".part").rename(kept)


def _record_votes(replicas: Replicas, steps: Any) -> None:
    """What is in this process's sum whenever it votes; once for each replica."""
    original, reduce_ = replicas._vote, replicas._reduce
    present: list[Step] = []

    def reduced(step: Step) -> None:
        present[:] = [step]
        reduce_(step)

    def voted() -> list[float]:
        number = present[0].number
        if replicas.coordinates.index == 0:
            samples = [number * replicas._microbatches + index for index in present[0].done]
            told = {"step": number, "attempt": replicas._rendezvous.recovery, "samples": samples}
            steps.write(json.dumps(told) + "\n")
        return original()

    replicas._reduce, replicas._vote = reduced, voted  # type: ignore[method-assign]


def _await_plan(replicas: Replicas, loop: Loop) -> None:
    """The first process waits until it has taken a plan: the next vote proposes it."""
    deadline = time.monotonic() + 300
    while replicas.coordinates.rank == 0 and replicas._poller.newest(0, loop.steps) is None:
        assert time.monotonic() < deadline, "no plan was taken"
        time.sleep(0.01)


def _await_newcomers(replicas: Replicas, loop: Loop, step: int) -> None:
    """The first process waits behind the step for who is to come back."""
    due = [replica for replica, behind in loop.returns if behind == step]
    deadline = time.monotonic() + 300
    while due and replicas.coordinates.rank == replicas._rendezvous.alive[0]:
        if set(due) <= {*replicas._join.waiting(replicas.alive), *replicas.alive}:
            return
        assert time.monotonic() < deadline, f"replicas {due} have not come"
        time.sleep(0.01)
