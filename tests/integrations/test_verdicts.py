"""The verdicts that a trainer logs, and an observer whose parts fail."""

from __future__ import annotations

import pytest

from resihp.contracts import Status, Verdict
from resihp.integrations._observer import TrainingObserver
from resihp.integrations._verdicts import largest_slowdown, summary

pytestmark = pytest.mark.integrations


def verdict(rank: int, status: Status, slowdown: float = 1.0, since: int | None = None) -> Verdict:
    return Verdict(rank=rank, status=status, slowdown=slowdown, since_step=since)


@pytest.mark.parametrize(
    ("verdicts", "text"),
    [
        ([verdict(0, Status.HEALTHY), verdict(1, Status.HEALTHY, 1.1)], "healthy"),
        (
            [verdict(0, Status.HEALTHY), verdict(5, Status.FAIL_SLOW, 1.52, 118)],
            "rank 5 fail_slow 1.52x since step 118",
        ),
        (
            [verdict(1, Status.FAIL_SLOW, 9.0, 8), verdict(2, Status.FAIL_STOP, 1.0, 9)],
            "rank 2 fail_stop since step 9",
        ),
        (
            [verdict(0, Status.SUSPECT, 1.2), verdict(1, Status.SUSPECT, 1.4),
             verdict(2, Status.HEALTHY)],
            "rank 1 suspect 1.40x, 1 other rank too",
        ),
        ([verdict(0, Status.INCONCLUSIVE), verdict(1, Status.INCONCLUSIVE)], "inconclusive"),
        ([verdict(0, Status.HEALTHY), verdict(1, Status.INCONCLUSIVE)], "rank 1 inconclusive"),
        ([verdict(0, Status.FAIL_SLOW, 2.0, 4)], "rank 0 fail_slow 2.00x since step 4"),
        (
            [verdict(0, Status.FAIL_SLOW, 2.0, 4), verdict(1, Status.FAIL_SLOW, 3.0, 4)],
            "rank 1 fail_slow 3.00x since step 4, 1 other rank too",
        ),
    ],
)  # fmt: skip
def test_the_most_severe_verdict_is_summed_up(verdicts: list[Verdict], text: str) -> None:
    assert summary(verdicts) == text
    assert largest_slowdown(verdicts) == max(one.slowdown for one in verdicts)


def test_an_unknown_option_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="'lenghts'"):
        TrainingObserver({"lenghts": None})


def test_a_target_that_cannot_be_observed_is_logged_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    observer = TrainingObserver({})
    observer.begin(object(), None, 0)
    assert "must be a module" in caplog.text
    assert observer.metrics() == {}
    assert observer.end() is None
