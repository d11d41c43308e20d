"""A job whose ranks are killed at given points of a step, and the record of what they computed."""

from __future__ import annotations

import json
import logging
import os
import pkgutil
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from resihp.contracts import Layout, Op, PeerLostError, Plan, even_quotas
from resihp.elastic.microbatches.ledger import indices
from resihp.elastic.microbatches.stealing import THIEF
from resihp.elastic.models import Llama, Packed
from resihp.elastic.rendezvous import keys
from resihp.elastic.rendezvous.membership import Rendezvous
from resihp.elastic.rendezvous.store import connect
from resihp.elastic.reshard.buffers import ReshardBudget
from resihp.elastic.state.events import Callbacks, LayoutChange
from resihp.elastic.state.phases import Phase
from resihp.elastic.step import Engine, ReducedStep, Setup
from resihp.elastic.trainer import Trainer
from resihp.testing.local_ranks import LocalRanks
from tests.elastic.engine_job import MICROBATCHES, OPTIMIZER, SHAPE, TIMEOUTS, batch
from tests.elastic.snapshots import assemble, load, save
from tests.elastic.survivors import Survivors
from tests.elastic.threads import cut_small_blocks

# Functions of the runtime that a rank enters at certain points of a step.
ENTERED = {
    "bucket": "resihp.elastic.process_groups.bucketed_allreduce.BucketedAllReduce._start",
    "reduction": "resihp.elastic.step.gradient_allreduce.DeterministicAllReduce._sum",
    "account": "resihp.elastic.step.engine.count_rows",
    "gather": "resihp.elastic.step.state_sharding.ParameterAllGather.run",
    "vote": "resihp.elastic.step.engine.squared_norms",
    "clip": "resihp.elastic.step.engine.clip",
    "optimizer": "resihp.elastic.optim.Optimizer.set_rate",
    "inheritance": "resihp.elastic.reshard.gradient_migration.GradientMigration._move_sum",
}


@dataclass(frozen=True)
class EngineFault:
    """`rank` is killed when it comes to a point of step `step` for the `count`-th time.

    Points: `data` (before the first pass), `forward` and `backward` (behind such a pass), those of
    `ENTERED`, `after` (behind the update), and the names of phases; with step 0 `beside a joiner`
    (behind a backward pass, as soon as the joiners work); `robbed`: see `Job.robbed`.
    """

    rank: int
    at: str
    step: int
    count: int = 1


@dataclass(frozen=True)
class Job:
    """A job on `layout`.

    shrink  a replica that loses a rank lives on with a smaller group
    spares  idle ranks, the first of which takes the place of the next one that is lost
    joiners processes that come when a rank has been lost; each gets a replica of its own
    wary    ranks that wait behind each backward pass of the step of the first fault until they
            have heard of a loss
    robbed  ranks that, in the step of the first fault, load no microbatch before another replica
            has taken one of theirs; a replica takes pending microbatches of another one
    copies  ranks that hold the optimizer state of each block of a few rows; None: all
    cut     ranks whose last exchange of the last step breaks off, when all others are through
    """

    layout: Layout
    steps: int = 3
    faults: tuple[EngineFault, ...] = ()
    deterministic: bool = False
    shrink: bool = False
    quotas: tuple[int, ...] = ()
    spares: tuple[int, ...] = ()
    joiners: tuple[int, ...] = ()
    wary: tuple[int, ...] = ()
    robbed: tuple[int, ...] = ()
    copies: int | None = None
    cut: tuple[int, ...] = ()

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks that are there from the beginning."""
        return (*self.layout.ranks, *self.spares)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All processes."""
        return (*self.members, *self.joiners)


