"""The elastic engine with four ranks on one device; gloo exchanges tensors through the host."""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks._gpu_ranks import Diary, held, told
from benchmarks._gpu_rows import NotRunError, Row
from benchmarks._resize_live import (
    CHANGES,
    LAYERS,
    OPTIMIZER,
    SHAPES,
    UNITS,
    Way,
    batch,
    first_device,
    live,
)
from resihp.contracts import ContractError, Layout, ModelShape, Op, Plan, even_quotas
from resihp.elastic.models import Llama
from resihp.elastic.planning.sources import NoPlans
from resihp.elastic.process_groups.selection import VARIABLE, select_communicators
from resihp.elastic.rendezvous.membership import Rendezvous
from resihp.elastic.rendezvous.store import Timeouts, connect
from resihp.elastic.state.events import Callbacks, LayoutChange
from resihp.elastic.state.phases import Phase
from resihp.elastic.step import ReducedStep, Setup
from resihp.elastic.trainer import Trainer
from resihp.testing.local_ranks import LocalRanks
from resihp.testing.ordinary_loops import SHARED_DEVICE

TINY = ModelShape(layers=LAYERS, hidden=64, heads=8, kv_heads=8, ffn=96, vocab=4096)
MODELS = {
    "31M": SHAPES["30M"],
    "108M": SHAPES["100M"],
    "350M": SHAPES["350M"],
    "1B": ModelShape(layers=LAYERS, hidden=3072, heads=24, kv_heads=8, ffn=10240, vocab=4096),
}
TIMEOUTS = Timeouts(
    heartbeat=timedelta(seconds=20),
    connect=timedelta(seconds=60),
    poll=timedelta(milliseconds=50),
)
MICROBATCHES, VICTIM, AT, STEPS = 8, 3, 4, 8
TWO_STAGES = Layout.grid(dp=2, pp=2, tp=1, layers=LAYERS, units=UNITS)  # replica d: d and d + 2
ONE_STAGE = Layout.grid(dp=4, pp=1, tp=1, layers=LAYERS, units=UNITS)
POINTS = {"forward": Op.FORWARD, "backward": Op.BACKWARD}
IN_PAUSE = "the pause"
WARM_CHANGES = 5
"""Changes of layout after which the memory of a job is that of any later one."""


@dataclass(frozen=True)
class EngineJob:
    """What four ranks do.

    groups  name of the maker of process groups on a device
    plans   taken on one after the other, each as soon as it can be
    killed  the point at which rank `VICTIM` kills itself; "": nowhere
    """

    shape: ModelShape
    device: str
    layout: Layout = TWO_STAGES
    groups: str = "staged"
    steps: int = STEPS
    plans: tuple[Plan, ...] = ()
    killed: str = ""
    optimizer_replicas: int | None = None


def need_groups(device: str, maker: str = "staged") -> None:
    """Use these process groups in the ranks started from here, gloo's on the CPU.

    Raises `NotRunError` if the runtime has none for the device.
    """
    chosen = {VARIABLE: "gloo" if device == "cpu" else maker, **SHARED_DEVICE}
    try:
        select_communicators(first_device(device), chosen)
    except ContractError as error:
        raise NotRunError(f"not possible: {error}") from error
    os.environ |= chosen


def change(
    device: str, small: bool, size: str, name: str, attach: bool = True, maker: str = "staged"
) -> Iterator[Row]:
    """One change of layout: the longest pause of a rank, and the step that copies the state.

    Without `attach` the state goes through the process groups, not from memory to memory.
    """
    need_groups(device, maker)
    shape = TINY if small else MODELS[size]
    one = next(one for one in CHANGES if one.name == name)
    found = live(shape, one, Way(attach=attach, device=device))
    row = f"{size}, {name}{'' if attach else f', through {maker} groups'}"
    yield Row(f"{row}: pause", found["pause_ms"], "ms", found["old"], "a step before it")
    yield Row(f"{row}: step that copies", found["copying"], "ms", found["old"], "a step before it")


