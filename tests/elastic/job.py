"""A small elastic job for tests: real processes, scripted plans, scripted faults, full records."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from resihp.contracts import InfeasibleError, Layout, ModelShape, Plan, Replica, Stage, even_quotas
from resihp.elastic.engine import Setup
from resihp.elastic.events import Hooks
from resihp.elastic.local import LocalRanks
from resihp.elastic.membership.phases import Phase
from resihp.elastic.membership.rendezvous import Rendezvous
from resihp.elastic.membership.store import Timeouts, connect
from resihp.elastic.models import Llama, Packed
from resihp.elastic.optim import Optimizer
from resihp.elastic.trainer import Trainer
from resihp.layout import Param

SHAPE = ModelShape(layers=4, hidden=32, heads=4, kv_heads=4, ffn=44, vocab=64)
OPTIMIZER = Optimizer(torch.optim.AdamW, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
MICROBATCHES = 6
TOKENS = 33
ALONE = Layout((Replica((Stage((0,), (0, 4), (4,)),)),))
GRID = Layout.grid(dp=2, pp=2, tp=2, layers=4, units=4)
UNEVEN = Layout(
    (
        Replica((Stage((0, 1, 2), (0, 3), (1, 2, 1)), Stage((5, 4), (3, 4), (3, 1)))),
        Replica((Stage((3, 6), (0, 1), (1, 3)), Stage((7,), (1, 4), (4,)))),
    )
)
SHIFTED = Layout(
    tuple(
        Replica(
            (Stage(r.stages[0].ranks, (0, 1), (3, 1)), Stage(r.stages[1].ranks, (1, 4), (1, 3)))
        )
        for r in reversed(GRID.replicas)
    )
)
"""As GRID, with everything changed that can be without leaving a replica."""


@dataclass(frozen=True)
class Fault:
    """`rank` gets a signal when it enters `phase` with `step` steps completed."""

    rank: int
    phase: Phase
    step: int
    signal: int = signal.SIGKILL


@dataclass(frozen=True)
class ParcelFault:
    """`rank` gets a signal before it exchanges the parcel with this number."""

    rank: int
    number: int
    signal: int = signal.SIGKILL


def small_setup() -> Setup:
    """What the job trains unless a case says otherwise."""
    return Setup(Llama(replace(SHAPE, tied_embeddings=True)), OPTIMIZER, batch)


@dataclass(frozen=True)
class Case:
    """One job. A step waits for the plan that holds from it on, so that runs are alike.

    stopped             ranks that are not waited for at the end
    joiners, welcome    ranks that join, and the plans that give them a place
    joiner_dies         they are killed as soon as they are invited
    warned              (rank, signal, step) that a rank gets when it has made a step
    step_s              each step lasts at least so long
    store_dies_at       the store ends when this step has been made
    """

    layout: Layout
    steps: int
    plans: tuple[Plan, ...] = ()
    faults: tuple[Fault, ...] = ()
    parcel_fault: ParcelFault | None = None
    ranks: tuple[int, ...] = ()
    stopped: frozenset[int] = frozenset()
    joiners: tuple[int, ...] = ()
    welcome: tuple[Plan, ...] = ()
    joiner_dies: bool = False
    warned: tuple[tuple[int, int, int], ...] = ()
    step_s: float = 0.0
    store_dies_at: int | None = None
    setup: Callable[[], Setup] = small_setup
    timeouts: Timeouts = field(
        default=Timeouts(heartbeat=timedelta(seconds=5), poll=timedelta(milliseconds=50))
    )


@dataclass
class Outcome:
    """What became of a job: losses by step, switches, exit codes, and each rank's final shard."""

    exit_codes: dict[int, int]
    losses: dict[int, float]
    switches: list[dict[str, Any]]
    shards: dict[int, dict[str, Any]]
    folder: Path
    logs: str

    def full_state(self, prefix: str = "final") -> dict[str, list[torch.Tensor]]:
        """Parameter and moments of the whole model; replicas must agree to the last bit."""
        paths = sorted(self.folder.glob(f"{prefix}-*.pt"))
        return assemble([torch.load(path) for path in paths])


def plan(version: int, layout: Layout, *, quotas: tuple[int, ...] = (), from_step: int = 0) -> Plan:
    """A plan of the small job."""
    quotas = quotas or even_quotas(MICROBATCHES, layout.dp)
    return Plan(version=version, layout=layout, quotas=quotas, from_step=from_step)


def run(case: Case, folder: Path, *, timeout_s: float = 60.0) -> Outcome:
    """Run a job to its end. Raises `TimeoutError` with every rank's log."""
    ranks = case.ranks or case.layout.ranks
    with LocalRanks("test", folder) as processes:
        processes.start((*ranks, *case.joiners), run_rank, case, folder)
        deadline = time.monotonic() + timeout_s
        while set(processes.poll(0.2)) - case.stopped:
            if (folder / "store-dies").exists():
                processes.close_store()
            if time.monotonic() > deadline:
                raise TimeoutError(f"ranks did not end in {timeout_s} s\n{processes.logs()}")
        codes = dict(processes.exit_codes)
        logs = processes.logs()
    losses: dict[int, float] = {}
    switches: list[dict[str, Any]] = []
    for rank in (*ranks, *case.joiners):
        path = folder / f"events-{rank}.jsonl"
        for line in path.read_text().splitlines() if path.exists() else []:
            event = json.loads(line)
            if "loss" in event:
                known = losses.setdefault(event["step"], event["loss"])
                assert known == event["loss"], f"ranks disagree on step {event['step']}\n{logs}"
            else:
                switches.append(event)
    shards = {int(p.stem.split("-")[1]): torch.load(p) for p in folder.glob("final-*.pt")}
    return Outcome(codes, losses, switches, shards, folder, logs)


