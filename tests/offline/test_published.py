"""The published what-if results of two production jobs, and what is known of them."""

import json

import numpy as np
import pytest

from detector.whatif import Causes
from resihp.contracts import Cause, Op
from resihp.offline import analyze, read_trace

JOBS = ["ST", "SE"]
ROOT = {"ST": "stage_imbalance", "SE": "sequence_imbalance"}
# Share of the lost time that goes with one effect removed.
REMOVED = {
    "SE": {Cause.SEQUENCE_IMBALANCE: 0.683, Cause.STAGE_IMBALANCE: 0.060, Cause.DEVICE: 0.012},
    "ST": {Cause.STAGE_IMBALANCE: 1.592, Cause.DEVICE: 0.004},
}


@pytest.fixture(scope="module", params=JOBS)
def job(request, published):
    name = request.param
    results = {
        kind: json.loads((published / f"{kind}-{name}.json").read_text())
        for kind in ("result", "ms", "mw")
    }
    return name, analyze(read_trace(published / f"trace-{name}.parquet")), results


def test_slowdown_and_metrics_are_the_published_ones(job):
    _, analysis, results = job
    whatif = analysis.whatif
    assert analysis.diagnosis.slowdown == pytest.approx(
        results["result"]["blocking_slowdown"], abs=1e-3
    )
    assert whatif.launch_slowdown == pytest.approx(results["result"]["launch_slowdown"], abs=1e-3)
    assert whatif.m_w == pytest.approx(results["mw"]["Mw"], abs=1e-3)
    assert whatif.m_s == pytest.approx(results["ms"]["Ms"], abs=1e-3)


def test_steps_recorded_without_delays_and_ideal_are_the_published_ones(job):
    _, analysis, results = job
    whatif = analysis.whatif
    steps = [str(step) for step in whatif.recording.steps]
    for key, ours in (
        ("step_t_base", whatif.recorded_s),
        ("step_t_nodelay", whatif.no_delay_s),
        ("step_t_noblk", np.full(len(steps), whatif.ideal_step_s)),
    ):
        published = [results["result"][key][step] for step in steps]
        np.testing.assert_allclose(ours, published, atol=1e-4)


def test_slowdowns_by_replica_stage_and_kind_are_the_published_ones(job):
    _, analysis, results = job
    whatif = analysis.whatif
    by = {
        "dp_rank": dict(enumerate(whatif.slowdown_of(whatif.by_replica_s))),
        "stage": dict(enumerate(whatif.slowdown_of(whatif.by_stage_s))),
        "optype": {kind: whatif.slowdown_of(s) for kind, s in whatif.by_kind_s.items()},
    }
    for name, ours in by.items():
        published = results["result"][f"blocking_decompose_by_{name}"]
        assert {str(key) for key in ours} == set(published)
        for key, slowdown in ours.items():
            assert slowdown == pytest.approx(published[str(key)], abs=1e-3)


def test_effects_removed_one_at_a_time_have_the_known_shares(job):
    name, analysis, _ = job
    removed = Causes(analysis.whatif).removed
    for cause, share in REMOVED[name].items():
        assert removed[cause] == pytest.approx(share, abs=0.02)


def test_the_root_cause_is_named_and_no_device_is(job):
    name, analysis, _ = job
    document = analysis.to_json()
    assert document["root_cause"] == ROOT[name]
    assert {device["verdict"] for device in document["devices"]} == {"healthy"}
    layout = {"ST": (2, 4), "SE": (32, 2)}[name]
    assert (document["layout"]["dp"], document["layout"]["pp"]) == layout
    assert len(document["devices"]) == layout[0] * layout[1]


def test_records_alone_come_to_the_same_diagnosis(job):
    from detector.diagnosis import diagnose

    name, analysis, _ = job
    trace = analysis.trace
    diagnosis = diagnose(trace.job, trace.job.layout, trace.batches())
    assert diagnosis.root_cause.value == ROOT[name]
    assert diagnosis.slowdown == pytest.approx(analysis.diagnosis.slowdown, abs=0.01)


def test_batches_hold_every_step_once_in_order_with_its_microbatches(job):
    _, analysis, _ = job
    trace = analysis.trace
    steps = []
    for batch in trace.batches():
        steps += np.unique(batch.step).tolist()
        compute = np.isin(batch.op, (Op.FORWARD, Op.BACKWARD))
        per_rank = 2 * trace.job.quotas[0]
        assert int(compute.sum()) == per_rank * len(trace.ranks)
        assert set(np.unique(batch.rank)) == set(trace.ranks)
    assert steps == sorted(set(steps)) == list(trace.steps)