def kill(device: str, small: bool, point: str, maker: str = "staged") -> Iterator[Row]:
    """A rank killed in mid-step: time until the others have made that step."""
    need_groups(device, maker)
    plans = (_plan(1, ONE_STAGE),) if point == IN_PAUSE else ()
    job = EngineJob(_shape(small), device, groups=maker, plans=plans, killed=point)
    with _played(job) as folder:
        died = told(folder, VICTIM, "killed")[0]
        after = [e for e in told(folder, 0, "step") if e["at"] > died["at"]]
        before = [e["at"] for e in told(folder, 0, "step") if e["at"] < died["at"]]
        passes = [e for rank in (0, 1) for e in told(folder, rank, "microbatch")]
    usual_s = statistics.median(b - a for a, b in pairwise(before))
    again = sum(e["step"] == after[0]["step"] for e in passes) - MICROBATCHES
    name = f"{maker}: SIGKILL in {point}: until the step is made"
    took_s = after[0]["at"] - died["at"]
    yield Row(name, took_s, "s", usual_s, "a usual step", f"{again} of {MICROBATCHES} done again")


def changes_in_a_row(device: str, small: bool, count: int) -> Iterator[Row]:
    """What is still held after so many changes of layout between two layouts."""
    need_groups(device)
    layouts = (TWO_STAGES, ONE_STAGE)
    plans = tuple(_plan(version, layouts[version % 2]) for version in range(1, count + 1))
    with _played(EngineJob(_shape(small), device, steps=3 * count + 3, plans=plans)) as folder:
        seen = {e["version"]: e for e in told(folder, 0, "change")}
    first, last = seen[min(WARM_CHANGES + count % 2, count)], seen[count]
    for kind, per, unit in (("bytes", 2**20, "MiB"), ("files", 1, "files")):
        name = f"{count} changes of layout: {kind} held after them"
        yield Row(name, last[kind] / per, unit, first[kind] / per, "after the first ones")


def losses(device: str, small: bool, maker: str = "staged") -> Iterator[Row]:
    """The largest difference of a step's loss to that of the same job on the CPU."""
    need_groups(device, maker)
    jobs = [EngineJob(_shape(small), where, groups=maker, steps=5) for where in ("cpu", device)]
    apart = _apart(*map(_losses, jobs))
    yield Row(f"{maker}: loss of 5 steps, from the CPU's", apart, "relative", 1e-4, "of fp32 sums")


def sharded_state(device: str, small: bool, maker: str = "staged") -> Iterator[Row]:
    """Optimizer state on two of four replicas: loss, and time until the loss of one is made up."""
    need_groups(device, maker)
    whole = EngineJob(_shape(small), device, ONE_STAGE, groups=maker, steps=5)
    apart = _apart(*(_losses(replace(whole, optimizer_replicas=n)) for n in (None, 2)))
    name = f"{maker}: optimizer state on 2 of 4 replicas"
    yield Row(f"{name}: loss of 5 steps", apart, "relative", 1e-4, "from unsharded")
    job = replace(whole, steps=STEPS, optimizer_replicas=2, killed="backward")
    with _played(job) as folder:
        died, made = told(folder, VICTIM, "killed")[0], told(folder, 0, "step")
    after = next(e["at"] for e in made if e["at"] > died["at"])
    before = [e["at"] for e in made if e["at"] < died["at"]]
    usual_s = statistics.median(b - a for a, b in pairwise(before))
    yield Row(f"{name}: SIGKILL", after - died["at"], "s", usual_s, "a usual step", "no rollback")


def _losses(job: EngineJob) -> list[float]:
    with _played(job) as folder:
        return [e["loss"] for e in told(folder, 0, "step")]


def _apart(one: list[float], other: list[float]) -> float:
    """The largest relative difference between two lists."""
    return max(abs(b / a - 1) for a, b in zip(one, other, strict=True))


def _shape(small: bool) -> ModelShape:
    return TINY if small else MODELS["31M"]


