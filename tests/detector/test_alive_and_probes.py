"""Heartbeats and probes."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detector import Detector, DetectorSettings, ProbeKind, ProbeResult
from resihp.contracts import (
    ContractError,
    Heartbeat,
    Job,
    Layout,
    Op,
    Plan,
    Status,
    TelemetryBatch,
    TrainingPosition,
    Verdict,
)
from resihp.testing.scenarios import Fault, steps_of

JOB = Job(
    name="job",
    layout=Layout.grid(dp=4, pp=2, tp=1, layers=16),
    microbatches=16,
    tokens_per_microbatch=8192,
)


def beaten(until: float, *, ranks: range = range(8)) -> Detector:
    detector = Detector(JOB)
    for tick in range(int(until)):
        detector.heartbeat(ranks, float(tick))
    return detector


def test_the_rank_that_falls_silent_is_dead_and_no_other() -> None:
    detector = beaten(30.0)
    dead = []
    for tick in range(30, 90):
        detector.heartbeat([rank for rank in range(8) if rank != 5], float(tick))
        dead += [(v.rank, v.status) for v in detector.check_alive(float(tick))]
    assert dead == [(5, Status.FAIL_STOP)]


def test_a_silence_that_all_share_is_the_network() -> None:
    assert beaten(30.0).check_alive(500.0) == []


def test_a_rank_that_was_only_silent_is_alive_again() -> None:
    detector = beaten(30.0)
    others = [rank for rank in range(8) if rank != 5]
    for tick in range(30, 90):
        detector.heartbeat(others, float(tick))
        detector.check_alive(float(tick))
    (verdict,) = detector.heartbeat([5], 90.0)
    assert (verdict.rank, verdict.status) == (5, Status.HEALTHY)


def beat(detector: Detector, now: float, ranks: Iterable[int], **of: Any) -> list[Verdict]:
    """One heartbeat of each rank, all of the process `p` unless told otherwise."""
    of = {"process": "p", "sequence": int(now * 10), **of}
    return detector.take_heartbeats([Heartbeat(ranks=(rank,), **of) for rank in ranks], now)


def test_a_rank_that_leaves_is_not_waited_for() -> None:
    detector = Detector(JOB)
    for tick in range(30):
        beat(detector, tick, range(8))
    assert beat(detector, 30, [5], left=True) == []
    for tick in range(31, 200):
        beat(detector, tick, [0, 1, 2, 3, 4, 6, 7])
        assert detector.check_alive(float(tick)) == []


def test_a_process_that_ends_with_an_error_has_failed_until_another_takes_its_place() -> None:
    detector = Detector(JOB)
    for tick in range(30):
        beat(detector, tick, range(8))
    (verdict,) = beat(detector, 30, [5], left=True, error="ValueError: bad batch", step=7)
    assert (verdict.rank, verdict.status, verdict.since_step) == (5, Status.FAIL_STOP, 7)
    assert verdict.evidence == ("its process ended with ValueError: bad batch",)
    (verdict,) = beat(detector, 60, [5], process="next", sequence=1)
    assert (verdict.rank, verdict.status) == (5, Status.HEALTHY)


def test_ranks_that_a_launcher_kills_after_the_error_of_others_have_not_failed() -> None:
    detector = Detector(JOB)
    for tick in range(60):
        beat(detector, tick / 2, range(8))
    failed = [v.rank for v in beat(detector, 30, range(5), left=True, error="RuntimeError: gone")]
    detector = Detector.restore(JOB, detector.save())
    assert [detector.check_alive(30 + tick / 2) for tick in range(600)] == [[]] * 600
    stopped = [v.rank for v in detector.verdicts() if v.status is Status.FAIL_STOP]
    assert stopped == failed == [0, 1, 2, 3, 4]


def test_the_goodbye_of_a_process_that_was_replaced_is_ignored() -> None:
    detector = Detector(JOB)
    for tick in range(30):
        beat(detector, tick, range(8))
    beat(detector, 30, [5], process="next", sequence=1)
    assert beat(detector, 31, [5], left=True, error="SystemError: late") == []
    for tick in range(32, 90):
        beat(detector, tick, [5], process="next", sequence=tick)
        beat(detector, tick, [0, 1, 2, 3, 4, 6, 7])
    for tick in range(90, 150):
        beat(detector, tick, [0, 1, 2, 3, 4, 6, 7])
        detector.check_alive(float(tick))
    dead = [v.rank for v in detector.verdicts() if v.status is Status.FAIL_STOP]
    assert dead == [5]


def test_a_heartbeat_that_was_overtaken_is_ignored() -> None:
    detector = Detector(JOB)
    for tick in range(30):
        beat(detector, tick, range(8))
    beat(detector, 30, range(8), sequence=400)
    assert beat(detector, 31, [5], process="p", sequence=1, left=True, error="late") == []


def test_ranks_outside_the_layout_are_counted_and_not_kept() -> None:
    detector = Detector(JOB)
    size = len(detector.save())
    for tick in range(10):
        beat(detector, tick, range(100, 1100))
    assert detector.counters["unknown_ranks"] == 10_000
    assert len(detector.save()) - size < 100
    assert detector.check_alive(1e6) == []


def test_records_are_signs_of_life_of_ranks_that_send_heartbeats() -> None:
    detector = Detector(JOB)
    for tick in range(30):
        beat(detector, tick, range(4))
    for tick in range(30, 200):  # ranks 4 to 7 never sent a heartbeat
        detector.heard(range(3) if tick < 100 else range(8), float(tick))
        detector.check_alive(float(tick))
        if tick == 99:
            (dead,) = [v for v in detector.verdicts() if v.status is Status.FAIL_STOP]
            assert dead.rank == 3
    assert all(v.status is Status.HEALTHY for v in detector.verdicts())


STEPS = list(steps_of(JOB, [300, 700, 2000], steps=30, seed=3))


def dead_in_step_20() -> Detector:
    """Rank 5 has stopped and is held for dead. Records up to step 15 are known, and by heartbeats
    that the others wait for it in step 20."""
    detector = Detector(JOB)
    for tick in range(30):
        beat(detector, tick, range(8))
    for step in STEPS[:16]:
        detector.update(step)
    for tick in range(30, 90):
        waiting = TrainingPosition(step=20, op=Op.COLLECTIVE, waiting=True)
        beat(detector, tick, [0, 1, 2, 3, 4, 6, 7], position=waiting)
        detector.check_alive(float(tick))
    assert state_of_5(detector) is Status.FAIL_STOP
    return detector


def state_of_5(detector: Detector) -> Status:
    return next(verdict.status for verdict in detector.verdicts() if verdict.rank == 5)


def deliver(detector: Detector, steps: Iterable[int], now: float) -> None:
    """Records of rank 5 alone, as another sender kept them while the service was behind."""
    late = TelemetryBatch.concat(STEPS[step] for step in steps)
    late = late.select(late.rank == 5)
    detector.heard([5], now, late)
    detector.update(late)
    detector.check_alive(now + 0.5)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=5), max_size=6))
def test_records_of_before_its_death_bring_no_rank_back(messages: list[list[int]]) -> None:
    detector = dead_in_step_20()
    for number, steps in enumerate(messages):
        deliver(detector, steps, 90.0 + number)
        assert state_of_5(detector) is Status.FAIL_STOP
    again = Detector.restore(JOB, detector.save())
    deliver(again, [20], 97.0)
    assert state_of_5(again) is Status.FAIL_STOP
    deliver(again, [20, 21], 98.0)
    assert state_of_5(again) is Status.HEALTHY
    deliver(detector, [3, 20], 98.0)
    beat(detector, 99.0, [5])
    assert state_of_5(detector) is Status.HEALTHY


def slowly_failing() -> Iterator[TelemetryBatch]:
    fault = Fault(rank=2, factor=1.028, from_step=14)
    lengths = np.clip(np.exp(np.random.default_rng(0).normal(6.5, 1.2, 500)), 16, 8192).astype(int)
    return steps_of(JOB, lengths, steps=40, seed=1, faults=[fault])


def suspicious(stream: Iterator[TelemetryBatch], *, probes_per_minute: int = 12) -> Detector:
    """A detector at the moment when it first suspects rank 2."""
    detector = Detector(JOB, settings=DetectorSettings(probes_per_minute=probes_per_minute))
    for batch in stream:
        if any(v.status is Status.SUSPECT for v in detector.update(batch)):
            return detector
    raise AssertionError("nobody was ever suspect")


def test_a_suspect_and_a_healthy_peer_are_asked_once() -> None:
    detector = suspicious(slowly_failing())
    requests = detector.probe_requests(now=100.0)
    assert {request.rank for request in requests} == {2}
    assert {request.kind for request in requests} == {ProbeKind.GEMM, ProbeKind.MEMORY}
    assert requests[0].reference in JOB.layout.ranks
    assert detector.probe_requests(now=101.0) == []


def test_probes_can_be_forbidden() -> None:
    assert suspicious(slowly_failing(), probes_per_minute=0).probe_requests(now=100.0) == []


def steps_to_the_name(rank_ms: float | None) -> int:
    """Steps from suspicion to the name, with a probe that answers so (None: without one)."""
    stream = slowly_failing()
    detector = suspicious(stream)
    for request in detector.probe_requests(now=0.0) if rank_ms else []:
        result = ProbeResult(
            rank=request.rank,
            reference=request.reference,
            kind=request.kind,
            rank_ms=rank_ms or 1.0,
            reference_ms=1.0,
        )
        detector.probe_result(result)
        assert "probe" in " ".join(detector.verdicts()[2].evidence)
    for count, batch in enumerate(stream, start=1):
        if any(v.status is Status.FAIL_SLOW for v in detector.update(batch)):
            return count
    return 1000


def test_an_answer_joins_the_evidence() -> None:
    for_it, without, against = (steps_to_the_name(ms) for ms in (1.05, None, 0.9))
    assert for_it <= without <= against
    assert for_it < against


def loading(steps: Iterator[TelemetryBatch]) -> Iterator[TelemetryBatch]:
    """Steps with the loading of data, which takes the host of rank 2 long from step 8 on."""
    for step in steps:
        at = np.full(8, step.step[0])
        ms = np.where((np.arange(8) == 2) & (at >= 8), 90.0, 10.0)
        data = TelemetryBatch(
            rank=np.arange(8), step=at, microbatch=np.full(8, -1), op=np.full(8, Op.DATA),
            compute_ms=ms,
        )  # fmt: skip
        yield TelemetryBatch.concat([step, data])


def test_each_kind_of_probe_and_the_host_have_a_sentence_until_the_rank_is_healthy() -> None:
    """The one of the memory probe replaced that of the other, and the host's both; and what probes
    had shown stayed with the rank until the next layout."""

    def said() -> list[str]:
        evidence = detector.verdicts()[2].evidence
        return [w for w in evidence if "probe" in w or w.startswith("its host")]

    stream = loading(slowly_failing())
    detector = suspicious(stream)
    for kind, rank_ms in ((ProbeKind.MEMORY, 0.8), (ProbeKind.GEMM, 1.2), (ProbeKind.GEMM, 1.04)):
        times = {"rank_ms": rank_ms, "reference_ms": 1.0}
        detector.probe_result(ProbeResult(rank=2, reference=3, kind=kind, **times))
    detector.update(next(stream))
    assert detector.verdicts()[2].status is Status.SUSPECT
    assert Detector.restore(JOB, detector.save()).save() == detector.save()
    assert [words[:15] for words in said()] == [
        "its host spends",
        "a gemm probe to",
        "a memory probe ",
    ]
    assert said()[1:] == [
        "a gemm probe took 1.04 times as long as on rank 3",
        "a memory probe took 0.80 times as long as on rank 3",
    ]
    back = None
    for step in loading(steps_of(JOB, [300, 700, 2000], steps=80, seed=5)):
        if step.step[0] <= (detector.verdicts()[0].step or 0):
            continue
        for verdict in detector.update(step):
            back = verdict if verdict.rank == 2 else back
    assert back is not None
    assert back.status is Status.HEALTHY
    assert "a gemm probe took 1.04 times as long as on rank 3" in back.evidence  # as it comes back
    assert [words[:8] for words in said()] == ["its host"]


@pytest.mark.parametrize(
    ("rank_ms", "reference_ms"),
    [(0.0, 1.0), (np.inf, 1.0), (np.nan, 1.0), (1e308, 1e-3), (1e-320, 1e15)],
)
def test_a_probe_that_says_nothing_is_refused(rank_ms: float, reference_ms: float) -> None:
    times = {"rank_ms": rank_ms, "reference_ms": reference_ms}
    with pytest.raises(ContractError, match="rank_ms"):
        ProbeResult(rank=0, reference=1, kind=ProbeKind.GEMM, **times)


@pytest.mark.parametrize("rank_ms", [1e-300, 1e300])
def test_a_probe_of_an_absurd_time_leaves_verdicts_finite(rank_ms: float) -> None:
    detector = Detector(JOB)
    for number, step in enumerate(STEPS):
        if number == 8:
            times = {"rank_ms": rank_ms, "reference_ms": 1.0}
            detector.probe_result(ProbeResult(rank=2, reference=3, kind=ProbeKind.GEMM, **times))
        detector.update(step)
    assert np.isfinite([verdict.confidence for verdict in detector.verdicts()]).all()


def fall_silent(detector: Detector, silent: int, now: int, **of: Any) -> list[int]:
    """All ranks beat for a while, then all but one; returns the ranks that are found dead."""
    for tick in range(now, now + 60):
        beat(detector, tick, range(8), **of)
    assert {v.status for v in detector.verdicts()} == {Status.HEALTHY}
    found = list[Verdict]()
    for tick in range(now + 60, now + 150):
        beat(detector, tick, [rank for rank in range(8) if rank != silent], **of)
        found += detector.check_alive(float(tick))
    return [verdict.rank for verdict in found if verdict.status is Status.FAIL_STOP]


@pytest.mark.parametrize("replanned", [True, False])
def test_a_rank_that_works_again_after_a_report_can_be_found_dead(replanned: bool) -> None:
    """Its failure was reported; the job goes on with it under a plan or from a checkpoint."""
    detector = Detector(JOB)
    for step in STEPS[:16]:
        detector.update(step)
    for tick in range(6):
        beat(detector, tick, range(8))
    detector.report_failure([5], step=16)
    if replanned:
        detector.apply_plan(Plan(version=1, layout=JOB.layout, quotas=JOB.quotas, from_step=9))
    for step in STEPS[6:12]:
        detector.update(replace(step, plan_version=int(replanned)))
    assert fall_silent(detector, 5, 10) == [5]


def test_a_rank_that_others_reported_works_again_when_another_process_takes_its_place() -> None:
    """The job goes back by a single step, which alone is no sign of a restart."""
    detector = Detector(JOB)
    for step in STEPS[:16]:
        detector.update(step)
    for tick in range(6):
        beat(detector, tick, range(8))
    detector.report_failure([5], step=16, detail="exit code 137")
    detector = Detector.restore(JOB, detector.save())
    for step in STEPS[15:18]:
        detector.update(step)
    assert beat(detector, 7, [5]) == []  # a late one of the process that failed
    assert state_of_5(detector) is Status.FAIL_STOP
    (verdict,) = beat(detector, 20, [5], process="next", sequence=1)
    assert (verdict.rank, verdict.status) == (5, Status.HEALTHY)
    assert fall_silent(detector, 5, 21, process="next") == [5]


def test_a_rank_that_records_bring_back_is_given_time_for_its_first_heartbeat() -> None:
    """A replacement under a new plan sends records before the first heartbeat."""
    detector = dead_in_step_20()
    detector.apply_plan(Plan(version=1, layout=JOB.layout, quotas=JOB.quotas, from_step=16))
    for step in STEPS[16:19]:
        detector.update(replace(step, plan_version=1))
    assert detector.check_alive(90.0) == []
    assert state_of_5(detector) is Status.HEALTHY


def test_a_slow_rank_that_dies_in_the_first_steps_of_a_plan_stays_dead() -> None:
    """Its last records come with those of the others, after the report."""
    fault = Fault(rank=5, factor=1.5, from_step=8)
    steps = list(steps_of(JOB, [300, 700, 2000], steps=30, seed=3, faults=[fault]))
    detector = Detector(JOB)
    for step in steps[:20]:
        detector.update(step)
    assert state_of_5(detector) is Status.FAIL_SLOW
    detector.apply_plan(Plan(version=1, layout=JOB.layout, quotas=JOB.quotas))
    detector.update(replace(steps[20], plan_version=1))
    detector.report_failure([5], step=21)
    for step in steps[21:24]:
        assert detector.update(replace(step, plan_version=1)) == []
    assert state_of_5(detector) is Status.FAIL_STOP


def left_out() -> Detector:
    """Rank 5 is slow, and left out of the layout with the rest of its replica; its process goes on
    to send heartbeats."""
    fault = Fault(rank=5, factor=1.5, from_step=8)
    detector = Detector(JOB)
    for step in steps_of(JOB, [300, 700, 2000], steps=20, seed=3, faults=[fault]):
        detector.update(step)
    replicas = tuple(r for r in JOB.layout.replicas if 5 not in r.ranks)
    detector.apply_plan(Plan(version=1, layout=Layout(replicas), quotas=(6, 5, 5)))
    return detector


def test_a_slow_device_outside_the_layout_that_was_only_silent_is_probed_again() -> None:
    detector = left_out()
    working = detector.job.layout.ranks
    for tick in range(30):
        beat(detector, tick, [*working, 5])
    dead = []
    for tick in range(30, 60):
        beat(detector, tick, working)
        dead += [(v.rank, v.status) for v in detector.check_alive(tick)]
    assert dead == [(5, Status.FAIL_STOP)]
    assert detector.probe_requests(60.0) == []
    detector = Detector.restore(JOB, detector.save())
    (verdict,) = beat(detector, 60, [*working, 5])
    assert (verdict.rank, verdict.status) == (5, Status.FAIL_SLOW)
    assert verdict.slowdown == pytest.approx(1.5, abs=0.05)
    assert {request.rank for request in detector.probe_requests(61.0)} == {5}
    assert detector.check_alive(61.0) == []


@pytest.mark.parametrize("error", ["", "SIGKILL"])
def test_another_process_of_a_device_outside_the_layout_is_probed_again(error: str) -> None:
    detector = left_out()
    beat(detector, 1, [5], process="first", sequence=1)
    if error:
        (verdict,) = beat(detector, 2, [5], process="first", sequence=2, left=True, error=error)
    else:
        (verdict,) = detector.report_failure([5], step=20)
    assert (verdict.rank, verdict.status) == (5, Status.FAIL_STOP)
    assert detector.probe_requests(3.0) == []
    (verdict,) = beat(detector, 4, [5], process="next", sequence=1)
    assert (verdict.rank, verdict.status) == (5, Status.FAIL_SLOW)
    assert {request.rank for request in detector.probe_requests(5.0)} == {5}


def test_a_recovered_device_outside_the_layout_that_was_only_silent_is_healthy() -> None:
    detector = left_out()
    for _ in range(3):
        for kind in ProbeKind:
            probe = ProbeResult(rank=5, reference=0, kind=kind, rank_ms=1.0, reference_ms=1.0)
            detector.probe_result(probe)
    assert {v.rank: v.status for v in detector.verdicts()}[5] is Status.HEALTHY
    beat(detector, 1, [5], process="first", sequence=1)
    detector.report_failure([5], step=20)
    (verdict,) = beat(detector, 4, [5], process="next", sequence=1)
    assert (verdict.rank, verdict.status) == (5, Status.HEALTHY)
