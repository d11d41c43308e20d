"""Recorded production jobs, where they are at hand (RESIHP_TRACES or ../shared/traces)."""

import os
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from detector import Detector
from resihp.contracts import Job, Op, Status, TelemetryBatch

FOLDER = Path(os.environ.get("RESIHP_TRACES", "../shared/traces"))
pytestmark = pytest.mark.skipif(
    not (FOLDER / "trace-SE.parquet").exists(), reason="no recorded traces; set RESIHP_TRACES"
)


@cache
def recorded(name: str) -> tuple[Job, list[TelemetryBatch]]:
    from resihp.offline import read_trace

    trace = read_trace(FOLDER / f"trace-{name}.parquet")
    return trace.job, list(trace.batches())


@pytest.mark.parametrize("name", ["SE", "ST"])
def test_a_job_without_a_bad_device_has_none_named(name: str) -> None:
    job, batches = recorded(name)
    detector = Detector(job)
    assert [verdict for batch in batches for verdict in detector.update(batch)] == []
    assert {verdict.status for verdict in detector.verdicts()} == {Status.HEALTHY}


@pytest.mark.parametrize(
    ("name", "at", "onset"),
    [
        *(("SE", at, onset) for at, onset in ((0, 10), (17, 4), (40, 25), (63, 15))),
        # The last stage of both replicas becomes 2% faster at step 5 of this recording.
        *(("ST", 7, onset) for onset in (8, 10, 13)),
        *(("ST", 6, onset) for onset in (5, 8)),
        ("ST", 0, 8),
    ],
)
def test_five_percent_is_found_within_five_steps(name: str, at: int, onset: int) -> None:
    job, batches = recorded(name)
    bad = sorted(job.layout.ranks)[at]
    detector = Detector(job)
    delay = None
    for count, batch in enumerate(batches):
        slow = (batch.rank == bad) & (batch.op <= Op.BACKWARD) & (count >= onset)
        times = batch.compute_ms * np.where(slow, 1.05, 1.0)
        for verdict in detector.update(replace(batch, compute_ms=times)):
            if verdict.status is Status.FAIL_SLOW:
                assert verdict.rank == bad
                delay = delay or count - onset + 1
    assert delay is not None
    assert delay <= 5


def test_a_slowed_replica_is_not_blamed_on_a_device() -> None:
    job, batches = recorded("SE")
    replica = job.layout.replicas[11].ranks
    detector = Detector(job)
    for count, batch in enumerate(batches):
        slow = np.isin(batch.rank, replica) & (batch.op <= Op.BACKWARD) & (count >= 12)
        times = batch.compute_ms * np.where(slow, 1.5, 1.0)
        changed = detector.update(replace(batch, compute_ms=times))
        assert all(verdict.status is not Status.FAIL_SLOW for verdict in changed)
    found = {v.rank for v in detector.verdicts() if v.status is Status.INCONCLUSIVE}
    assert found == set(replica)


def test_a_first_step_of_three_times_the_length_names_nobody() -> None:
    """As where kernels are compiled: maps learned from it are no maps of the job."""
    job, batches = recorded("SE")
    detector = Detector(job)
    for count, batch in enumerate(batches[:20]):
        slow = (batch.op <= Op.BACKWARD) & (count == 0)
        times = batch.compute_ms * np.where(slow, 3.0, 1.0)
        changed = detector.update(replace(batch, compute_ms=times))
        assert all(verdict.status is not Status.FAIL_SLOW for verdict in changed)
