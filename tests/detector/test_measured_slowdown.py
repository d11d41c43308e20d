"""The slowdown that is told is that of the device's whole compute time, whatever else is slow."""

from dataclasses import replace

import numpy as np
import pytest

from detector import Detector
from resihp.contracts import Job, Layout, Op, Status, TelemetryBatch
from resihp.testing.scenarios import Fault, steps_of

LENGTHS = np.clip(np.exp(np.random.default_rng(0).normal(6.5, 1.2, 3000)), 16, 8192).astype(int)
JOB = Job(name="job", layout=Layout.grid(dp=4, pp=4, tp=1, layers=16), microbatches=32)
ONSET, STEPS = 15, 26
SLOW = JOB.layout.replicas[2].stages[1].ranks[0]


def slower_in_one_op(batch: TelemetryBatch, op: Op, factor: float) -> TelemetryBatch:
    rows = (batch.rank == SLOW) & (batch.op == op) & (batch.step >= ONSET)
    return replace(batch, compute_ms=np.where(rows, factor, 1.0) * batch.compute_ms)


@pytest.mark.parametrize("with_lengths", [True, False])
@pytest.mark.parametrize("factor", [1.3, 2.0])
@pytest.mark.parametrize("op", [Op.FORWARD, Op.BACKWARD])
def test_a_device_slow_in_one_kind_of_pass_is_named(
    op: Op, factor: float, with_lengths: bool
) -> None:
    detector, named = Detector(JOB), dict[int, int]()
    of_op = of_all = 0.0
    for batch in steps_of(JOB, LENGTHS, steps=STEPS, seed=1, with_lengths=with_lengths):
        passes = (batch.rank == SLOW) & (batch.op <= Op.BACKWARD)
        of_all += float(batch.compute_ms[passes].sum())
        of_op += float(batch.compute_ms[passes & (batch.op == op)].sum())
        for verdict in detector.update(slower_in_one_op(batch, op, factor)):
            if verdict.status is Status.FAIL_SLOW:
                named.setdefault(verdict.rank, int(batch.step[0]))
    assert set(named) == {SLOW}
    assert named[SLOW] <= ONSET + 3
    [verdict] = [v for v in detector.verdicts() if v.rank == SLOW]
    assert verdict.slowdown == pytest.approx(1.0 + (factor - 1.0) * of_op / of_all, rel=0.03)


@pytest.mark.parametrize(
    ("factors", "with_lengths"),
    [((1.15, 1.3), True), ((1.15, 1.3), False), ((1.15, 1.3, 1.2), True)],
)
def test_slow_devices_of_one_stage_do_not_hide_each_other(
    factors: tuple[float, ...], with_lengths: bool
) -> None:
    ranks = [replica.stages[1].ranks[0] for replica in JOB.layout.replicas]
    slow = dict(zip(ranks, factors, strict=False))
    faults = [Fault(rank=r, factor=f, from_step=ONSET) for r, f in slow.items()]
    detector = Detector(JOB)
    stream = steps_of(JOB, LENGTHS, steps=STEPS, seed=2, faults=faults, with_lengths=with_lengths)
    for batch in stream:
        detector.update(batch)
    found = {v.rank: v.slowdown for v in detector.verdicts() if v.status is Status.FAIL_SLOW}
    assert found == pytest.approx(slow, rel=0.03)
