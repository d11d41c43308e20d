"""Verdicts on links and groups: suspicion, name, recovery; devices keep theirs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from detector import Detector, DetectorSettings
from resihp.contracts import Job, Layout, Op, Status, TelemetryBatch
from resihp.testing.scenarios import Fault, SlowGroup, SlowLink, collectives, steps_of, transfers

LENGTHS = np.clip(np.exp(np.random.default_rng(0).normal(6.5, 1.2, 3000)), 16, 8192).astype(int)
SETTINGS = DetectorSettings(train=False)


def job_of(dp: int, pp: int, tp: int) -> Job:
    layout = Layout.grid(dp=dp, pp=pp, tp=tp, layers=16)
    return Job(name="job", layout=layout, microbatches=4 * dp, tokens_per_microbatch=8192)


def steps(job: Job, slow: SlowLink | None, count: int, **given: object) -> Iterator[TelemetryBatch]:
    for batch in steps_of(job, LENGTHS, steps=count, seed=4, **given):  # type: ignore[arg-type]
        sent = transfers(job, batch, seed=4, slow=slow, clock_spread_ms=1e5)
        yield TelemetryBatch.concat([batch, sent])


@pytest.mark.parametrize("dp", [1, 4])
def test_a_link_is_named_and_recovers(dp: int) -> None:
    """With three links of its kind and more by these, else by its own past."""
    job = job_of(dp, 3, 1)
    ends = job.layout.replicas[-1].stages[1].ranks[0], job.layout.replicas[-1].stages[2].ranks[0]
    slow = SlowLink(ranks=ends, factor=2.0, from_step=12, until_step=22)
    detector, status = Detector(job, settings=SETTINGS), []
    for batch in steps(job, slow, 32):
        detector.update(batch)
        found = detector.links()
        counts = detector.link_counts()
        assert counts.get(Status.HEALTHY, 0) == 2 * dp - len(found)
        status.append(found[0].status if found else Status.HEALTHY)
        for link in found:
            assert link.ends == ends
            if link.status is Status.FAIL_SLOW:
                assert link.since_step == 12
                assert link.slowdown == pytest.approx(2.0, rel=0.15)
                assert link.confidence > 0.98 or len(status) > 22
    slow_steps = [step for step, one in enumerate(status) if one is Status.FAIL_SLOW]
    assert slow_steps == list(range(slow_steps[0], slow_steps[-1] + 1))
    assert slow_steps[0] - 12 <= 4
    assert 21 <= slow_steps[-1] <= 25
    assert {v.status for v in detector.verdicts()} == {Status.HEALTHY}


def test_verdicts_on_links_survive_a_restore_at_any_step() -> None:
    job = job_of(2, 2, 1)
    slow = SlowLink(ranks=(0, 2), factor=2.0, from_step=6)
    whole, others, seen = Detector(job, settings=SETTINGS), [], set()
    for batch in steps(job, slow, 16):
        others.append(Detector.restore(job, whole.save(), settings=SETTINGS))
        whole.update(batch)
        for other in others:
            other.update(batch)
            assert other.links() == whole.links()
            assert other.link_counts() == whole.link_counts()
        seen.update(link.status for link in whole.links())
        others = others[::3]
    assert Status.FAIL_SLOW in seen


@pytest.mark.parametrize("within_step", [False, True])
def test_a_group_recovers(within_step: bool) -> None:
    job = job_of(4, 2, 2)
    group = job.layout.replicas[1].stages[0].ranks
    if within_step:
        group = tuple(sorted(r.stages[1].ranks[0] for r in job.layout.replicas))
    detector, named = Detector(job, settings=SETTINGS), []
    slow = SlowGroup(ranks=group, factor=2.5, from_step=8, within_step=within_step)
    for batch in steps_of(job, LENGTHS, steps=26, seed=1, coupled=True):
        step = int(batch.step[0])
        sent = collectives(job, batch, seed=1, slow=slow if step < 18 else None)
        detector.update(TelemetryBatch.concat([batch, sent]))
        named.append({link.ends for link in detector.links() if link.status is Status.FAIL_SLOW})
    assert named[7] == named[-1] == set()
    assert named[17] == {group}


def test_records_of_transfers_change_no_verdict_on_a_device() -> None:
    job = job_of(3, 3, 1)
    faults = (Fault(rank=4, factor=1.2, from_step=10),)
    slow = SlowLink(ranks=(0, 3), factor=3.0, from_step=14)
    alone, joined = Detector(job, settings=SETTINGS), Detector(job, settings=SETTINGS)
    for batch in steps(job, slow, 20, faults=faults):
        alone.update(batch.select(batch.peer < 0))
        joined.update(batch)
        told = [[replace(v, evidence=()) for v in d.verdicts()] for d in (alone, joined)]
        assert told[0] == told[1]
    assert [link.ends for link in joined.links()] == [(0, 3)]
    assert joined.diagnosis().attribution.keys() == alone.diagnosis().attribution.keys()


@pytest.mark.parametrize("shape", [(3, 2, 1), (1, 4, 1), (1, 5, 1)])
def test_healthy_links_are_healthy_however_few_of_a_kind(shape: tuple[int, int, int]) -> None:
    job = job_of(*shape)
    detector = Detector(job, settings=SETTINGS)
    for batch in steps(job, None, 30):
        detector.update(batch)
    assert set(detector.link_counts()) == {Status.HEALTHY}


@pytest.mark.parametrize("ranks", [3, 4])
def test_three_hosts_that_load_data_alike_are_not_slow(ranks: int) -> None:
    """Of four, one of which loads none."""
    job = job_of(ranks, 1, 1)
    detector, rng = Detector(job, settings=SETTINGS), np.random.default_rng(0)
    for batch in steps_of(job, LENGTHS, steps=30, seed=4):
        data = TelemetryBatch(
            rank=np.arange(3),
            step=np.full(3, batch.step[0]),
            microbatch=np.full(3, -1),
            op=np.full(3, int(Op.DATA)),
            compute_ms=10.0 * np.exp(rng.normal(0.0, 0.05, 3)),
        )
        detector.update(TelemetryBatch.concat([batch, data]))
    assert all(verdict.evidence == () for verdict in detector.verdicts())


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_a_link_that_appears_late_changes_no_verdict_on_others(dp: int) -> None:
    job = job_of(dp, 3, 1)
    stages = job.layout.replicas[0].stages
    slow = SlowLink(ranks=(stages[0].ranks[0], stages[1].ranks[0]), factor=2.0, from_step=12)
    late = stages[1].ranks[0], stages[2].ranks[0]
    detector, named = Detector(job, settings=SETTINGS), dict[int, list[tuple[int, ...]]]()
    for batch in steps(job, slow, 26):
        step = int(batch.step[0])
        hidden = np.isin(batch.rank, late) & np.isin(batch.peer, late) & (step < 20)
        detector.update(batch.select(~hidden))
        named[step] = [v.ends for v in detector.links() if v.status is Status.FAIL_SLOW]
    assert {step for step, ends in named.items() if ends == [slow.ranks]} >= set(range(16, 26))
    assert detector.links()[0].since_step == 12
    restored = Detector.restore(job, detector.save(), settings=SETTINGS)
    assert restored.links() == detector.links()
    assert restored.link_counts() == detector.link_counts()


def test_transfers_with_ranks_outside_of_the_layout_tell_nothing() -> None:
    """As after a change of the layout, or where a record names its peer within a group."""
    job = job_of(2, 2, 1)
    detector = Detector(job, settings=SETTINGS)
    for batch in steps_of(job, LENGTHS, steps=4, seed=4):
        some = batch.select(batch.op == Op.FORWARD)
        sent = replace(some, op=np.full(len(some), Op.P2P), peer=np.full(len(some), 999))
        detector.update(TelemetryBatch.concat([batch, sent]))
    assert detector.links() == []
    assert detector.link_counts() == {}
    assert [v.step for v in detector.verdicts()] == [3] * 4