@dataclass
class Record:
    """What the ranks of a job wrote down.

    losses    by step
    passes    backward passes by (step, generation): microbatch -> ranks that ran it
    kept      by (step, generation): microbatches whose sums that generation took over
    state     parameters and moments at the end; holders agree to the last bit
    """

    exit_codes: dict[int, int]
    logs: str
    losses: dict[int, float] = field(default_factory=dict)
    passes: dict[tuple[int, int], dict[int, set[int]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(set))
    )
    kept: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    state: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    @property
    def dead(self) -> set[int]:
        """Ranks that did not end well."""
        return {rank for rank, code in self.exit_codes.items() if code != 0}

    def generations(self, step: int) -> list[int]:
        """The generations that worked on a step, in order."""
        seen = {e for s, e in self.passes if s == step} | {e for s, e in self.kept if s == step}
        return sorted(seen)

    def counted(self, step: int) -> list[int]:
        """The microbatches that the completed step is made of: taken over, or computed last."""
        last = self.generations(step)[-1]
        return sorted([*self.kept.get((step, last), ()), *self.passes[step, last]])

    def redone(self, step: int) -> set[int]:
        """Microbatches of which some stage has run backward in more than one generation."""
        times: dict[int, set[int]] = defaultdict(set)
        for (at, generation), ran in self.passes.items():
            for microbatch in ran if at == step else ():
                times[microbatch].add(generation)
        return {microbatch for microbatch, generations in times.items() if len(generations) > 1}


def play(
    job: Job, folder: Path, *, timeout_s: float = 300.0, kills: Sequence[tuple[float, int]] = ()
) -> Record:
    """Run a job to its end. Raises `TimeoutError` with every rank's log.

    `kills` are ranks to be killed so many seconds after the first step, whatever they do then.
    """
    with LocalRanks("faults", folder) as processes:
        processes.start(job.members, run_rank, job, folder)
        _join_later(processes, job, folder)
        _kill_later(processes, kills, folder)
        processes.wait(timeout_s)
        record = Record(dict(processes.exit_codes), processes.logs())
    for rank in job.ranks:
        path = folder / f"events-{rank}.jsonl"
        for line in path.read_text().splitlines() if path.exists() else []:
            _take(record, rank, json.loads(line))
    record.state = assemble([load(path) for path in folder.glob("final-*.pt")])
    return record


def _join_later(processes: LocalRanks, job: Job, folder: Path) -> None:
    """Start the joiners when the members have changed their layout."""

    def has_switched() -> bool:
        return any('"switch"' in path.read_text() for path in folder.glob("events-*"))

    while job.joiners and processes.poll(0.01) and not has_switched():
        pass
    processes.start(job.joiners, run_rank, job, folder)


def _kill_later(processes: LocalRanks, kills: Sequence[tuple[float, int]], folder: Path) -> None:
    if not kills:
        return
    while processes.poll(0.01) and not any(p.stat().st_size for p in folder.glob("events-*")):
        pass  # nothing has been computed yet
    begun = time.monotonic()
    for after_s, rank in sorted(kills):
        while time.monotonic() < begun + after_s and processes.poll(0.002):
            pass
        if rank not in processes.exit_codes:
            processes.kill(rank)


def _take(record: Record, rank: int, event: dict[str, Any]) -> None:
    where = (event["step"], event["generation"])
    if event["what"] == "pass":
        record.passes[where][event["microbatch"]].add(rank)
    elif event["what"] == "switch":
        kept = set(indices(event["kept"]))
        assert record.kept.setdefault(where, kept) == kept, record.logs
    else:
        loss = record.losses.setdefault(event["step"], event["loss"])
        assert loss == event["loss"], f"ranks disagree on step {where}\n{record.logs}"


