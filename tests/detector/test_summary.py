"""The summary of all verdicts says what they say one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from detector import Detector, DetectorSettings
from resihp.contracts import Job, Layout, Status, Verdict
from resihp.testing.scenarios import Fault, steps_of

JOB = Job(
    name="job",
    layout=Layout.grid(dp=4, pp=2, tp=2, layers=16),
    microbatches=16,
    tokens_per_microbatch=8192,
)
FAULTS = (Fault(rank=5, factor=1.3, from_step=6, until_step=11),)


def expanded(detector: Detector) -> list[Verdict]:
    found = detector.summary()
    return sorted([*found.outside(frozenset())], key=lambda verdict: verdict.rank)


def assert_alike(detector: Detector) -> None:
    """Equal but for the confidence in healthy ranks, which is the lowest of them."""
    for short, whole in zip(expanded(detector), detector.verdicts(), strict=True):
        assert short.confidence == pytest.approx(whole.confidence, abs=0.01)
        if whole.status is Status.HEALTHY:
            assert short.confidence <= whole.confidence
        assert replace(short, confidence=whole.confidence) == whole


def test_of_every_step_of_a_fault_and_after_it() -> None:
    detector = Detector(JOB, settings=DetectorSettings(train_after_steps=10))
    assert_alike(detector)
    seen = set()
    for step in steps_of(JOB, (300, 700, 2000), steps=20, seed=2, faults=FAULTS):
        detector.update(step)
        assert_alike(detector)
        others = detector.summary().others
        seen.update((verdict.rank, verdict.status) for verdict in others)
    assert (5, Status.FAIL_SLOW) in seen
    assert len(detector.summary().others) < len(JOB.layout.ranks)


def test_of_ranks_that_stopped_hang_or_fell_silent() -> None:
    detector = Detector(JOB)
    steps = list(steps_of(JOB, (300, 700, 2000), steps=10, seed=2))
    for step in steps[:4]:
        detector.update(step)
    detector.report_failure([7], step=3)
    for step in steps[4:]:
        detector.update(step.select((step.rank != 7) & (step.rank != 2)))
    assert_alike(detector)
    assert {verdict.rank for verdict in detector.summary().others} >= {2, 7}
