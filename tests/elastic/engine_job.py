"""A small elastic job for tests: real processes, scripted plans, scripted faults, full records."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from math import inf
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from resihp.checkpoint import EveryStep, SavePolicy
from resihp.contracts import Layout, ModelShape, Plan, Replica, Stage, even_quotas
from resihp.elastic.models import Llama, Packed, save_pretrained
from resihp.elastic.optim import Optimizer
from resihp.elastic.planning.sources import PlanSource
from resihp.elastic.rendezvous import host_table
from resihp.elastic.rendezvous.membership import Rendezvous
from resihp.elastic.rendezvous.store import Timeouts, connect
from resihp.elastic.reshard.buffers import ReshardBudget
from resihp.elastic.reshard.gradient_transfer import GradientTransfer
from resihp.elastic.reshard.spreading import CopyPace
from resihp.elastic.state.events import Callbacks
from resihp.elastic.state.phases import Phase
from resihp.elastic.step import Setup
from resihp.elastic.trainer import Trainer
from resihp.testing.local_ranks import LocalRanks
from tests.elastic.checkpoint_helpers import await_kept, await_sent, kept_in, tear
from tests.elastic.held import held
from tests.elastic.scripted import Scripted
from tests.elastic.snapshots import full_state, load, save
from tests.elastic.threads import cut_small_blocks

SHAPE = ModelShape(layers=4, hidden=32, heads=4, kv_heads=4, ffn=44, vocab=64)
OPTIMIZER = Optimizer(torch.optim.AdamW, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
MICROBATCHES = 6
TOKENS = 33
LAST = 4
AHEAD = 2
"""Steps by which a plan is prepared at the latest before the one from which it holds: in the first
all ranks learn that it is, during the second the next generation is filled."""
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
TIMEOUTS = Timeouts(heartbeat=timedelta(seconds=30), poll=timedelta(milliseconds=50))
"""The machine may be busy; a process that is killed is seen at once."""
BRISK = replace(TIMEOUTS, heartbeat=timedelta(seconds=1.5))
"""For jobs in which a process that is stopped is to be given up."""


@dataclass(frozen=True)
class Fault:
    """`rank` gets a signal when it enters `phase` with `step` steps completed.

    With `victim` another process gets it: the one whose id stands in the job's file `pid-VICTIM`.
    """

    rank: int
    phase: Phase
    step: int
    signal: int = signal.SIGKILL
    victim: str = ""


@dataclass(frozen=True)
class TransferFault:
    """`rank` gets a signal at the transfer with this number, or `victim` does.

    A victim that is killed has ended before the transfer continues. `of_gradients`, the number is
    that of a transfer of summed gradients, which begin during the last passes.
    """

    rank: int
    number: int
    signal: int = signal.SIGKILL
    victim: int | None = None
    of_gradients: bool = False


def small_setup() -> Setup:
    """What the job trains unless a case says otherwise."""
    return Setup(Llama(replace(SHAPE, tied_embeddings=True)), OPTIMIZER, batch)


@dataclass(frozen=True)
class Case:
    """One job. A step waits for the plan that is due soon, so that each is taken on at its step.

    stopped             ranks that are not waited for at the end
    joiners, welcome    ranks that join, and the plans that give them a place
    rescues             plans for when no replica is whole any more, one after the other
    checkpoints         those of the job, in a folder or at a URL; a step lasts until it is saved
    in_memory           as many stay in the ranks' memory too; a step lasts until it is sent
    policy              when the job saves
    torn_at             the checkpoint of this step is damaged as soon as it is there
    joiner_dies         they are killed when they are invited, before which the last steps wait
    warned              (rank, signal, step) that a rank gets when it has made a step
    window_s            time that such a warning leaves
    source              of plans, made from the job's folder, instead of `plans` and `welcome`
    memory              for a change of layout; next to none, so that all of it goes to files
    copy_steps          the copy is spread over so many steps, where that is possible; None: as it
                        needs
    step_s              each step lasts at least so long
    awaited             the last steps wait until the plan of this version stands ready
    counts              at each switch, what the rank then holds of the system
    store_dies_at       the store ends when this step has been made
    hosts               sets of ranks that share memory, as those of one host do; the rest are
                        one more. None: all do
    exported            the ranks write the trained model into the job's folder "exported"
    """

    layout: Layout
    steps: int
    plans: tuple[Plan, ...] = ()
    faults: tuple[Fault, ...] = ()
    transfer_fault: TransferFault | None = None
    ranks: tuple[int, ...] = ()
    stopped: frozenset[int] = frozenset()
    joiners: tuple[int, ...] = ()
    welcome: tuple[Plan, ...] = ()
    rescues: tuple[Plan, ...] = ()
    checkpoints: Path | str | None = None
    in_memory: int = 0
    policy: SavePolicy = field(default=EveryStep())
    torn_at: int | None = None
    joiner_dies: bool = False
    warned: tuple[tuple[int, int, int], ...] = ()
    step_s: float = 0.0
    awaited: int = 0
    counts: bool = False
    store_dies_at: int | None = None
    hosts: tuple[frozenset[int], ...] | None = None
    exported: bool = False
    memory: ReshardBudget = field(default=ReshardBudget(limit_bytes=16384))
    copy_steps: int | None = None
    window_s: float = inf
    source: Callable[[Path], PlanSource] | None = None
    setup: Callable[[], Setup] = small_setup
    timeouts: Timeouts = TIMEOUTS


@dataclass
class Outcome:
    """What became of a job: losses by step (of the last generation that made it), switches, exit
    codes, and each rank's final shard."""

    exit_codes: dict[int, int]
    losses: dict[int, float]
    switches: list[dict[str, Any]]
    shards: dict[int, dict[str, Any]]
    folder: Path
    logs: str

    def full_state(self, prefix: str = "final") -> dict[str, list[torch.Tensor]]:
        """Parameter and moments of the whole model; replicas must agree to the last bit."""
        return full_state(self.folder, prefix)