def assemble(shards: list[dict[str, Any]]) -> dict[str, list[torch.Tensor]]:
    """The whole state from the shards of all ranks; what several hold must be equal."""
    full: dict[str, list[torch.Tensor]] = {}
    for shard in shards:
        for key, (shape, dim, start, tensors) in shard.items():
            whole = full.setdefault(key, [torch.full(shape, torch.nan) for _ in tensors])
            for target, tensor in zip(whole, tensors, strict=True):
                view = target.narrow(dim, start, tensor.shape[dim])
                held = ~view.isnan()
                assert torch.equal(view[held], tensor[held]), f"holders of {key} differ"
                view.copy_(tensor)
    for key, tensors in full.items():
        assert not any(t.isnan().any() for t in tensors), f"{key} is not whole"
    return full


def batch(step: int, index: int) -> Packed:
    """Predictable text in two or three documents."""
    chosen = torch.Generator().manual_seed(1000 * step + index)
    ids = torch.randint(0, 8, (TOKENS + 1,), generator=chosen).cumsum(0) % SHAPE.vocab
    cut = int(torch.randint(5, TOKENS - 5, (1,), generator=chosen))
    return Packed(ids[:-1], ids[1:], (cut, TOKENS - cut))


class Scripted:
    """Offers the scripted plans; after a loss, keeps the replicas that lost nobody."""

    def __init__(self, plans: tuple[Plan, ...], welcome: tuple[Plan, ...] = ()) -> None:
        self._plans, self._welcome = plans, welcome

    def wait(self, after: int, seconds: float) -> Plan | None:
        for offered in self._plans:
            if offered.version > after:
                return offered
        time.sleep(min(seconds, 0.1))
        return None

    def after_loss(self, current: Plan, survivors: Collection[int], step: int) -> Plan:
        whole = [r for r in current.layout.replicas if set(r.ranks) <= set(survivors)]
        if not whole:
            raise InfeasibleError("replicas", "no replica is whole")
        return plan(current.version + 100, Layout(tuple(whole)))

    def joined(self, current: Plan, standbys: Collection[int], step: int) -> Plan | None:
        return next((plan for plan in self._welcome if plan.version > current.version), None)

    def applied(self, plan: Plan, rank: int, step: int, pause_ms: float) -> None:
        pass


def run_rank(rank: int, host: str, port: int, case: Case, folder: Path) -> None:
    """One rank's process."""
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    events = (folder / f"events-{rank}.jsonl").open("a", buffering=1)
    members = [rank] if rank in case.joiners else case.ranks or case.layout.ranks

    def on_phase(phase: Phase, completed: int) -> None:
        if phase is Phase.STREAMING:
            save(trainer, folder / f"before{trainer.epoch}-{rank}.pt")
        if phase is Phase.IDLE and case.joiner_dies and rank in case.joiners:
            os.kill(os.getpid(), signal.SIGKILL)
        for fault in case.faults:
            if (fault.rank, fault.phase, fault.step) == (rank, phase, completed):
                os.kill(os.getpid(), fault.signal)

    def on_parcel(number: int) -> None:
        fault = case.parcel_fault
        if fault is not None and (fault.rank, fault.number) == (rank, number):
            os.kill(os.getpid(), fault.signal)

    def on_switch(switch: Any) -> None:
        save(trainer, folder / f"after{trainer.epoch}-{rank}.pt")
        event = {
            "rank": rank,
            "at": switch.step,
            "version": switch.plan.version,
            "lost": switch.lost,
            "received": switch.received_bytes,
            "threads": len(os.listdir("/proc/self/task")),
            "files": len(os.listdir("/proc/self/fd")),
            "memory_mb": int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20,
        }
        events.write(json.dumps(event) + "\n")

    def on_step(reduced: Any, ms: float, current: Plan) -> None:
        events.write(json.dumps({"step": reduced.step, "loss": reduced.loss}) + "\n")
        time.sleep(case.step_s)
        if reduced.step == case.store_dies_at:
            (folder / "store-dies").touch()
        for warned, with_signal, step in case.warned:
            if (warned, step) == (rank, reduced.step):
                os.kill(os.getpid(), with_signal)
        deadline = time.monotonic() + 20
        due = any(
            p.version > current.version and p.from_step == reduced.step + 1 for p in case.plans
        )
        while due and not trainer.is_prepared and time.monotonic() < deadline:
            trainer.look_for_plan()
            time.sleep(0.01)

    trainer = Trainer(
        case.setup(),
        plan(0, case.layout),
        Rendezvous(
            lambda: connect(host, port, "test", case.timeouts), rank, members, case.timeouts
        ),
        Scripted(case.plans, case.welcome),
        hooks=Hooks(on_phase=on_phase, on_step=on_step, on_parcel=on_parcel, on_switch=on_switch),
        limit_bytes=4096,
    )
    signal.signal(signal.SIGTERM, lambda *_: trainer.leave())
    begin = trainer.join if rank in case.joiners else trainer.run
    begin(case.steps)
    save(trainer, folder / f"final-{rank}.pt")


def save(trainer: Trainer, path: Path) -> None:
    """Write what this rank holds: parameters, moments, and whole gradients if there are any."""
    if trainer.engine is None:
        return
    shard, total = trainer.engine.shard, trainer.engine.total

    def tensors(param: Param) -> list[torch.Tensor]:
        return [*shard.state(param), *([total[param]] if total is not None else [])]

    held = {
        param.key: (param.shape, param.dim or 0, span[0], [t.clone() for t in tensors(param)])
        for param, span in shard.ranges.items()
    }
    torch.save(held, path)
