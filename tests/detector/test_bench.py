"""A slow device that left the layout: probes show when it is healthy again."""

from collections.abc import Callable

import pytest

from detector import Detector, ProbeResult
from resihp.contracts import Job, Layout, Plan, Replica, Stage, Status, Verdict
from resihp.testing.scenarios import Fault, steps_of

SLOW, FACTOR = 5, 1.5
JOB = Job(
    name="job",
    layout=Layout.grid(dp=4, pp=2, tp=1, layers=16),
    microbatches=16,
    tokens_per_microbatch=8192,
)
LENGTHS = [300, 500, 900, 2000, 4000]
WITHOUT = Layout(
    replicas=tuple(
        Replica(stages=tuple(Stage(ranks=s.ranks, layers=s.layers) for s in replica.stages))
        for replica in JOB.layout.replicas
        if SLOW not in replica.ranks
    )
)


def retired() -> Detector:
    """A detector whose plan left the slow rank out."""
    detector = Detector(JOB)
    for batch in steps_of(
        JOB, LENGTHS, steps=18, seed=1, faults=[Fault(rank=SLOW, factor=FACTOR, from_step=8)]
    ):
        detector.update(batch)
    detector.apply_plan(Plan(version=1, layout=WITHOUT, quotas=(6, 5, 5)))
    return detector


def said_of_slow(detector: Detector) -> Verdict:
    (verdict,) = (v for v in detector.verdicts() if v.rank == SLOW)
    return verdict


def probed(
    detector: Detector, rounds: int, slowness: Callable[[int], float], start: int = 0
) -> list[tuple[int, Status]]:
    """Verdicts that so many rounds of probes, two minutes apart, changed; by round."""
    changed = []
    for count in range(start, start + rounds):
        for request in detector.probe_requests(now=120.0 * count):
            assert request.rank == SLOW
            assert request.reference in WITHOUT.ranks
            result = ProbeResult(
                rank=request.rank,
                reference=request.reference,
                kind=request.kind,
                rank_ms=slowness(count),
                reference_ms=1.0,
            )
            changed += [(count - start, v.status) for v in detector.probe_result(result)]
    return changed


def test_it_stays_named_until_probes_say_otherwise() -> None:
    detector = retired()
    verdict = said_of_slow(detector)
    assert verdict.status is Status.FAIL_SLOW
    assert verdict.slowdown == pytest.approx(FACTOR, rel=0.02)
    assert probed(detector, 10, lambda count: FACTOR) == []
    assert "gemm" in " ".join(said_of_slow(detector).evidence) or "memory" in " ".join(
        said_of_slow(detector).evidence
    )


def test_lasting_healthy_probes_make_it_healthy() -> None:
    detector = retired()
    changed = probed(detector, 10, lambda count: 1.01)
    assert [status for _, status in changed] == [Status.HEALTHY]
    assert changed[0][0] >= 2
    assert said_of_slow(detector).status is Status.HEALTHY


def test_one_healthy_probe_now_and_then_does_not() -> None:
    assert probed(retired(), 20, lambda count: FACTOR if count % 3 else 1.0) == []


def test_a_relapse_makes_it_wait_for_longer() -> None:
    detector = retired()
    ((first, _),) = probed(detector, 20, lambda count: 1.0)
    detector.apply_plan(Plan(version=2, layout=JOB.layout, quotas=JOB.quotas))
    assert said_of_slow(detector).status is Status.HEALTHY
    for batch in steps_of(
        JOB,
        LENGTHS,
        steps=24,
        seed=2,
        first_step=20,
        faults=[Fault(rank=SLOW, factor=FACTOR, from_step=30)],
        plan_version=2,
    ):
        detector.update(batch)
    detector.apply_plan(Plan(version=3, layout=WITHOUT, quotas=(6, 5, 5)))
    ((second, _),) = probed(detector, 20, lambda count: 1.0, start=100)
    assert second > first


def test_one_taken_back_while_slow_is_known_to_be_slow() -> None:
    detector = retired()
    detector.apply_plan(Plan(version=2, layout=JOB.layout, quotas=JOB.quotas))
    verdict = said_of_slow(detector)
    assert verdict.status is Status.FAIL_SLOW
    assert verdict.slowdown == pytest.approx(FACTOR, rel=0.02)


def test_it_is_asked_rarely_and_its_state_is_saved() -> None:
    detector = retired()
    assert len(detector.probe_requests(now=0.0)) == 2
    detector = Detector.restore(JOB, detector.save())
    assert detector.probe_requests(now=30.0) == []
    assert len(detector.probe_requests(now=61.0)) == 2


def test_one_that_dies_out_there_is_dead() -> None:
    detector = retired()
    (verdict,) = detector.report_failure([SLOW])
    assert verdict.status is Status.FAIL_STOP
    assert detector.probe_requests(now=0.0) == []


def test_one_that_falls_silent_out_there_is_dead() -> None:
    detector = retired()
    for second in range(60):
        detector.heartbeat([*WITHOUT.ranks, SLOW], float(second))
    for second in range(60, 300):
        detector.heartbeat(WITHOUT.ranks, float(second))
        if told := detector.check_alive(float(second)):
            break
    assert [(verdict.rank, verdict.status) for verdict in told] == [(SLOW, Status.FAIL_STOP)]
    assert said_of_slow(detector).status is Status.FAIL_STOP
    assert detector.check_alive(300.0) == []
