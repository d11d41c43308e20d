"""A live change of layout in four processes, measured on each rank."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from resihp.contracts import Layout, ModelShape, Plan, Replica, Stage, even_quotas
from resihp.elastic.models import Llama, Packed
from resihp.elastic.optim import Optimizer
from resihp.elastic.process_groups.transport import ProcessGroupTransport, Transfer
from resihp.elastic.rendezvous.membership import Rendezvous
from resihp.elastic.rendezvous.store import Timeouts, connect
from resihp.elastic.reshard import build
from resihp.elastic.reshard.buffers import ReshardBudget
from resihp.elastic.reshard.gradient_transfer import GradientTransfer
from resihp.elastic.reshard.spreading import CopyPace
from resihp.elastic.reshard.transfer import StateTransfer
from resihp.elastic.state.events import Callbacks, LayoutChange
from resihp.elastic.state.phases import Phase
from resihp.elastic.step import ReducedStep, Setup
from resihp.elastic.step.pacing import Pacer
from resihp.elastic.trainer import Trainer
from resihp.testing.local_ranks import LocalRanks

LONGEST = ("pause_ms", "prepare_ms", "extra_bytes", "spilled_bytes")
TOTAL = ("received_bytes", "gradient_bytes")
LIMIT = ReshardBudget()
SWITCHES_BEFORE = 6
TOKENS, MICROBATCHES, STEPS_AFTER, LAYERS, UNITS = 128, 4, 4, 8, 8
MOST_STEPS = 16
"""Over which a copy through a slow link is spread."""
SHAPES = {
    "30M": ModelShape(layers=LAYERS, hidden=512, heads=8, kv_heads=8, ffn=1536, vocab=4096),
    "100M": ModelShape(layers=LAYERS, hidden=1024, heads=8, kv_heads=8, ffn=2688, vocab=4096),
    "350M": ModelShape(layers=LAYERS, hidden=1856, heads=8, kv_heads=8, ffn=5120, vocab=4096),
}
OPTIMIZER = Optimizer(torch.optim.AdamW, foreach=True)
ALONE = Stage((0,), (0, LAYERS), (UNITS,))
GRID = Layout.grid(dp=1, pp=2, tp=2, layers=LAYERS, units=UNITS)
TWO = Layout.grid(dp=2, pp=1, tp=2, layers=LAYERS, units=UNITS)
THREE = Layout((Replica((Stage((0, 1), (0, 4), (4, 4)), Stage((2,), (4, 8), (UNITS,)))),))


@dataclass(frozen=True)
class Change:
    """One change of layout; `quotas` of the new one."""

    name: str
    old: Layout
    new: Layout
    quotas: tuple[int, ...] = ()

    def side(self, number: int) -> tuple[Layout, tuple[int, ...]]:
        """Layout and quotas after so many changes, there and back."""
        return (self.new, self.quotas) if number % 2 else (self.old, ())


CHANGES = (
    Change(
        "TP2 x PP2 -> TP1, layers 5 + 3",
        GRID,
        Layout((Replica((Stage((0,), (0, 5), (UNITS,)), Stage((2,), (5, 8), (UNITS,)))),)),
    ),
    Change(
        "DP2 -> DP1, shares 5 + 3",
        TWO,
        Layout((Replica((Stage((0, 1), (0, LAYERS), (5, 3)),)),)),
    ),
    Change("4 -> 3 ranks", GRID, THREE),
    Change("3 -> 4 ranks", THREE, GRID),
    Change("quotas only", TWO, TWO, (3, 1)),
)


@dataclass(frozen=True)
class Way:
    """Conditions of a change.

    attach        ranks read each other's memory; else they exchange through sockets, as those of
                  several hosts do
    device        on "cuda" all of them are on the first device
    warmed        a rank that was idle runs a pass before its first step
    link_mbs      MB/s at which a rank takes what comes through a socket; None: as fast as it can
    at_once       the copy is not spread over several steps
    flops_per_ms  of the emulated devices that make the passes; None: the cores alone make them
    """

    attach: bool = True
    device: str = "cpu"
    warmed: bool = True
    link_mbs: float | None = None
    at_once: bool = False
    flops_per_ms: float | None = None

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Have this process take it."""
        with ExitStack() as stack:
            if not self.warmed:
                stack.enter_context(mock.patch.object(build, "warm_up_stage"))
            if self.link_mbs is not None:
                paced = partialmethod(_paced, ProcessGroupTransport._finish, self.link_mbs * 1e6)
                stack.enter_context(mock.patch.object(ProcessGroupTransport, "_finish", paced))
            if self.at_once:
                stack.enter_context(mock.patch.object(CopyPace, "agree", return_value=1))
            yield


