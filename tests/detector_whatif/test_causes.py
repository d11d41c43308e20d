"""Every cause is found in made-up jobs that suffer from it, and no other one is blamed."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detector.diagnosis import CAUSES, Costs, conclude, diagnose
from detector.whatif import Causes, OpGrid, OpKind, SlowDevice, WhatIf
from detector.whatif.operations import P2P
from resihp.contracts import Cause
from resihp.offline import analyze, read_trace
from resihp.testing.synthetic_traces import Recipe, Trouble, record, write_whatif

COLLECTIVES = (OpKind.GRADS_SCATTER, OpKind.PARAMS_GATHER)
NAMED = SlowDevice(rank=0, dp=0, pp=0, factor=1.02)
SLOW = Trouble(replica=1, stage=2, factor=1.3)
JOBS = {
    "clean": (Recipe(), Cause.NONE),
    "clean, noisy": (Recipe(dp=16, noise=0.03, steps=8), Cause.NONE),
    "clean, no pipeline": (Recipe(pp=1), Cause.NONE),
    "clean, one replica": (Recipe(dp=1), Cause.NONE),
    "slow device": (Recipe(troubles=(SLOW,)), Cause.DEVICE),
    "slow device, later": (
        Recipe(troubles=(dataclasses.replace(SLOW, since=8),)),
        Cause.DEVICE,
    ),
    "slow device, now and then": (
        Recipe(troubles=(dataclasses.replace(SLOW, factor=1.5, every=3),)),
        Cause.DEVICE,
    ),
    "slow device of two": (Recipe(dp=2, troubles=(SLOW,)), Cause.DEVICE),
    "slow device, no pipeline": (
        Recipe(dp=8, pp=1, troubles=(Trouble(replica=3, factor=1.3, since=6),)),
        Cause.NONE,  # without lengths it may have more work as well
    ),
    "slow device among long sequences": (
        Recipe(dp=8, pp=2, work_spread=0.1, troubles=(Trouble(replica=3, stage=0, factor=1.5),)),
        Cause.DEVICE,
    ),
    "sequences": (Recipe(dp=8, work_spread=0.2), Cause.SEQUENCE_IMBALANCE),
    "sequences, no pipeline": (Recipe(dp=8, pp=1, work_spread=0.2), Cause.SEQUENCE_IMBALANCE),
    "last stage": (Recipe(stage_weight=(1, 1, 1, 1.4)), Cause.STAGE_IMBALANCE),
    "slow device, interleaved": (Recipe(chunks=2, troubles=(SLOW,)), Cause.DEVICE),
    "last stage, interleaved": (
        Recipe(chunks=2, stage_weight=(1, 1, 1, 1.4)),
        Cause.STAGE_IMBALANCE,
    ),
    "second of two stages": (Recipe(pp=2, stage_weight=(1, 1.4)), Cause.STAGE_IMBALANCE),
    "slow link": (
        Recipe(troubles=(Trouble(kinds=P2P, replica=1, stage=2, factor=100, since=4),)),
        Cause.COMMUNICATION,
    ),
    "slow links everywhere": (
        Recipe(troubles=(Trouble(kinds=P2P, factor=60),)),
        Cause.COMMUNICATION,
    ),
    "one rank's slow collective": (
        Recipe(troubles=(Trouble(kinds=COLLECTIVES, replica=2, factor=15),)),
        Cause.COMMUNICATION,
    ),
    "slow collectives later": (
        Recipe(troubles=(Trouble(kinds=COLLECTIVES, factor=15, since=5),)),
        Cause.COMMUNICATION,
    ),
    "garbage collection": (
        Recipe(troubles=(Trouble(kinds=(OpKind.GC,), replica=2, stage=1, extra_s=0.4, every=4),)),
        Cause.HOST,
    ),
    "garbage collection everywhere": (
        Recipe(troubles=(Trouble(kinds=(OpKind.GC,), extra_s=0.2),)),
        Cause.HOST,
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_the_cause_is_named_from_operations_and_from_records_alone(name, tmp_path):
    recipe, cause = JOBS[name]
    path = tmp_path / "trace.parquet"
    write_whatif(path, record(recipe, seed=3))
    trace = read_trace(path)
    for diagnosis in (
        analyze(trace).diagnosis,
        diagnose(trace.job, trace.job.layout, trace.batches()),
    ):
        assert diagnosis.root_cause is cause
        assert set(diagnosis.attribution) == set(CAUSES)
        assert min(diagnosis.attribution.values()) >= 0.0
        assert sum(diagnosis.attribution.values()) == pytest.approx(1.0)
        if cause is not Cause.NONE:
            assert diagnosis.attribution[cause] > 0.6
            assert diagnosis.detail


@settings(deadline=None, max_examples=20)
@given(
    st.builds(
        Recipe,
        dp=st.integers(1, 3),
        pp=st.integers(1, 4),
        microbatches=st.integers(1, 6),
        steps=st.integers(1, 3),
        chunks=st.integers(1, 3),
        work_spread=st.floats(0.0, 0.3),
    ).filter(lambda recipe: recipe.pp > 1 or recipe.chunks == 1),
    st.integers(0, 2**16),
)
def test_dependencies_read_off_a_recording_give_back_its_steps(recipe, seed):
    whatif = WhatIf.of(OpGrid.of(record(recipe, seed)))
    np.testing.assert_allclose(whatif.no_delay_s, whatif.recorded_s, rtol=1e-9)
    assert whatif.launch_slowdown == pytest.approx(1.0)


def test_scaling_all_times_changes_no_share():
    ops = record(Recipe(dp=3, work_spread=0.1, troubles=(SLOW,)), seed=1)
    twice = dataclasses.replace(ops, start_s=2 * ops.start_s, duration_s=2 * ops.duration_s)
    one, two = (Causes(WhatIf.of(OpGrid.of(table))) for table in (ops, twice))
    assert two.whatif.slowdown == pytest.approx(one.whatif.slowdown)
    for cause, seconds in one.lost_s.items():
        assert two.lost_s[cause] == pytest.approx(2 * seconds, abs=1e-9)


def test_a_heavy_last_stage_shows_in_m_s_and_a_slow_device_in_m_w():
    heavy = WhatIf.of(OpGrid.of(record(Recipe(stage_weight=(1, 1, 1, 1.5)))))
    assert heavy.m_s == pytest.approx(1.0, abs=0.35)
    assert heavy.by_worker[:, 3].min() > heavy.by_worker[:, :3].max()
    slow = WhatIf.of(OpGrid.of(record(Recipe(troubles=(SLOW,)))))
    assert slow.m_w == pytest.approx(1.0, abs=0.1)
    assert np.unravel_index(slow.by_worker.argmax(), (4, 4)) == (1, 2)


def test_a_job_that_loses_nothing_has_no_m_w():
    whatif = WhatIf.of(OpGrid.of(record(Recipe(noise=0.0))))
    assert whatif.slowdown == pytest.approx(1.0)
    assert whatif.m_w is None
    assert whatif.m_s is None


def test_steps_in_which_a_rank_is_missing_are_replayed_with_what_is_usual_for_it():
    ops = record(Recipe(dp=3, steps=6))
    gone = (ops.rank == 4) & (ops.step == 2)
    whatif = WhatIf.of(OpGrid.of(ops.select(~gone)))
    whole = WhatIf.of(OpGrid.of(ops))
    assert whatif.slowdown == pytest.approx(whole.slowdown, rel=0.01)


def test_nothing_recorded_is_no_diagnosis():
    from resihp.contracts import Job, Layout, TelemetryBatch

    job = Job(name="j", layout=Layout.grid(dp=1, pp=1, tp=1, layers=1), microbatches=1)
    diagnosis = diagnose(job, job.layout, [TelemetryBatch.empty()])
    assert diagnosis.root_cause is Cause.NONE
    assert diagnosis.steps == 0
    assert sum(diagnosis.attribution.values()) == 0.0


def test_costs_below_notice_name_no_cause():
    from detector.diagnosis import Costs

    costs = Costs(step=100.0, ideal=99.0, lost={Cause.DEVICE: 1.0}, steps=3)
    assert conclude(costs).root_cause is Cause.NONE
    assert conclude(costs, slow=[NAMED]).root_cause is Cause.DEVICE
    assert conclude(dataclasses.replace(costs, lost={Cause.DEVICE: 3.0})).root_cause is Cause.DEVICE


def test_slow_devices_are_no_cause_where_records_do_not_tell_them_from_work() -> None:
    costs = Costs(
        step=100.0, ideal=70.0, lost={Cause.DEVICE: 30.0}, steps=4, separates_devices=False
    )
    diagnosis = conclude(costs)
    assert diagnosis.root_cause is Cause.NONE
    assert "cannot be told" in diagnosis.detail[-1]
    assert conclude(costs, slow=[NAMED]).root_cause is Cause.DEVICE


def test_slowdown_is_at_least_what_the_dearest_cause_costs() -> None:
    costs = Costs(step=100.0, ideal=105.0, lost={Cause.DEVICE: 20.0, Cause.HOST: 1.0}, steps=3)
    assert costs.slowdown == pytest.approx(1.25)
    assert Costs(step=100.0, ideal=50.0, lost={Cause.DEVICE: 20.0}, steps=3).slowdown == 2.0


@pytest.mark.parametrize("ideal", [80.1, 99.9, 100.0, 100.1])
def test_a_little_noise_in_the_ideal_changes_the_slowdown_by_little(ideal) -> None:
    costs = Costs(step=100.0, ideal=ideal, lost={Cause.COMMUNICATION: 20.0}, steps=3)
    assert costs.slowdown == pytest.approx(1.25)


def test_a_heavy_stage_is_in_the_ideal_as_published() -> None:
    costs = Costs(step=100.0, ideal=85.0, lost={Cause.STAGE_IMBALANCE: 24.0}, steps=3)
    assert costs.slowdown == pytest.approx(100.0 / 85.0)
