"""What collectives take is told from the rank that came last, where no other stage lets it wait."""

import numpy as np
import pytest

from resihp.contracts import Job, Layout, Op, Schedule, TelemetryBatch
from service.worker.forecast import CollectiveLatency

# Ranks 0 and 1 hold the first four layers, 2 and 3 the others.
JOB = Job(name="job", layout=Layout.grid(dp=1, pp=2, tp=2, layers=8), microbatches=2)


def waits(step, op, microbatch, by_rank, chunk=0):
    same = np.ones(len(by_rank), int)
    return TelemetryBatch(
        rank=np.array(list(by_rank)),
        step=step * same,
        microbatch=microbatch * same,
        op=int(op) * same,
        chunk=chunk * same,
        compute_ms=10.0 * same,
        wait_ms=np.array(list(by_rank.values())),
    )


def test_the_rank_that_waits_least_tells_what_collectives_take():
    collective_latency = CollectiveLatency(JOB)
    collective_latency.add(waits(0, Op.FORWARD, 0, {0: 4.0, 1: 9.0}))
    collective_latency.add(waits(0, Op.FORWARD, 1, {0: 12.0}))
    collective_latency.add(waits(0, Op.FORWARD, 1, {1: 8.0}))
    collective_latency.add(waits(0, Op.FORWARD, 0, {2: 500.0, 3: 500.0}))  # for the stage before
    collective_latency.add(waits(0, Op.BACKWARD, 0, {0: 700.0, 1: 700.0}))  # for the stage behind
    assert collective_latency.take(0) == pytest.approx((4.0 + 8.0) / 2 / 4)
    assert collective_latency.take(0) is None


def test_what_was_not_measured_is_none_and_a_saved_step_goes_on():
    collective_latency = CollectiveLatency(JOB)
    collective_latency.add(waits(3, Op.FORWARD, 0, {0: np.nan, 1: np.nan}))
    assert collective_latency.take(3) is None
    collective_latency.add(waits(4, Op.BACKWARD, 0, {2: 6.0}))
    again = CollectiveLatency(JOB, collective_latency.least_ms)
    again.add(waits(4, Op.BACKWARD, 0, {3: 2.0}))
    assert again.take(4) == pytest.approx(2.0 / 4)


def test_ranks_that_work_alone_have_none_to_meet():
    alone = Job(name="job", layout=Layout.grid(dp=1, pp=2, tp=1, layers=8), microbatches=2)
    collective_latency = CollectiveLatency(alone)
    collective_latency.add(waits(0, Op.FORWARD, 0, {0: 5.0}))
    assert collective_latency.take(0) is None


def test_of_an_interleaved_job_the_first_and_the_last_chunk_tell():
    layout = Layout.grid(dp=1, pp=2, tp=2, layers=12, chunks=2)
    job = Job(name="job", layout=layout, microbatches=2, schedule=Schedule.INTERLEAVED, chunks=2)
    collective_latency = CollectiveLatency(job)
    collective_latency.add(waits(0, Op.FORWARD, 0, {0: 6.0, 1: 9.0}))
    collective_latency.add(
        waits(0, Op.FORWARD, 0, {0: 500.0, 1: 500.0}, chunk=1)
    )  # for the stage before
    collective_latency.add(waits(0, Op.BACKWARD, 0, {2: 700.0, 3: 700.0}))  # for the stage behind
    collective_latency.add(waits(0, Op.BACKWARD, 0, {2: 18.0, 3: 21.0}, chunk=1))
    assert collective_latency.take(0) == pytest.approx((6.0 / 3 + 18.0 / 3) / 2)


def test_waits_are_kept_of_few_steps_and_of_the_microbatches_of_the_job():
    """Whatever ranks send: steps far ahead, records that come late, microbatches beyond all."""
    collective_latency = CollectiveLatency(JOB)
    collective_latency.add(waits(5, Op.FORWARD, 0, {0: 4.0}))
    for step in range(1_000, 2_000):
        collective_latency.add(waits(step, Op.FORWARD, 0, {0: 1.0}))
        collective_latency.add(waits(5, Op.FORWARD, step, {0: 1.0}))
    assert len(collective_latency.least_ms) < 100
    assert collective_latency.take(5) == pytest.approx(4.0 / 4)
    collective_latency.add(waits(4, Op.FORWARD, 0, {0: 4.0}))
    collective_latency.take(6)
    assert min(collective_latency.least_ms) == 1_000
