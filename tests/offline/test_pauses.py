"""Pauses in single passes are the host's, and noise is nobody's."""

import numpy as np
import pytest

from detector.whatif import OpKind
from detector.whatif.effects import without_stalls
from resihp.contracts import Cause
from resihp.offline import analyze, read_trace
from resihp.testing.synthetic_traces import Recipe, Trouble, record, write_whatif


def paused(ops, seconds, share, seed=0):
    """Passes chosen at random take longer. Only durations change: starts say what waits for what,
    and the replay draws the consequences."""
    chosen = np.isin(ops.kind, (OpKind.FORWARD, OpKind.BACKWARD))
    chosen &= np.random.default_rng(seed).random(len(ops)) < share
    ops.duration_s[chosen] += seconds
    return ops


def analysis_of(ops, tmp_path):
    write_whatif(tmp_path / "trace.parquet", ops)
    return analyze(read_trace(tmp_path / "trace.parquet"))


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_pauses_at_random_ranks_are_the_hosts(pp, tmp_path):
    recipe = Recipe(dp=8, pp=pp, steps=24, work_spread=0.02)
    analysis = analysis_of(paused(record(recipe), 0.3, 0.01), tmp_path)
    assert analysis.diagnosis.root_cause is Cause.HOST
    assert "most is pauses within passes" in analysis.diagnosis.detail[0]
    assert not any(analysis.slow.values())


def test_pauses_cost_what_the_replay_without_them_saves(tmp_path):
    recipe = Recipe(dp=8, pp=4, steps=24, noise=0.0)
    with_them = analysis_of(paused(record(recipe), 0.3, 0.01), tmp_path)
    without = analysis_of(record(recipe), tmp_path)
    saved = with_them.whatif.no_delay_s.mean() - without.whatif.no_delay_s.mean()
    late = (with_them.costs.lost[Cause.HOST] - without.costs.lost[Cause.HOST]) / saved
    assert late == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("spread", [0.2, 0.5])
@pytest.mark.parametrize("pp", [1, 3])
def test_long_sequences_are_no_pauses(pp, spread, tmp_path):
    recipe = Recipe(dp=8, pp=pp, steps=24, work_spread=spread)
    analysis = analysis_of(record(recipe), tmp_path)
    assert analysis.diagnosis.root_cause is Cause.SEQUENCE_IMBALANCE
    assert analysis.diagnosis.attribution[Cause.HOST] < 0.02


@pytest.mark.parametrize("kinds", [(OpKind.FORWARD,), (OpKind.BACKWARD,)])
def test_a_device_that_is_slow_in_one_direction_makes_no_pauses(kinds, tmp_path):
    trouble = Trouble(kinds=kinds, replica=2, stage=1, factor=1.6, since=8)
    recipe = Recipe(dp=6, pp=3, steps=24, troubles=(trouble,))
    analysis = analysis_of(record(recipe, seed=2), tmp_path)
    assert analysis.diagnosis.root_cause is Cause.DEVICE
    assert analysis.diagnosis.attribution[Cause.HOST] < 0.1


@pytest.mark.parametrize("noise", [0.05, 0.1, 0.15])
def test_noise_is_no_slow_device(noise, tmp_path):
    analysis = analysis_of(record(Recipe(dp=8, pp=4, steps=20, noise=noise)), tmp_path)
    assert analysis.diagnosis.root_cause is not Cause.DEVICE
    assert analysis.costs.lost[Cause.DEVICE] < 0.005 * analysis.costs.step


def test_only_the_pass_that_was_held_up_is_mended():
    work = np.random.default_rng(0).uniform(0.5, 2.0, (4, 6, 5))
    times = np.stack([np.stack([work, 1.5 * work]), np.stack([2.0 * work, 0.1 + 3.0 * work])])
    held_up = times.copy()
    held_up[0, 1, 2, 3, 4] += 5.0
    held_up[1, 0, 0, 0, 0] = np.nan
    mended = without_stalls(held_up)
    assert np.isnan(mended[1, 0, 0, 0, 0])
    mended[1, 0, 0, 0, 0] = times[1, 0, 0, 0, 0]
    np.testing.assert_allclose(mended, times, rtol=1e-6)


def test_a_loss_that_no_cause_explains_is_told_by_operation_and_rank(tmp_path):
    trouble = Trouble(kinds=(OpKind.OPTIMIZER,), replica=1, stage=2, extra_s=0.4)
    analysis = analysis_of(record(Recipe(dp=4, pp=4, steps=10, troubles=(trouble,))), tmp_path)
    assert analysis.diagnosis.root_cause is Cause.NONE
    assert "of the loss goes with optimizer, most of it on rank 9" in analysis.diagnosis.detail[0]


def test_a_healthy_job_has_nothing_to_explain(tmp_path):
    detail = analysis_of(record(Recipe(dp=4, pp=4, steps=10)), tmp_path).diagnosis.detail
    assert detail[0] == "No cause costs enough of the step to be named."
