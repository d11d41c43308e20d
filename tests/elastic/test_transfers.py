"""The engine's transfers between stages: both ends stamp them, and a slow link is named by them."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from detector import Detector, DetectorSettings
from detector.rank_table import RankTable
from detector.transfers import paired
from resihp.contracts import (
    COLUMNS,
    Job,
    Layout,
    LinkVerdict,
    Op,
    Plan,
    Schedule,
    Status,
    TelemetryBatch,
)
from resihp.elastic.models import Llama
from resihp.elastic.process_groups.abortable import AbortableProcessGroup, ProcessGroupFactory
from resihp.elastic.process_groups.layout_groups import build_layout_groups
from resihp.elastic.step import Engine, Setup
from resihp.elastic.step.pacing import Pacer
from resihp.elastic.step.shard import initial_shard
from tests.elastic.engine_job import GRID, MICROBATCHES, OPTIMIZER, SHAPE, UNEVEN, batch
from tests.elastic.threads import on_ranks

PASS_S, TRANSFER_S = 0.02, 0.02
SLOW = 4.0
"""Slow-down of what is slow."""
ONSET, STEPS = 10, 22
SQUARE = Layout.grid(dp=2, pp=2, tp=1, layers=4)


class RankClocks:
    """A made-up clock for each rank, which is a thread; in the place of the module `time`.

    Passes and transfers take their time, and all else takes none: how busy the machine is, and
    which rank has a core, changes no record.
    """

    sleep = staticmethod(time.sleep)

    def __init__(self) -> None:
        self._now: dict[int, float] = {}
        self._came: dict[int, list[float]] = defaultdict(list)

    def begin(self) -> None:
        """Give the calling thread a clock; those that earlier tests have left keep the real one."""
        self._now[threading.get_ident()] = 0.0

    def perf_counter(self) -> float:
        now = self._now.get(threading.get_ident())
        return time.perf_counter() if now is None else now

    def go_on(self, seconds: float, *, after_s: float = 0.0) -> None:
        """Let time pass on this rank, once the clock of another one shows `after_s`."""
        self._now[threading.get_ident()] = max(self.perf_counter(), after_s) + seconds

    def come(self, step: int) -> None:
        """Come to the sums of a step, before `meet`."""
        self._came[step].append(self.perf_counter())

    def meet(self, step: int) -> None:
        """Leave the sums of a step when the last rank has come to them, and all have."""
        self.go_on(0.0, after_s=max(self._came[step]))


@dataclass
class FixedPace(Pacer):
    """Every pass takes as long, and longer on a slow device from a step on."""

    clocks: RankClocks = field(default_factory=RankClocks)
    slow: bool = False

    def hold(self, flops: float, step: int, spent_s: float) -> float:
        due_s = PASS_S * (SLOW if self.slow and step >= ONSET else 1.0)
        self.clocks.go_on(due_s - spent_s)
        return due_s


def records_of(
    plan: Plan, steps: int, *, clocks: RankClocks | None = None, slow: int = -1
) -> TelemetryBatch:
    """All records of a job whose ranks are threads; devices have a pace by `clocks`."""
    model = Llama(SHAPE)

    def run_rank(factory: ProcessGroupFactory) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        if clocks:
            clocks.begin()

        def record(**fields: Any) -> None:
            rows.append({"rank": factory.rank, **fields})

        pacer = FixedPace(1.0, clocks=clocks, slow=factory.rank == slow) if clocks else None
        setup = Setup(model, OPTIMIZER, batch, record, pacer, record_transfer=record)
        groups = build_layout_groups(factory, plan.layout, model.parameters, name="generation")
        shard = initial_shard(setup.model, setup.optimizer, groups)
        engine = Engine(setup, groups, shard, plan, factory.waited)
        for step in range(steps):
            engine.accumulate(step)
            if clocks:
                clocks.come(step)
            norm = engine.reduce(step, 0).norm
            if clocks:
                clocks.meet(step)
            engine.update(norm, step)
        return rows

    found = on_ranks(plan.layout.ranks, run_rank)
    rows = [row for rank in sorted(found) for row in found[rank]]
    return TelemetryBatch(
        **{name: [row.get(name, default) for row in rows] for name, (_, default) in COLUMNS.items()}  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("layout", "schedule"),
    [
        (GRID, Schedule.ONE_F_ONE_B),
        (UNEVEN, Schedule.ZERO_BUBBLE),
        (Layout.grid(dp=1, pp=2, tp=1, layers=4, chunks=2), Schedule.INTERLEAVED),
    ],
)
def test_every_transfer_is_stamped_by_its_sender_and_its_receiver(
    layout: Layout, schedule: Schedule
) -> None:
    quotas = (MICROBATCHES - layout.dp + 1, *(1,) * (layout.dp - 1))
    found = records_of(Plan(version=0, layout=layout, quotas=quotas, schedule=schedule), 2)
    sent = found.select((found.op == Op.P2P) & (found.step == 1))
    places = RankTable.of(layout)
    own, peer = places.index(sent.rank), places.index(sent.peer)
    transfers = paired(sent, np.arange(len(sent)), own, peer)
    assert 2 * transfers.link.size == len(sent)
    assert (transfers.sends.sum(axis=0) == 1).all()
    chunks = layout.replicas[0].chunks
    assert np.unique(sent.chunk).tolist() == list(range(chunks))
    assert len(sent) >= 4 * (layout.pp * chunks - 1) * MICROBATCHES, "there and back, at both ends"
    both = transfers.ends.max(axis=0) >= transfers.starts.max(axis=0)
    assert both.all(), "one clock: nothing arrives before it was sent"


def paced_links(monkeypatch: pytest.MonkeyPatch, slow: frozenset[int]) -> RankClocks:
    """Clocks by which links between stages take their time, `slow` longer from a step on."""
    start, broadcast = AbortableProcessGroup.start_broadcast, AbortableProcessGroup.broadcast
    sent: dict[tuple[tuple[int, ...], int], list[float]] = defaultdict(list)
    received: Counter[tuple[tuple[int, ...], int]] = Counter()
    clocks, per_step = RankClocks(), MICROBATCHES // SQUARE.dp

    def send(group: AbortableProcessGroup, tensor: Any, source: int) -> Any:
        if group.rank == source:
            sent[group.ranks, source].append(clocks.perf_counter())
        return start(group, tensor, source)

    def receive(group: AbortableProcessGroup, tensor: Any, source: int) -> Any:
        result = broadcast(group, tensor, source)
        link = group.ranks, source
        is_slow = frozenset(group.ranks) == slow and received[link] >= ONSET * per_step
        with group._factory.waited.blocked():
            took_s = TRANSFER_S * (SLOW if is_slow else 1.0)
            clocks.go_on(took_s, after_s=sent[link][received[link]])
        received[link] += 1
        return result

    monkeypatch.setattr(AbortableProcessGroup, "start_broadcast", send)
    monkeypatch.setattr(AbortableProcessGroup, "broadcast", receive)
    for module in ("step.telemetry", "process_groups.abortable"):
        monkeypatch.setattr(f"resihp.elastic.{module}.time", clocks)
    return clocks


def judged(found: TelemetryBatch) -> Detector:
    job = Job(name="job", layout=SQUARE, microbatches=MICROBATCHES)
    detector = Detector(job, settings=DetectorSettings(train=False))
    for step in range(STEPS):
        detector.update(found.select(found.step == step))
    return detector


def slow_devices(detector: Detector) -> set[int]:
    return {v.rank for v in detector.verdicts() if v.status is Status.FAIL_SLOW}


def slow_links(detector: Detector) -> list[LinkVerdict]:
    return [link for link in detector.links() if link.status is Status.FAIL_SLOW]


def test_a_slow_link_is_named_and_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = SQUARE.replicas[1].ranks
    clocks = paced_links(monkeypatch, frozenset(ends))
    plan = Plan(version=0, layout=SQUARE, quotas=(3, 3))
    detector = judged(records_of(plan, STEPS, clocks=clocks))
    assert [link.ends for link in slow_links(detector)] == [ends], detector.links()
    assert slow_devices(detector) == set()


def test_a_slow_device_makes_no_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = paced_links(monkeypatch, frozenset())
    plan = Plan(version=0, layout=SQUARE, quotas=(3, 3))
    detector = judged(records_of(plan, STEPS, clocks=clocks, slow=3))
    assert slow_links(detector) == [], detector.links()
    assert slow_devices(detector) == {3}
