"""Steps of two production jobs, replayed from the times of their passes and transfers."""

import os
from pathlib import Path

import numpy as np
import pytest

from detector.whatif.operations import OpKind
from resihp.contracts import Schedule
from resihp.offline import read_trace
from resihp.pipeline.orders import stage_order
from resihp.pipeline.replay import pass_durations, replay


@pytest.fixture(scope="module", params=["ST", "SE"])
def recorded(request):
    """Orders, the times [stage, microbatch, replica, step], delays and the recorded spans."""
    named = os.environ.get("RESIHP_TRACES")
    folder = Path(named) if named else Path(__file__).parents[3] / "shared" / "traces"
    if not (folder / f"trace-{request.param}.parquet").is_file():
        pytest.skip("RESIHP_TRACES names no folder with the published traces")
    trace = read_trace(folder / f"trace-{request.param}.parquet")
    found = trace.recording
    count = 1 + int(found.microbatch[found.kind == OpKind.FORWARD].max())

    def rows(kind, stages):
        numbered = found.microbatch if kind in (OpKind.FORWARD, OpKind.BACKWARD) else found.seq
        places = enumerate(zip(found.kind, found.stage, numbered, strict=True))
        at = {(stage, m): row for row, (of, stage, m) in places if of == kind}
        return np.array([[at[s, m] for m in range(count)] for s in stages])

    stages = range(found.stages)
    forward, backward = rows(OpKind.FORWARD, stages), rows(OpKind.BACKWARD, stages)
    begin = found.start_s[forward].min(axis=(0, 1))
    end = (found.start_s + found.duration_s)[backward].max(axis=(0, 1))
    delays = np.zeros((2, found.stages, count, *begin.shape))
    delays[0, :-1] = trace.own_s[rows(OpKind.FORWARD_RECV, stages[1:])]
    delays[1, :-1] = trace.own_s[rows(OpKind.BACKWARD_RECV, stages[:-1])]
    orders = [
        stage_order(Schedule.ONE_F_ONE_B, stage=s, stages=found.stages, microbatches=count)
        for s in stages
    ]
    times = found.duration_s[forward], found.duration_s[backward]
    return request.param, orders, times, np.nan_to_num(delays), end - begin


def test_every_recorded_step_is_replayed_to_within_a_thousandth(recorded):
    _, orders, (forward, backward), delays, spans = recorded
    apart = []
    for replica, step in np.ndindex(spans.shape):
        durations = pass_durations(
            orders, forward[:, :, replica, step], backward[:, :, replica, step]
        )
        played = replay(orders, durations, p2p=delays[..., replica, step], blocking=True)
        apart.append(played.span / spans[replica, step] - 1.0)
    assert np.abs(apart).max() < 1e-3
    assert np.abs(apart).mean() < 2e-4


def test_the_ideal_span_of_the_job_with_a_heavy_last_stage(recorded):
    name, orders, (forward, backward), delays, _ = recorded
    if name == "ST":
        delay = np.median(delays[:, :-1])
        durations = pass_durations(orders, forward.mean(), backward.mean())
        for blocking in (False, True):
            played = replay(orders, durations, p2p=delay, blocking=blocking)
            assert played.span == pytest.approx(1.712, abs=1e-3)
