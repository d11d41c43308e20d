"""The verdicts that a trainer logs, and an observer whose parts fail."""

from __future__ import annotations

import pytest

from resihp.contracts import Advice, ContractError, ServiceError, Status, Verdict
from resihp.integrations._observer import TrainingObserver
from resihp.integrations._verdicts import VerdictReader, largest_slowdown, summary

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


SLOW = verdict(1, Status.FAIL_SLOW, 2.0, 4)
ADVICE = Advice(ranks=(1,), step_ms=200.0, without_ms=125.0, replaced_ms=100.0)


def test_advice_follows_the_verdict() -> None:
    assert summary([SLOW], ADVICE) == (
        "rank 1 fail_slow 2.00x since step 4; "
        "leave rank 1 out: steps 1.60x faster for the same work; replace it: 2.00x"
    )


class Source:
    """A sidecar that finds rank 1 slow, or nothing, and answers about advice as it is told."""

    def __init__(self, found: Verdict, answer: Advice | Exception) -> None:
        self.found, self.answer = found, answer

    def verdicts(self, job: str) -> list[Verdict]:
        return [self.found]

    def advice(self, job: str) -> Advice | None:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("found", "answer", "read", "failures"),
    [
        (SLOW, ADVICE, ADVICE, 0),
        (SLOW, ServiceError("no such route", status=404), None, 0),
        (SLOW, RuntimeError("broken"), None, 1),
        (verdict(1, Status.HEALTHY), ADVICE, None, 0),
    ],
)
def test_verdicts_are_read_whatever_becomes_of_the_advice(
    found: Verdict, answer: Advice | Exception, read: Advice | None, failures: int
) -> None:
    failed: list[Exception] = []
    source = Source(found, answer)
    reader = VerdictReader(source, "j", is_due=lambda: True, on_failure=failed.append)
    reader.finish(30.0)
    assert (list(reader.latest), reader.advice, len(failed)) == ([found], read, failures)


def test_an_unknown_option_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="'lenghts'"):
        TrainingObserver({"lenghts": None})


@pytest.mark.parametrize("option", [{"job": "a/b"}, {"microbatches": 0}, {"layout": "x"}])
def test_an_option_that_no_job_can_have_is_refused_at_once(option: dict[str, object]) -> None:
    with pytest.raises(ContractError):
        TrainingObserver(option)


def test_a_target_that_cannot_be_observed_is_logged_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    observer = TrainingObserver({})
    observer.begin(object(), None, 0)
    assert "must be a module" in caplog.text
    assert observer.metrics() == {}
    assert observer.end() is None