@dataclass
class CoreSpeed(Pacer):
    """Measures how fast the cores make the passes, and holds nobody."""

    flops_per_ms: float = 0.0
    ms: float = 0.0
    flops: float = 0.0

    def hold(self, flops: float, step: int, spent_s: float) -> float:
        """Return the time that was spent."""
        if step > 0:  # the first one allocates memory
            self.flops += flops
            self.ms += spent_s * 1e3
            self.flops_per_ms = self.flops / self.ms
        return spent_s


def _paced(transport: ProcessGroupTransport, finish: Any, per_s: float, works: Any) -> Transfer:
    """A transfer that takes its time; the thread that waits for it sleeps."""
    start, received = time.perf_counter(), 0
    for nbytes in finish(transport, works):
        received += nbytes
        time.sleep(max(0.0, start + received / per_s - time.perf_counter()))
        yield nbytes


def live(shape: ModelShape, change: Change, way: Way) -> dict[str, float]:
    """Cost of one change: longest pause and build of a rank, bytes, duration of steps."""
    switches, told = _told(shape, change, 1, way)
    most = {key: max(seen[key] for seen in switches) for key in (*LONGEST, "copy_steps")}
    total = {key: sum(seen[key] for seen in switches) for key in TOTAL}
    extra, first = max(one["extra_bytes"] for one in told), round(switches[0]["step"])
    times = _step_times([one["steps"] for one in told], first)
    newcomers = [one["processor_ms"] for one in told if one["steps"][0][0] == first]
    beyond = max((ms[0] - statistics.median(ms[1:]) for ms in newcomers), default=0.0)
    return {**most, **total, "measured_bytes": extra, **times, "first_beyond_ms": beyond}


def through_link(shape: ModelShape, change: Change, way: Way) -> dict[str, float]:
    """Cost of one change through slow links: the longest pause, the steps of the copy, and the
    milliseconds of a usual step and of the longest one beside the copy."""
    switches, told = _told(shape, change, 1, way)
    ms, begun = _longest([one["steps"] for one in told]), SWITCHES_BEFORE - 1
    steps = max(seen["copy_steps"] for seen in switches)
    return {
        "pause": max(seen["pause_ms"] for seen in switches),
        "steps": steps,
        "received": max(seen["received_bytes"] for seen in switches),
        "usual": statistics.median(ms[step] for step in range(1, begun)),
        "beside": max(ms[step] for step in range(begun, begun + round(steps))),
    }


def copying_steps(
    shape: ModelShape, change: Change, changes: int, flops_per_ms: float | None = None
) -> tuple[list[dict[str, float]], float]:
    """Milliseconds of steps of one job that changes its layout so many times, to the new one and
    back: for each change the `copying` step, one of the usual steps of that layout (`another`), and
    the mean of two others (`usual`), each until its gradients are summed, as the update behind the
    copy is that of the new layout; and the processor time of copy and gradients, on all ranks.
    And what the slowest rank computes in a millisecond.

    flops_per_ms  of an emulated device; None: the cores alone
    """
    _, told = _told(shape, change, changes, Way(flops_per_ms=flops_per_ms))
    ms = _longest([one["summed"] for one in told])
    copies, gradients = (
        [sum(of_ranks) for of_ranks in zip(*(one[key] for one in told), strict=True)]
        for key in ("copy_ms", "gradient_ms")
    )
    steps = [
        {**_copying_step(ms, SWITCHES_BEFORE * number), "copy": copy, "gradients": moved}
        for number, (copy, moved) in enumerate(zip(copies, gradients, strict=True), 1)
    ]
    return steps, min(one["flops_per_ms"] for one in told)


def _copying_step(ms: dict[int, float], first: int) -> dict[str, float]:
    # The first one of the layout comes before them. In the one before the copy ranks wait for each
    # other, as they are held until the next layout is built.
    *usual, another, _, copying = (ms[step] for step in range(first - SWITCHES_BEFORE + 1, first))
    return {"usual": statistics.mean(usual), "another": another, "copying": copying}


