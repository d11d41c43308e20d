"""The engine's transfers between stages: both ends stamp them, and a slow link is named by them."""

from __future__ import annotations

import time
from dataclasses import dataclass
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
SLOW, BUSY = 4.0, 2.0
"""Slow-down of what is slow, and what a busy machine does not add to a pass or a transfer."""
ONSET, STEPS = 10, 22
SQUARE = Layout.grid(dp=2, pp=2, tp=1, layers=4)


@dataclass
class FixedPace(Pacer):
    """Every pass takes as long, and longer on a slow device from a step on."""

    slow: bool = False

    def hold(self, flops: float, step: int, spent_s: float) -> None:
        due_s = PASS_S * (SLOW if self.slow and step >= ONSET else 1.0)
        time.sleep(max(due_s - spent_s, 0.0))


def records_of(plan: Plan, steps: int, *, paced: bool = False, slow: int = -1) -> TelemetryBatch:
    """All records of a job whose ranks are threads; devices have a pace of their own if `paced`."""
    model = Llama(SHAPE)

    def run_rank(factory: ProcessGroupFactory) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []

        def record(**fields: Any) -> None:
            rows.append({"rank": factory.rank, **fields})

        pacer = FixedPace(1.0, slow=factory.rank == slow) if paced else None
        setup = Setup(model, OPTIMIZER, batch, record, pacer, record_transfer=record)
        groups = build_layout_groups(factory, plan.layout, model.parameters, name="generation")
        shard = initial_shard(setup.model, setup.optimizer, groups)
        engine = Engine(setup, groups, shard, plan, factory.waited)
        for step in range(steps):
            engine.accumulate(step)
            engine.update(engine.reduce(step, 0).norm, step)
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


def paced_links(monkeypatch: pytest.MonkeyPatch, slow: frozenset[int]) -> None:
    """Links between stages take their time, `slow` longer from a step on."""
    broadcast = AbortableProcessGroup.broadcast
    received: dict[int, int] = {}
    per_step = MICROBATCHES // SQUARE.dp

    def hold(group: AbortableProcessGroup, tensor: Any, source: int) -> Any:
        result = broadcast(group, tensor, source)
        number = received[group.rank] = received.get(group.rank, -1) + 1
        is_slow = frozenset(group.ranks) == slow and number >= ONSET * per_step
        with group._factory.waited.blocked():
            time.sleep(TRANSFER_S * (SLOW if is_slow else 1.0))
        return result

    monkeypatch.setattr(AbortableProcessGroup, "broadcast", hold)


def judged(found: TelemetryBatch) -> Detector:
    job = Job(name="job", layout=SQUARE, microbatches=MICROBATCHES)
    detector = Detector(job, settings=DetectorSettings(train=False))
    for step in range(STEPS):
        detector.update(found.select(found.step == step))
    return detector


def slow_devices(detector: Detector) -> set[int]:
    """Ranks named for more than a busy machine adds to a pass."""
    verdicts = detector.verdicts()
    return {v.rank for v in verdicts if v.status is Status.FAIL_SLOW and v.slowdown > BUSY}


def slow_links(detector: Detector) -> list[LinkVerdict]:
    """Links between two ranks named for more than a busy machine adds to a transfer; the
    collectives of groups have no pace here."""
    found = [link for link in detector.links() if link.status is Status.FAIL_SLOW]
    return [link for link in found if link.peer >= 0 and link.slowdown > BUSY]


def test_a_slow_link_is_named_and_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = SQUARE.replicas[1].ranks
    paced_links(monkeypatch, frozenset(ends))
    plan = Plan(version=0, layout=SQUARE, quotas=(3, 3))
    detector = judged(records_of(plan, STEPS, paced=True))
    assert [link.ends for link in slow_links(detector)] == [ends], detector.links()
    assert slow_devices(detector) == set()


def test_a_slow_device_makes_no_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    paced_links(monkeypatch, frozenset())
    plan = Plan(version=0, layout=SQUARE, quotas=(3, 3))
    detector = judged(records_of(plan, STEPS, paced=True, slow=3))
    assert slow_links(detector) == [], detector.links()
    assert slow_devices(detector) == {3}
