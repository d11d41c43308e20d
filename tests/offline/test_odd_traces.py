"""Recordings that lack something are analyzed as far as they go."""

import dataclasses

import numpy as np
import pytest

from detector.whatif import OpKind
from resihp.contracts import Cause, Status, TraceError
from resihp.offline import analyze, read_trace, write_perfetto
from resihp.offline.report import html
from resihp.offline.timeline import TraceTimeline
from resihp.testing.synthetic_traces import Recipe, Trouble, record, write_whatif

WHOLE = record(Recipe(dp=3, pp=3, microbatches=3, steps=4))
ODD = {
    "one step": record(Recipe(dp=2, pp=2, steps=1)),
    "one rank": record(Recipe(dp=1, pp=1, steps=3)),
    "compute only": WHOLE.select(WHOLE.kind <= 1),
    "forward only": WHOLE.select(WHOLE.kind == 1),
    "a stage was not recorded": WHOLE.select(WHOLE.stage != 1),
    "a replica was not recorded": WHOLE.select(WHOLE.dp != 0),
    "a replica came late": WHOLE.select((WHOLE.dp != 2) | (WHOLE.step >= 2)),
    "no time passed": dataclasses.replace(WHOLE, duration_s=np.zeros(len(WHOLE))),
    "wall clock": dataclasses.replace(WHOLE, start_s=WHOLE.start_s + 1.7e9),
    "out of order": WHOLE.select(np.random.default_rng(0).permutation(len(WHOLE))),
}


def analysis_of(ops, tmp_path):
    write_whatif(tmp_path / "odd.parquet", ops)
    return analyze(read_trace(tmp_path / "odd.parquet"))


@pytest.mark.parametrize("name", ODD)
def test_what_is_there_is_analyzed(name, tmp_path):
    analysis = analysis_of(ODD[name], tmp_path)
    document = analysis.to_json()
    assert document["root_cause"] == "none"
    assert document["slowdown"] == pytest.approx(1.0, abs=0.02)
    assert {device["verdict"] for device in document["devices"]} == {"healthy"}
    assert len(document["devices"]) == len(set(ODD[name].rank.tolist()))
    assert "</html>" in html(analysis)
    write_perfetto(analysis, tmp_path / "timeline.json")


def test_a_rank_that_was_not_recorded_is_taken_to_be_as_its_peers(tmp_path):
    trouble = Trouble(replica=2, stage=1, factor=1.4)
    whole = record(Recipe(dp=4, pp=3, steps=6, troubles=(trouble,)))
    there = (whole.dp != 1) | (whole.stage != 2)
    analysis = analysis_of(whole.select(there), tmp_path)
    complete = analysis_of(whole, tmp_path)
    assert analysis.diagnosis.root_cause is complete.diagnosis.root_cause is Cause.DEVICE
    assert analysis.diagnosis.slowdown == pytest.approx(complete.diagnosis.slowdown, abs=0.02)


def test_a_slow_replica_of_one_stage_is_inconclusive(tmp_path):
    trouble = Trouble(replica=2, stage=0, factor=1.4, since=6)
    devices = analysis_of(record(Recipe(dp=8, pp=1, troubles=(trouble,))), tmp_path).devices()
    assert [d["dp"] for d in devices if d["verdict"] != "healthy"] == [2]
    assert devices[2]["verdict"] == "inconclusive"


@pytest.mark.parametrize("column", ["dp", "stage", "seq", "microbatch"])
def test_numbers_beyond_all_reason_are_refused(column, tmp_path):
    beyond = np.full(len(WHOLE), 30_000 if column == "stage" else 2_000_000_000)
    with pytest.raises(TraceError, match="above"):
        analysis_of(dataclasses.replace(WHOLE, **{column: beyond}), tmp_path)


def test_places_beyond_all_reason_are_refused(tmp_path):
    dp, stage = 1000 * WHOLE.dp, 500 * WHOLE.stage
    with pytest.raises(TraceError, match="2001 replicas of 1001 stages are more than 131072"):
        analysis_of(dataclasses.replace(WHOLE, dp=dp, stage=stage), tmp_path)


def test_all_ranks_of_a_tensor_parallel_group_may_be_recorded(tmp_path):
    twice = {
        field.name: np.concatenate(
            [getattr(WHOLE, field.name), getattr(WHOLE, field.name) + 100 * (field.name == "rank")]
        )
        for field in dataclasses.fields(WHOLE)
    }
    document = analysis_of(type(WHOLE)(**twice), tmp_path).to_json()
    assert document["layout"] == {"dp": 3, "pp": 3, "tp": 2}
    assert len(document["devices"]) == 18


def test_times_that_contradict_each_other_are_refused(tmp_path):
    scrambled = np.random.default_rng(0).random(len(WHOLE))
    with pytest.raises(TraceError, match="wait for each other in a circle"):
        analysis_of(dataclasses.replace(WHOLE, start_s=scrambled), tmp_path)


def test_a_slow_device_is_found_beside_a_replica_that_was_not_recorded(tmp_path):
    slow = Trouble(replica=3, stage=1, factor=1.4, since=4)
    ops = record(Recipe(dp=5, pp=2, steps=16, troubles=(slow,)), seed=2)
    analysis = analysis_of(ops.select(ops.dp != 1), tmp_path)
    (named,) = (v.rank for v in analysis.verdicts if v.status is Status.FAIL_SLOW)
    assert analysis.diagnosis.detail[0].startswith(f"Rank {named} (replica 3, stage 1)")
    devices = TraceTimeline(analysis).devices
    groups, factor = devices.groups, devices.factor
    np.testing.assert_allclose(factor[groups.index((named,)), 5:], 1.4, atol=0.05)
    np.testing.assert_allclose(np.delete(factor, groups.index((named,)), axis=0), 1.0, atol=0.05)


def test_a_place_is_told_by_the_number_of_its_replica(tmp_path):
    slow = Trouble(kinds=(OpKind.GC,), replica=3, stage=1, extra_s=0.4, every=3)
    ops = record(Recipe(dp=5, pp=2, steps=16, troubles=(slow,)), seed=2)
    first = analysis_of(ops.select(ops.dp != 1), tmp_path).diagnosis.detail[0]
    assert "garbage collection on the ranks of stage 1 in replica 3" in first


def test_a_duration_that_comes_out_just_below_0_counts_as_0(tmp_path):
    shortest = np.where(WHOLE.kind == OpKind.GC, -1e-6, WHOLE.duration_s)
    ours = analysis_of(dataclasses.replace(WHOLE, duration_s=shortest), tmp_path)
    assert ours.diagnosis.slowdown == analysis_of(WHOLE, tmp_path).diagnosis.slowdown
    with pytest.raises(TraceError, match="below"):
        analysis_of(dataclasses.replace(WHOLE, duration_s=shortest - 0.1), tmp_path)