@contextmanager
def _played(job: EngineJob, wait_s: float = 100.0) -> Iterator[Path]:
    """Folder of the diaries of a job that has ended as it should."""
    with tempfile.TemporaryDirectory(prefix="resihp-engine-") as name:
        with LocalRanks("engine", Path(name)) as ranks:
            ranks.start(range(4), run_rank, job, Path(name))
            codes = dict(ranks.wait(wait_s))
            died = codes.pop(VICTIM) if job.killed else -signal.SIGKILL
            assert set(codes.values()) == {0}, ranks.logs()
            assert died == -signal.SIGKILL, f"rank {VICTIM} never came to {job.killed}"
        yield Path(name)


def run_rank(rank: int, host: str, port: int, job: EngineJob, folder: Path) -> None:
    """One rank's process."""
    torch.set_num_threads(1)
    os.environ["NCCL_HOSTID"] = f"rank{rank}"
    os.environ[VARIABLE] = "gloo" if job.device == "cpu" else job.groups
    diary = Diary(folder, rank)

    def come_to(point: str) -> None:
        if rank == VICTIM and point == job.killed:
            diary.tell("killed")
            os.kill(os.getpid(), signal.SIGKILL)

    def on_record(**seen: Any) -> None:
        if seen["op"] is Op.BACKWARD and rank < TWO_STAGES.dp:  # the first stages: all is done
            diary.tell("microbatch", step=seen["step"])
        if seen["step"] == AT and seen["op"] is POINTS.get(job.killed):
            come_to(job.killed)

    def on_phase(phase: Phase, completed: int) -> None:
        if phase is Phase.STREAMING:
            come_to(IN_PAUSE)

    def on_step(reduced: ReducedStep, ms: float, plan: Plan) -> None:
        diary.tell("step", step=reduced.step, loss=reduced.loss)
        if reduced.step > 1:
            _await_next(trainer, len(job.plans))

    def on_layout_change(made: LayoutChange) -> None:
        diary.tell("change", version=made.plan.version, ms=made.pause_ms, **held(job.device))

    trainer = Trainer(
        Setup(
            Llama(job.shape),
            OPTIMIZER,
            batch,
            on_record,
            device=first_device(job.device),
            optimizer_replicas=job.optimizer_replicas,
        ),
        _plan(0, job.layout),
        Rendezvous(lambda: connect(host, port, "engine", TIMEOUTS), rank, range(4), TIMEOUTS),
        PlansInOrder(job.plans, lambda: trainer.completed > 2),
        callbacks=Callbacks(on_phase=on_phase, on_step=on_step, on_layout_change=on_layout_change),
    )
    trainer.run(job.steps)


class PlansInOrder(NoPlans):
    """Given plans, one after the other; after a loss the replicas that are whole."""

    def __init__(self, plans: tuple[Plan, ...], is_due: Callable[[], bool]) -> None:
        self._plans, self._is_due = plans, is_due

    def wait(self, after: int, seconds: float) -> Plan | None:
        """The plan behind version `after`, if there is one."""
        if after < len(self._plans) and self._is_due():
            return self._plans[after]
        time.sleep(min(seconds, 0.02))
        return None

    def after_loss(self, current: Plan, survivors: Collection[int], step: int) -> Plan:
        """The replicas that lost nobody, with even quotas."""
        whole = tuple(r for r in current.layout.replicas if set(r.ranks) <= set(survivors))
        return _plan(current.version + 1, Layout(whole))


def _plan(version: int, layout: Layout) -> Plan:
    return Plan(version=version, layout=layout, quotas=even_quotas(MICROBATCHES, layout.dp))


def _await_next(trainer: Trainer, plans: int) -> None:
    """Hold a step until the next generation is ready, as long as there is one to come."""
    deadline = time.monotonic() + 20
    while trainer.plan.version < plans and not trainer.is_prepared:
        if time.monotonic() > deadline:
            return
        trainer.poll_proposal()
        time.sleep(0.005)