def _told(
    shape: ModelShape,
    change: Change,
    changes: int,
    way: Way,
) -> tuple[list[dict[str, float]], list[dict[str, Any]]]:
    """Run the four ranks; what each tells of the last change, and of all steps."""
    folder = Path(tempfile.mkdtemp(prefix="resihp-resize-"))
    try:
        with LocalRanks("resize", folder) as ranks:
            ranks.start(range(4), run_rank, shape, change, changes, way, folder)
            codes = ranks.wait(600 + 60 * changes)
            assert set(codes.values()) == {0}, ranks.logs()
        switches = [json.loads(path.read_text()) for path in folder.glob("switch-*.json")]
        told = [json.loads(path.read_text()) for path in folder.glob("steps-*.json")]
    finally:
        shutil.rmtree(folder)
    assert len(switches) == 4, "every rank reports the change"
    return switches, told


def _longest(told: list[list[list[float]]]) -> dict[int, float]:
    """Milliseconds of each step, by its slowest rank. A pause lies at the end of the copying step
    and is not part of its time here."""
    longest: dict[int, float] = {}
    for step, ms in (pair for steps in told for pair in steps):
        longest[round(step)] = max(longest.get(round(step), 0.0), ms)
    return longest


def _step_times(told: list[list[list[float]]], first: int) -> dict[str, float]:
    """Milliseconds of the usual steps before and after the change, and of those next to it."""
    longest = _longest(told)
    return {
        "old": statistics.median(ms for step, ms in longest.items() if 0 < step < first - 1),
        "copying": longest[first - 1],
        "first": longest[first],
        "new": statistics.median(ms for step, ms in longest.items() if step > first),
    }


def run_rank(
    rank: int,
    host: str,
    port: int,
    shape: ModelShape,
    change: Change,
    changes: int,
    way: Way,
    folder: Path,
) -> None:
    """One rank: a few steps in the old layout, the change, a few in the new one; and so on, there
    and back, up to that many changes."""
    torch.set_num_threads(1)
    os.environ["NCCL_HOSTID"] = f"rank{rank}"  # else it refuses ranks that share a device
    timeouts = Timeouts(heartbeat=timedelta(seconds=20), connect=timedelta(seconds=120))
    steps, summed = list[tuple[int, float]](), list[tuple[int, float]]()
    processor_ms, copy_ms, gradient_ms = list[float](), list[float](), list[float]()
    begun = paused_ms = 0.0
    started: float | None = None
    watch = MemoryWatch()
    pacer = CoreSpeed() if way.flops_per_ms is None else Pacer(way.flops_per_ms)

    def timed(work: Any, told: list[float], *arguments: Any) -> None:
        start = time.thread_time()
        work(*arguments)
        told.append((time.thread_time() - start) * 1e3)

    def copy_state(transfer: StateTransfer, copy: Any = StateTransfer._copy_segment) -> None:
        timed(copy, copy_ms, transfer)

    def move_gradients(
        moving: GradientTransfer, over: Any, run: Any = GradientTransfer.run
    ) -> None:
        timed(run, gradient_ms, moving, over)

    def on_phase(phase: Phase, completed: int) -> None:
        nonlocal begun, started
        if phase is Phase.ACCUMULATING:
            begun, started = time.process_time(), time.perf_counter()
        elif phase in (Phase.UPDATING, Phase.STREAMING) and started is not None:
            summed.append((completed, (time.perf_counter() - started) * 1e3))
            started = None

    def on_layout_change(seen_change: LayoutChange) -> None:
        nonlocal paused_ms
        paused_ms = seen_change.pause_ms
        names = ("step", "copy_steps", *LONGEST, *TOTAL)
        seen = {name: getattr(seen_change, name) for name in names}
        (folder / f"switch-{rank}.json").write_text(json.dumps(seen))

    def on_step(reduced: ReducedStep, ms: float, plan: Plan) -> None:
        nonlocal paused_ms
        steps.append((reduced.step, ms - paused_ms))
        processor_ms.append((time.process_time() - begun) * 1e3)
        paused_ms = 0.0
        watch.phase = {2: "switch", SWITCHES_BEFORE + 1: "after"}.get(reduced.step, watch.phase)
        if reduced.step < SWITCHES_BEFORE * changes:
            _await_switch(trainer)

    trainer = Trainer(
        Setup(Llama(shape), OPTIMIZER, batch, pacer=pacer, device=first_device(way.device)),
        _plan(0, *change.side(0)),
        Rendezvous(lambda: connect(host, port, "resize", timeouts), rank, range(4), timeouts),
        Plans(
            [_plan(number, *change.side(number)) for number in range(1, changes + 1)],
            lambda version: trainer.completed > SWITCHES_BEFORE * version - 3,
        ),
        callbacks=Callbacks(on_phase=on_phase, on_layout_change=on_layout_change, on_step=on_step),
        memory=replace(LIMIT, attach=way.attach),
    )
    watch.start()
    more = MOST_STEPS if way.link_mbs is not None else 0
    with (
        way.taken(),
        mock.patch.object(StateTransfer, "_copy_segment", copy_state),
        mock.patch.object(GradientTransfer, "run", move_gradients),
    ):
        trainer.run(SWITCHES_BEFORE * changes + STEPS_AFTER + more)
    told = {
        "steps": steps,
        "summed": summed,
        "processor_ms": processor_ms,
        "copy_ms": copy_ms,
        "gradient_ms": gradient_ms,
        "extra_bytes": watch.stop(),
        "flops_per_ms": pacer.flops_per_ms,
    }
    (folder / f"steps-{rank}.json").write_text(json.dumps(told))