def plan(version: int, layout: Layout, *, quotas: tuple[int, ...] = (), from_step: int = 0) -> Plan:
    """A plan of the small job."""
    quotas = quotas or even_quotas(MICROBATCHES, layout.dp)
    return Plan(version=version, layout=layout, quotas=quotas, from_step=from_step)


def run(case: Case, folder: Path, *, timeout_s: float = 300.0) -> Outcome:
    """Run a job to its end. Raises `TimeoutError` with every rank's log."""
    ranks = case.ranks or case.layout.ranks
    with LocalRanks("test", folder) as processes:
        processes.start((*ranks, *case.joiners), run_rank, case, folder)
        deadline = time.monotonic() + timeout_s
        while set(processes.poll(0.2)) - case.stopped:
            if (folder / "store-dies").exists():
                processes.close_store()
                (folder / "store-dies").unlink()
            if time.monotonic() > deadline:
                raise TimeoutError(f"ranks did not end in {timeout_s} s\n{processes.logs()}")
        codes = dict(processes.exit_codes)
        logs = processes.logs()
    losses: dict[tuple[int, int], float] = {}
    switches: list[dict[str, Any]] = []
    for rank in (*ranks, *case.joiners):
        path = folder / f"events-{rank}.jsonl"
        for line in path.read_text().splitlines() if path.exists() else []:
            event = json.loads(line)
            if "loss" in event:
                known = losses.setdefault((event["generation"], event["step"]), event["loss"])
                assert known == event["loss"], f"ranks disagree on step {event['step']}\n{logs}"
            else:
                switches.append(event)
    shards = {int(p.stem.split("-")[1]): load(p) for p in folder.glob("final-*.pt")}
    newest = {step: losses[generation, step] for generation, step in sorted(losses)}
    return Outcome(codes, newest, switches, shards, folder, logs)


def batch(step: int, index: int) -> Packed:
    """Predictable text in two or three documents."""
    chosen = torch.Generator().manual_seed(1000 * step + index)
    ids = torch.randint(0, 8, (TOKENS + 1,), generator=chosen).cumsum(0) % SHAPE.vocab
    cut = int(torch.randint(5, TOKENS - 5, (1,), generator=chosen))
    return Packed(ids[:-1], ids[1:], (cut, TOKENS - cut))


def is_running(process: int) -> bool:
    """Whether it has memory: one that has ended may still wait for its parent to learn of it."""
    try:
        return bool(Path(f"/proc/{process}/statm").read_text().split()[0] != "0")
    except (FileNotFoundError, ProcessLookupError):
        return False


