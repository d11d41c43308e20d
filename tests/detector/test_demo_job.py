"""The job of the demo: a small noisy machine, one rank that slows, a resize, a death."""

from dataclasses import replace

import numpy as np
import pytest

from detector import Detector
from resihp.contracts import Job, Layout, ModelShape, Plan, Replica, Stage, Status
from resihp.testing.scenarios import Fault, Noise, steps_of

LENGTHS = np.clip(np.exp(np.random.default_rng(0).normal(5.0, 1.0, 2000)), 16, 2048).astype(int)
NOISE = Noise(record=0.06, step=0.02, offset=0.02, outliers=0.03, outlier_size=0.6)
LAYOUT = Layout.grid(dp=2, pp=2, tp=2, layers=8, units=4)


def demo_job(layout: Layout = LAYOUT) -> Job:
    return Job(
        name="demo",
        layout=layout,
        microbatches=8,
        model=ModelShape(layers=8, hidden=256, heads=8, kv_heads=4, ffn=512, vocab=4096),
        tokens_per_microbatch=2048,
    )


def shrunk(rank: int) -> Layout:
    """The demo's layout with a quarter share for one rank, three quarters for its partner."""
    replicas = []
    for replica in LAYOUT.replicas:
        stages = []
        for stage in replica.stages:
            shares = tuple(1 if member == rank else 3 for member in stage.ranks)
            there = rank in stage.ranks
            stages.append(Stage(stage.ranks, stage.layers, shares if there else stage.shares))
        replicas.append(Replica(tuple(stages)))
    return Layout(tuple(replicas))


@pytest.mark.parametrize("rank", range(8))
def test_the_slowed_rank_and_no_other_is_named_within_six_steps(rank: int) -> None:
    onset = 8 + rank % 5
    detector = Detector(demo_job())
    named = {}
    fault = Fault(rank=rank, factor=1.5, from_step=onset)
    job = demo_job()
    for batch in steps_of(job, LENGTHS, steps=onset + 6, seed=rank, faults=[fault], noise=NOISE):
        for verdict in detector.update(batch):
            if verdict.status is Status.FAIL_SLOW:
                named.setdefault(verdict.rank, verdict)
    assert set(named) == {rank}
    assert 1.3 < detector.verdicts()[rank].slowdown < 1.7
    assert named[rank].since_step == pytest.approx(onset, abs=1)
    assert "longer than expected" in named[rank].evidence[0]


def test_a_name_outlives_a_resize_and_ends_when_the_device_recovers() -> None:
    bad = 5
    fault = Fault(rank=bad, factor=1.5, from_step=10, until_step=24)
    detector = Detector(demo_job())
    for batch in steps_of(demo_job(), LENGTHS, steps=16, seed=1, faults=[fault], noise=NOISE):
        detector.update(batch)
    plan = Plan(version=1, layout=shrunk(bad), quotas=(4, 4), from_step=16)
    detector.apply_plan(plan)
    job = replace(demo_job(), layout=plan.layout)
    held = []
    for batch in steps_of(
        job,
        LENGTHS,
        steps=16,
        seed=1,
        faults=[fault],
        noise=NOISE,
        first_step=16,
        plan_version=1,
    ):
        detector.update(batch)
        held.append({v.rank for v in detector.verdicts() if v.status is Status.FAIL_SLOW})
    assert all(names == {bad} for names in held[:8])
    assert held[-1] == set()


def test_a_reported_death_is_a_fail_stop_that_records_do_not_undo() -> None:
    detector = Detector(demo_job())
    batches = list(steps_of(demo_job(), LENGTHS, steps=8, seed=2, noise=NOISE))
    for batch in batches[:4]:
        detector.update(batch)
    (verdict,) = detector.report_failure([3], step=4, detail="rank 2 lost its connection to it")
    assert (verdict.rank, verdict.status, verdict.since_step) == (3, Status.FAIL_STOP, 4)
    assert detector.report_failure([3], step=5) == []
    for batch in batches[4:]:
        detector.update(batch)
    assert detector.verdicts()[3].status is Status.FAIL_STOP
