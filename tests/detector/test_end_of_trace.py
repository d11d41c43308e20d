"""The last steps of a trace, which wait for records that never come."""

from collections.abc import Iterator

import numpy as np

from detector import Detector
from resihp.contracts import Job, Layout, Status, TelemetryBatch
from resihp.testing.scenarios import Fault, steps_of

LENGTHS = np.clip(np.exp(np.random.default_rng(0).normal(6.5, 1.2, 3000)), 16, 8192).astype(int)
JOB = Job(name="job", layout=Layout.grid(dp=4, pp=2, tp=1, layers=8), microbatches=16)
SLOW = 3


def ragged(steps: int) -> Iterator[TelemetryBatch]:
    """Every other step has a microbatch less; a rank is slow in the last three."""
    faults = [Fault(rank=SLOW, factor=2.0, from_step=steps - 3)]
    for batch in steps_of(JOB, LENGTHS, steps=steps, seed=3, faults=faults):
        yield batch.select(batch.microbatch % 4 < 4 - batch.step % 2)


def test_the_last_steps_are_judged_at_the_end() -> None:
    detector, told = Detector(JOB), []
    for batch in ragged(13):
        told += detector.update(batch)
    before = detector.verdicts()[0].step
    (verdict,) = detector.finish()
    assert before in range(12)
    assert (told, verdict.rank, verdict.status) == ([], SLOW, Status.FAIL_SLOW)
    assert [v.step for v in detector.verdicts()] == [12] * 8
    assert detector.finish() == []


def test_the_end_changes_nothing_where_all_steps_are_whole() -> None:
    detector = Detector(JOB)
    for batch in steps_of(JOB, LENGTHS, steps=13, seed=3):
        detector.update(batch)
    before = detector.save()
    assert detector.finish() == []
    assert detector.save() == before


def test_later_records_of_a_step_that_was_judged_at_the_end_are_ignored() -> None:
    detector, batches = Detector(JOB), list(steps_of(JOB, LENGTHS, steps=4, seed=3))
    for batch in batches:
        detector.update(batch.select(batch.rank < 7))
    detector.finish()
    before = detector.verdicts()
    assert detector.update(batches[-1]) == []
    assert detector.verdicts() == before