def run_rank(rank: int, host: str, port: int, case: Case, folder: Path) -> None:
    """One rank's process."""
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    cut_small_blocks()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    events = (folder / f"events-{rank}.jsonl").open("a", buffering=1)
    if case.hosts is not None:
        number = next((i for i, ranks in enumerate(case.hosts) if rank in ranks), len(case.hosts))
        host_table._FOLDER = folder / f"host-{number}"
        host_table._FOLDER.mkdir(exist_ok=True)
    members = () if rank in case.joiners else case.ranks or case.layout.ranks

    def await_plan(completed: int) -> None:
        """Let no step begin before the plan that is due is prepared, at all working ranks."""
        version = trainer.plan.version
        due = any(p.version > version and p.from_step <= completed + AHEAD for p in case.plans)
        due = due or any(p.version > version and p.from_step == completed > 0 for p in case.welcome)
        is_owed = version < case.awaited or (case.joiner_dies and not rendezvous.recovery)
        due = due or (is_owed and completed >= case.steps - LAST)
        while due and not trainer.is_prepared and not rendezvous.is_broken:
            trainer.poll_proposal()
            time.sleep(0.01)

    def on_phase(phase: Phase, completed: int) -> None:
        if phase is Phase.ACCUMULATING:
            await_plan(completed)
        if phase is Phase.STREAMING:
            save(trainer, folder / f"before{trainer.generation}-{rank}.pt")
        if phase is Phase.IDLE and case.joiner_dies and rank in case.joiners:
            os.kill(os.getpid(), signal.SIGKILL)
        for fault in case.faults:
            if (fault.rank, fault.phase, fault.step) == (rank, phase, completed):
                victim = folder / f"pid-{fault.victim or rank}"
                with suppress(ProcessLookupError):  # a second time
                    os.kill(int(victim.read_text()), fault.signal)

    gradients_from: list[int] = []
    last_number = -1

    def move_gradients(
        moving: GradientTransfer, cancelled: Any, run: Any = GradientTransfer.run
    ) -> None:
        gradients_from.append(last_number + 1)
        run(moving, cancelled)

    def spread(pace: CopyPace, group: Any, agree: Any = CopyPace.agree) -> int:
        if case.copy_steps is None:
            return int(agree(pace, group))
        return min(case.copy_steps, int(agree(replace(pace, copy_s=inf), group)))

    def on_transfer(number: int) -> None:
        nonlocal last_number
        fault, last_number = case.transfer_fault, number
        if fault is None:
            return
        if fault.of_gradients:
            number = number - gradients_from[0] if gradients_from else -1
        if (fault.rank, fault.number) == (rank, number):
            victim = rank if fault.victim is None else fault.victim
            process = int((folder / f"pid-{victim}").read_text())
            os.kill(process, fault.signal)
            while fault.signal == signal.SIGKILL and is_running(process):
                time.sleep(0.001)

    def on_layout_change(switch: Any) -> None:
        # What other ranks have updated is gathered after it.
        save(trainer, folder / f"after{trainer.generation}-{rank}.pt", whole=False)
        event = {
            "rank": rank,
            "at": switch.step,
            "generation": trainer.generation,
            "version": switch.plan.version,
            "digest": switch.plan.digest,
            "lost": switch.lost,
            "received": switch.received_bytes,
            "extra": switch.extra_bytes,
            "spilled": switch.spilled_bytes,
            "rewound": switch.is_rewound,
            "copy_steps": switch.copy_steps,
            "copy_ms": switch.copy_ms,
            **(held() if case.counts else {}),
        }
        events.write(json.dumps(event) + "\n")

    def on_step(reduced: Any, ms: float, current: Plan) -> None:
        told = {"step": reduced.step, "generation": trainer.generation, "loss": reduced.loss}
        events.write(json.dumps(told) + "\n")
        time.sleep(case.step_s)
        if case.in_memory and reduced.is_due and current is trainer.plan:
            await_sent(trainer, reduced.step)
        if case.checkpoints is not None and reduced.is_due and current is trainer.plan:
            await_kept(case.checkpoints, reduced.step)
            if (reduced.step, rank) == (case.torn_at, min(case.layout.ranks)):
                assert isinstance(case.checkpoints, Path)
                tear(case.checkpoints, reduced.step, rank)
        if reduced.step == case.store_dies_at:
            (folder / "store-dies").touch()
            while (folder / "store-dies").exists():
                time.sleep(0.01)
        for warned, with_signal, step in case.warned:
            if (warned, step) == (rank, reduced.step):
                os.kill(os.getpid(), with_signal)

    rendezvous = Rendezvous(
        lambda: connect(host, port, "test", case.timeouts), rank, members, case.timeouts
    )
    trainer = Trainer(
        case.setup(),
        plan(0, case.layout),
        rendezvous,
        case.source(folder) if case.source else Scripted(case.plans, case.welcome, case.rescues),
        callbacks=Callbacks(
            on_phase=on_phase,
            on_step=on_step,
            on_transfer=on_transfer,
            on_layout_change=on_layout_change,
        ),
        checkpoints=kept_in(case.checkpoints, case.in_memory, case.policy),
        memory=case.memory,
    )
    signal.signal(signal.SIGTERM, lambda *_: trainer.leave(time.monotonic() + case.window_s))
    begin = trainer.join if rank in case.joiners else trainer.run
    with (
        mock.patch.object(GradientTransfer, "run", move_gradients),
        mock.patch.object(CopyPace, "agree", spread),
    ):
        begin(case.steps)
    save(trainer, folder / f"final-{rank}.pt")
    if case.exported:
        model, layout = trainer.setup.model, trainer.plan.layout
        assert isinstance(model, Llama)
        to, step = folder / "exported", trainer.completed
        save_pretrained(model, trainer.tensors, to, layout=layout, rank=rank, step=step)
