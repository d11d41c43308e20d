"""Causes of slowness by the readings of sensors: only what sets the slow rank apart, from its peers
and from its own past."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detector import Detector
from detector.persistence import unpack
from resihp.contracts import (
    Cause,
    Heartbeat,
    Job,
    Layout,
    Plan,
    SensorSample,
    Status,
    Verdict,
)
from resihp.contracts.sensors import SENSOR_NAMES
from resihp.testing.scenarios import Fault, steps_of

JOB = Job(
    name="job",
    layout=Layout.grid(dp=4, pp=2, tp=1, layers=16),
    microbatches=16,
    tokens_per_microbatch=8192,
)
RANKS, ONSET, SLOW, STEPS = range(8), 30, 3, 60
LENGTHS = np.random.default_rng(1).integers(64, 4096, 400)
Readings = Callable[[int, int], dict[str, float]]
"""Readings of a rank in a step."""

QUIET = {"cpu_throttled": 0.0, "cpu_waiting": 0.01, "sm_mhz": 1700.0, "major_faults": 0.0}


def of_slow(**readings: float) -> Readings:
    """Readings of a quiet job, in which those of the slow rank change with its onset."""

    def read(rank: int, step: int) -> dict[str, float]:
        return {**QUIET, **(readings if rank == SLOW and step >= ONSET else {})}

    return read


class Monitored:
    """A job with one slow rank, whose ranks send a sample every fourth step."""

    def __init__(
        self,
        read: Readings | None,
        *,
        factor: float = 1.5,
        onset: int = ONSET,
        seed: int = 5,
        job: Job = JOB,
        faults: Sequence[Fault] | None = None,
    ) -> None:
        self.detector, self.ranks = Detector(job), job.layout.ranks
        self.changed: list[Verdict] = []
        self.read, self.sent = read, 0
        if faults is None:
            faults = [Fault(rank=SLOW, factor=factor, from_step=onset)] if factor > 1.0 else []
        self.batches = steps_of(job, LENGTHS, steps=STEPS, seed=seed, faults=faults)

    def run(self, until: int = STEPS) -> Monitored:
        for batch in self.batches:
            step = int(batch.step[0])
            self.changed += self.detector.update(batch)
            if self.read is not None and step % 4 == 1:
                self.beat(step)
            if step + 1 >= until:
                break
        return self

    def beat(self, step: int) -> None:
        assert self.read is not None
        self.sent += 1
        beats = [
            Heartbeat(
                ranks=(rank,),
                process=f"p{rank}",
                sequence=self.sent,
                step=step,
                sensors=SensorSample(seconds=1.0, **self.read(rank, step)),
            )
            for rank in self.ranks
        ]
        self.changed += self.detector.take_heartbeats(beats, float(step))

    @property
    def verdict(self) -> Verdict:
        found: Verdict = self.detector.verdicts()[SLOW]
        assert found.status is Status.FAIL_SLOW
        return found

    def said(self) -> str:
        return " | ".join(self.verdict.evidence)


@pytest.mark.parametrize(
    ("readings", "words", "host"),
    [
        (
            {"cpu_throttled": 0.34, "cpu_quota": 0.5, "cpu_waiting": 0.33},
            "its cgroup (quota 0.5 CPUs) throttled it 34% of the time since step 30; its peers 0%",
            True,
        ),
        (
            {"cpu_waiting": 0.3},
            "its training thread waited for a CPU 30% of the time since step 30; its peers' 1.0%",
            True,
        ),
        (
            {"major_faults": 900.0},
            "900 page faults a second waited for a disk since step 30; its peers' 0",
            True,
        ),
        ({"sm_mhz": 1200.0}, "SM clock 1.20 GHz since step 30; its peers' 1.70 GHz", False),
    ],
)
def test_what_changed_with_the_slowdown_joins_the_evidence_and_the_diagnosis(
    readings, words, host
) -> None:
    job = Monitored(of_slow(**readings)).run()
    assert words in job.verdict.evidence
    diagnosis = job.detector.diagnosis()
    assert diagnosis.root_cause is (Cause.HOST if host else Cause.DEVICE)
    other = diagnosis.attribution[Cause.DEVICE if host else Cause.HOST]
    assert other < 0.1
    assert diagnosis.attribution[diagnosis.root_cause] > 0.6
    assert ("its host holds it back, not its device" in diagnosis.detail[0]) == host
    assert "Rank 3" in diagnosis.detail[0]


def test_where_no_rank_is_healthy_those_that_are_slow_less_are_its_peers() -> None:
    """As on a machine that all ranks share with other work."""

    def read(rank: int, step: int) -> dict[str, float]:
        return {**QUIET, "cpu_throttled": 0.4 if rank == 1 and step >= ONSET else 0.0}

    layout = Layout.grid(dp=2, pp=1, tp=1, layers=16)
    job = Job(name="small", layout=layout, microbatches=8, tokens_per_microbatch=8192)
    faults = [Fault(rank=0, factor=1.5, from_step=14), Fault(rank=1, factor=2.5, from_step=ONSET)]
    less, more = Monitored(read, job=job, faults=faults).run().detector.verdicts()
    assert less.status is more.status is Status.FAIL_SLOW
    assert "its cgroup throttled it 40% of the time since step 30; its peers 0%" in more.evidence
    assert all("; its peers" not in line for line in less.evidence)


def test_the_verdict_is_told_again_once_its_cause_is_known() -> None:
    job = Monitored(of_slow(cpu_throttled=0.3)).run()
    told = [verdict for verdict in job.changed if verdict.rank == SLOW]
    assert [v.status for v in told].count(Status.FAIL_SLOW) >= 2
    assert "throttled" not in " ".join(told[0].evidence)
    assert "throttled" in " ".join(told[-1].evidence)
    assert len([v for v in told if "throttled" in " ".join(v.evidence)]) == 1


def test_throttling_by_heat_is_told_with_the_clock_and_the_temperature() -> None:
    def read(rank: int, step: int) -> dict[str, float]:
        hot = rank == SLOW and step >= ONSET
        clock = 1200.0 if hot else 1700.0 + rank
        return {
            "sm_mhz": clock,
            "thermal_slowdown": float(hot),
            "temperature_c": 91.0 if hot else 66,
        }

    job = Monitored(read).run()
    words = "thermal throttling since step 30: SM clock 1.20 GHz, its peers' 1.70 GHz"
    assert f"{words}; its temperature 91 °C" in job.verdict.evidence
    assert job.detector.diagnosis().root_cause is Cause.DEVICE


def test_an_idle_clock_does_not_excuse_the_host_that_keeps_the_device_waiting() -> None:
    job = Monitored(of_slow(cpu_throttled=0.3, sm_mhz=900.0)).run()
    assert job.detector.diagnosis().root_cause is Cause.HOST


def test_an_error_of_the_device_is_told_if_no_other_rank_has_it() -> None:
    def read(rank: int, step: int) -> dict[str, float]:
        mine = rank == SLOW and step >= ONSET
        return {"xid": 48.0 if mine else 0.0, "nvlink_errors": 7.0}

    job = Monitored(read).run()
    assert "XID error 48 since step 30; its peers none" in job.verdict.evidence
    assert "NVLink" not in job.said()


def test_what_was_always_so_is_no_cause() -> None:
    job = Monitored(
        lambda rank, step: {"cpu_waiting": 0.4 if rank == SLOW else 0.0, "cpu_throttled": 0.0}
    ).run()
    assert "waited for a CPU" not in job.said()
    assert job.detector.diagnosis().root_cause is Cause.DEVICE


def test_the_onset_may_be_late_by_a_few_samples() -> None:
    read = of_slow(cpu_throttled=0.34)
    job = Monitored(lambda rank, step: read(rank, step + 8)).run()
    assert "its cgroup throttled it 34% of the time since step 30" in job.said()


def test_a_rank_that_was_slow_from_the_start_is_compared_with_its_peers_alone() -> None:
    job = Monitored(
        lambda rank, step: {"cpu_waiting": 0.4 if rank == SLOW else 0.0}, factor=1.6, onset=0
    ).run()
    assert "waited for a CPU 40% of the time since the first step seen" in job.said()


def test_a_change_that_is_too_small_for_the_slowdown_is_no_cause() -> None:
    job = Monitored(of_slow(cpu_waiting=0.04), factor=1.5).run()
    assert "waited for a CPU" not in job.said()
    assert "waited for a CPU" in Monitored(of_slow(cpu_waiting=0.04), factor=1.05).run().said()


def test_time_that_is_lost_counts_by_the_time_that_the_rank_computes() -> None:
    """A rank that computes for a tenth of the time, and waits for others, is slowed by 1.5x where
    it loses a thirtieth of the time."""
    read = of_slow(cpu_waiting=0.05)
    job = Monitored(lambda rank, step: {**read(rank, step), "busy": 0.1}).run()
    assert "waited for a CPU 5.0% of the time" in job.said()
    job = Monitored(lambda rank, step: {**read(rank, step), "busy": 0.9}).run()
    assert "waited for a CPU" not in job.said()


def test_healthy_ranks_have_no_evidence() -> None:
    job = Monitored(
        lambda rank, step: {"cpu_throttled": 0.5 if rank == 2 and step > 20 else 0.0}
    ).run()
    healthy = [v for v in job.detector.verdicts() if v.status is Status.HEALTHY]
    assert len(healthy) == 7
    assert [v.evidence for v in healthy] == [()] * 7
    assert "throttled" not in job.said()


def test_what_is_no_longer_slow_is_no_longer_explained() -> None:
    job = Monitored(of_slow(cpu_throttled=0.3))
    job.batches = steps_of(
        JOB,
        LENGTHS,
        steps=STEPS,
        seed=5,
        faults=[Fault(rank=SLOW, factor=1.5, from_step=ONSET, until_step=48)],
    )
    job.run()
    assert job.detector.verdicts()[SLOW].status is Status.HEALTHY
    assert job.detector.verdicts()[SLOW].evidence == ()


@cache
def without_sensors() -> Detector:
    return Monitored(None).run(50).detector


@settings(max_examples=15, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(SENSOR_NAMES), st.floats(0.0, 1e6, width=32), min_size=1, max_size=6
    ),
    st.dictionaries(st.sampled_from(SENSOR_NAMES), st.floats(0.0, 1e6, width=32), max_size=6),
)
def test_what_all_ranks_share_is_never_a_cause(before, after) -> None:
    job = Monitored(lambda rank, step: {**before, **(after if step >= ONSET else {})}).run(50)
    assert job.detector.verdicts() == without_sensors().verdicts()
    assert job.detector.diagnosis() == without_sensors().diagnosis()


@pytest.mark.parametrize("seed", range(6))
def test_scatter_is_no_cause(seed: int) -> None:
    rng = np.random.default_rng(seed)

    def read(rank: int, step: int) -> dict[str, float]:
        return {
            "cpu_waiting": float(rng.beta(2, 8)),
            "cpu_pressure": float(rng.beta(2, 8)),
            "major_faults": float(rng.poisson(20)),
            "sm_mhz": float(rng.normal(1700, 60)),
        }

    job = Monitored(read).run()
    assert all("; its peers" not in line for line in job.verdict.evidence), job.verdict.evidence


def test_without_samples_nothing_is_kept_and_nothing_changes() -> None:
    def beats(detector: Detector, step: int) -> None:
        for rank in RANKS:
            beat = Heartbeat(ranks=(rank,), process=f"p{rank}", sequence=step + 1, step=step)
            detector.take_heartbeats([beat], float(step))

    bare, beaten = Detector(JOB), Detector(JOB)
    faults = [Fault(rank=SLOW, factor=1.5, from_step=10)]
    for batch in steps_of(JOB, LENGTHS, steps=20, seed=5, faults=faults):
        assert bare.update(batch) == beaten.update(batch)
        beats(beaten, int(batch.step[0]))
    assert bare.verdicts() == beaten.verdicts()
    assert bare.diagnosis() == beaten.diagnosis()
    kept = unpack(beaten.save())["_processes"]["sensors"]["_history"]
    assert kept.pop("_numbers") == {}
    assert all(column.size == 0 for column in kept.values())


def test_the_samples_are_saved_and_go_on() -> None:
    whole, first = Monitored(of_slow(cpu_throttled=0.3)), Monitored(of_slow(cpu_throttled=0.3))
    whole.run()
    first.run(36)
    first.detector = Detector.restore(JOB, first.detector.save())
    first.run()
    assert first.detector.verdicts() == whole.detector.verdicts()
    assert first.detector.diagnosis() == whole.detector.diagnosis()
    assert first.detector.save() == whole.detector.save()


def test_what_was_compared_is_saved_with_the_samples() -> None:
    """A rank is compared when a sample of its own arrives, not when the state is loaded."""
    job = Monitored(of_slow(cpu_throttled=0.3)).run(50)
    for step in range(50, 53):
        for rank in set(RANKS) - {SLOW}:
            sample = SensorSample(seconds=1.0, **{**QUIET, "cpu_throttled": 0.25})
            beat = Heartbeat(
                ranks=(rank,), process=f"p{rank}", sequence=step, step=step, sensors=sample
            )
            job.detector.take_heartbeats([beat], float(step))
    assert "throttled" in job.said()
    restored = Detector.restore(JOB, job.detector.save())
    assert restored.verdicts() == job.detector.verdicts()
    assert restored.diagnosis() == job.detector.diagnosis()


def test_a_new_process_has_no_past() -> None:
    job = Monitored(of_slow(cpu_throttled=0.3)).run(55)
    assert "throttled" in job.said()
    beat = Heartbeat(ranks=(SLOW,), process="another", sequence=1, step=55)
    job.detector.take_heartbeats([beat], 60.0)
    assert "throttled" not in job.said()


def test_a_new_process_in_the_same_step_is_compared_anew() -> None:
    job = Monitored(of_slow(cpu_throttled=0.3)).run(54)
    assert "throttled" in job.said()
    sample = SensorSample(seconds=1.0, **QUIET)
    beat = Heartbeat(ranks=(SLOW,), process="another", sequence=1, step=53, sensors=sample)
    job.detector.take_heartbeats([beat], 60.0)
    assert "throttled" not in job.said()


def test_many_samples_of_a_long_step_count_as_one() -> None:
    """A step of a minute has sixty samples, and the past before it must not be lost."""

    class LongSteps(Monitored):
        def beat(self, step: int) -> None:
            for _ in range(15):
                super().beat(step)

    job = LongSteps(of_slow(cpu_throttled=0.3)).run()
    assert "its cgroup throttled it 30% of the time since step 30" in job.said()


def test_the_samples_follow_the_ranks_to_another_layout() -> None:
    job = Monitored(of_slow(cpu_throttled=0.3)).run(56)
    layout = Layout.grid(dp=4, pp=2, tp=1, layers=16)
    quotas = (5, 2, 5, 4)
    plan = Plan(version=1, layout=layout, quotas=quotas, from_step=56, step_ms=1.0, bound_ms=1.0)
    job.detector.apply_plan(plan)
    assert "its cgroup throttled it 30% of the time" in job.said()