def run_rank(rank: int, host: str, port: int, job: Job, folder: Path) -> None:
    """One rank's process."""
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    cut_small_blocks()
    events = (folder / f"events-{rank}.jsonl").open("a", buffering=1)
    left = {(s.at, s.step): s.count for s in job.faults if s.rank == rank}
    phases = list[Phase]()

    def come_to(point: str, step: int) -> None:
        if (point, step) in left:
            left[point, step] -= 1
            if left[point, step] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def write(what: str, step: int, **told: Any) -> None:
        event = {"what": what, "step": step, "generation": trainer.generation, **told}
        events.write(json.dumps(event) + "\n")

    def data(step: int, index: int) -> Packed:
        come_to("data", step)
        if rank in job.robbed and step == job.faults[0].step and not trainer.plan.version:
            _await(lambda: is_robbed(step))
            come_to("robbed", step)
        return batch(step, index)

    def is_robbed(step: int) -> bool:
        place = trainer.plan.layout.place_of(rank)
        assert place is not None
        key = keys.claims(rendezvous.recovery, trainer.generation, step, place.dp)
        return rendezvous.stores.store.add(key, 0) >= THIEF

    def on_record(**seen: Any) -> None:
        if seen["op"] is Op.BACKWARD:
            write("pass", seen["step"], microbatch=seen["microbatch"])
            if rank in job.wary and seen["step"] == job.faults[0].step and not trainer.plan.version:
                _await(lambda: rendezvous.is_broken)
            if job.joiners and set(job.joiners) <= set(trainer.plan.layout.ranks):
                come_to("beside a joiner", 0)
        points = {Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.OPTIMIZER: "after"}
        come_to(points.get(seen["op"], ""), seen["step"])

    def on_layout_change(switch: LayoutChange) -> None:
        write("switch", switch.step, kept=switch.kept)

    def on_phase(phase: Phase, completed: int) -> None:
        phases.append(phase)
        come_to(phase.value, completed)

    def on_step(reduced: ReducedStep, ms: float, plan: Plan) -> None:
        write("step", reduced.step, loss=reduced.loss)
        assert phases[-1] in (Phase.UPDATING, Phase.IDLE), "in others no plan is published"
        if trainer.plan.version and not set(job.joiners) <= set(trainer.plan.layout.ranks):
            _await(is_prepared)  # the job is not to end before they have come

    def is_prepared() -> bool:
        trainer.poll_proposal()
        return trainer.is_prepared or rendezvous.is_broken

    hooks = Callbacks(on_phase=on_phase, on_step=on_step, on_layout_change=on_layout_change)
    quotas = job.quotas or even_quotas(MICROBATCHES, job.layout.dp)
    rendezvous = Rendezvous(
        lambda: connect(host, port, "faults", TIMEOUTS),
        rank,
        () if rank in job.joiners else job.members,
        TIMEOUTS,
    )
    trainer = Trainer(
        Setup(
            Llama(SHAPE),
            OPTIMIZER,
            data,
            on_record,
            deterministic=job.deterministic,
            bucket_bytes=4096,
            steal_ahead=0.5 if job.robbed else None,
            optimizer_replicas=job.copies,
        ),
        Plan(version=0, layout=job.layout, quotas=quotas),
        rendezvous,
        Survivors(job.shrink),
        callbacks=hooks,
        memory=ReshardBudget(limit_bytes=16384),
    )
    for point, place in ENTERED.items():
        _watch(place, lambda point=point: come_to(point, trainer.completed))
    if rank in job.cut:
        _cut_off(job.steps - 1, rendezvous)
    begin = trainer.join if rank in job.joiners else trainer.run
    begin(job.steps)
    save(trainer, folder / f"final-{rank}.pt")


def _cut_off(step: int, rendezvous: Rendezvous) -> None:
    """Have the exchange at the end of `step` break off once others have finished the job."""
    reduce, left = Engine.reduce, [step]

    def cut_off(engine: Engine, at: int, *arguments: Any, **keywords: Any) -> ReducedStep:
        reduced = reduce(engine, at, *arguments, **keywords)
        if at in left:
            left.remove(at)
            _await(rendezvous.is_finished)
            raise PeerLostError("the last exchange broke off")
        return reduced

    mock.patch.object(Engine, "reduce", cut_off).start()


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, "in vain"
        time.sleep(0.01)


def _watch(place: str, tell: Callable[[], None]) -> None:
    """Have `tell` called whenever the function at `place` is."""
    owner, _, name = place.rpartition(".")
    original = getattr(pkgutil.resolve_name(owner), name)

    def entered(*arguments: Any, **keywords: Any) -> Any:
        tell()
        return original(*arguments, **keywords)

    mock.patch(place, entered).start()
