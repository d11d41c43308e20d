"""A trainer's few lines and a sidecar that has just been started: nothing else is needed."""

from __future__ import annotations

from resihp.contracts import Op
from resihp.hooks import Monitor
from tests.service.conftest import eventually, job_of


def test_a_job_given_to_the_hooks_needs_no_other_registration(http):
    job = job_of("new")
    monitors = [Monitor(job=job, url=http.url, rank=rank, interval_s=0.05) for rank in (3, 0)]
    for monitor in monitors:
        with monitor.step():
            monitor.record(op=Op.FORWARD, compute_ms=10.0, microbatch=0, tokens=100)
    eventually(lambda: all(monitor.stats.sent == 1 for monitor in monitors))
    assert http.get("/v1/jobs/new")["job"]["microbatches"] == job.microbatches
    for monitor in monitors:
        monitor.close()
        assert (monitor.stats.dropped, monitor.stats.failures) == (0, 0)