class MemoryWatch:
    """Samples the anonymous memory of this process while a rank trains."""

    def __init__(self) -> None:
        self.phase = "before"
        self._most = {"before": 0, "switch": 0, "after": 0}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="memory", daemon=True)

    def start(self) -> None:
        """Start to sample."""
        self._thread.start()

    def stop(self) -> int:
        """Bytes by which the peak during the change exceeds those before and after it."""
        self._over.set()
        self._thread.join()
        return max(0, self._most["switch"] - max(self._most["before"], self._most["after"]))

    def _sample(self) -> None:
        while not self._over.wait(0.01):
            lines = Path("/proc/self/status").read_text().splitlines()
            held = next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
            self._most[self.phase] = max(self._most[self.phase], held << 10)


class Plans:
    """Plan source with plans of versions from 1 on, each of which may be due or not yet."""

    def __init__(self, plans: Sequence[Plan], is_due: Callable[[int], bool]) -> None:
        self._plans, self._is_due = plans, is_due

    def wait(self, after: int, seconds: float) -> Plan | None:
        """The plan behind the one of version `after`, until it is committed."""
        if after < len(self._plans) and self._is_due(after + 1):
            return self._plans[after]
        time.sleep(min(seconds, 0.05))
        return None

    def after_loss(self, current: Plan, survivors: object, step: int) -> Plan:
        """Nothing is lost here."""
        raise AssertionError("no rank dies in this benchmark")

    def joined(self, current: Plan, joiners: object, step: int) -> Plan | None:
        """Nobody joins."""
        return None

    def applied(self, plan: Plan, rank: int, step: int, pause_ms: float) -> None:
        """Nothing to tell."""

    def refused(self, plan: Plan, rank: int, why: str) -> None:
        """Nothing is refused here."""
        raise AssertionError(why)


def batch(step: int, index: int) -> Packed:
    """Random tokens."""
    chosen = torch.Generator().manual_seed(100 * step + index)
    ids = torch.randint(0, 4096, (TOKENS + 1,), generator=chosen)
    return Packed(ids[:-1], ids[1:], (TOKENS,))


def first_device(kind: str) -> torch.device:
    """The first device of a kind; that of CUDA with its index, which process groups need."""
    return torch.device(kind, 0) if kind == "cuda" else torch.device(kind)


def _plan(version: int, layout: Layout, quotas: tuple[int, ...] = ()) -> Plan:
    quotas = quotas or even_quotas(MICROBATCHES, layout.dp)
    return Plan(version=version, layout=layout, quotas=quotas, from_step=SWITCHES_BEFORE * version)


def _await_switch(trainer: Trainer) -> None:
    """Hold two steps before a change until the next generation is ready, so that every run changes
    there."""
    deadline, held = time.monotonic() + 60, SWITCHES_BEFORE - 2
    while trainer.completed % SWITCHES_BEFORE == held and not trainer.is_prepared:
        if time.monotonic() > deadline:
            break
        trainer.poll_proposal()
        time.sleep(0.01)
