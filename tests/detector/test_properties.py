"""What must hold whatever the job: order, scale, restarts and repeats change nothing."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from detector import Detector, DetectorSettings
from detector.persistence import pack, unpack
from resihp.contracts import (
    ContractError,
    Job,
    Layout,
    Plan,
    Replica,
    Schedule,
    Stage,
    Status,
    TelemetryBatch,
)
from resihp.testing.scenarios import Fault, steps_of

LENGTHS = np.clip(np.exp(np.random.default_rng(0).normal(6.5, 1.2, 3000)), 16, 8192).astype(int)
LAYOUT = Layout.grid(dp=4, pp=2, tp=1, layers=16)
JOB = Job(name="job", layout=LAYOUT, microbatches=16, tokens_per_microbatch=8192)
FAULTS = (Fault(rank=5, factor=1.1, from_step=9),)
SETTINGS = DetectorSettings(train_after_steps=10)


def batches(*, with_lengths: bool, seed: int = 3, steps: int = 16) -> list[TelemetryBatch]:
    stream = steps_of(
        JOB, LENGTHS, steps=steps, seed=seed, faults=FAULTS, with_lengths=with_lengths
    )
    return list(stream)


def run(stream: list[TelemetryBatch], job: Job = JOB) -> Detector:
    detector = Detector(job, settings=SETTINGS)
    for batch in stream:
        detector.update(batch)
    return detector


@pytest.mark.parametrize("with_lengths", [True, False])
def test_only_the_slow_rank_is_named(with_lengths: bool) -> None:
    verdicts = run(batches(with_lengths=with_lengths)).verdicts()
    assert [v.rank for v in verdicts if v.status is Status.FAIL_SLOW] == [5]
    assert verdicts[5].slowdown == pytest.approx(1.1, abs=0.03)
    assert verdicts[5].interval is not None
    assert verdicts[5].interval[0] < 1.1 < verdicts[5].interval[1] + 0.02


@pytest.mark.parametrize("with_lengths", [True, False])
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 1000))
def test_permuting_ranks_permutes_verdicts(with_lengths: bool, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(LAYOUT.ranks))
    replicas = tuple(
        Replica(
            tuple(
                Stage(tuple(int(order[rank]) for rank in stage.ranks), stage.layers)
                for stage in replica.stages
            )
        )
        for replica in LAYOUT.replicas
    )
    job = replace(JOB, layout=Layout(replicas))
    stream = batches(with_lengths=with_lengths, steps=13)
    moved = [replace(batch, rank=order[batch.rank].astype(np.int32)) for batch in stream]
    before, after = run(stream).verdicts(), run(moved, job).verdicts()
    for verdict in before:
        other = after[order[verdict.rank]]
        assert (verdict.status, verdict.since_step) == (other.status, other.since_step)
        assert verdict.slowdown == pytest.approx(other.slowdown, rel=1e-6)


@pytest.mark.parametrize("with_lengths", [True, False])
@settings(max_examples=3, deadline=None)
@given(scale=st.floats(0.01, 100.0))
def test_scaling_all_times_changes_nothing(with_lengths: bool, scale: float) -> None:
    stream = batches(with_lengths=with_lengths, steps=13)
    scaled = [replace(batch, compute_ms=batch.compute_ms * scale) for batch in stream]
    for verdict, other in zip(run(stream).verdicts(), run(scaled).verdicts(), strict=True):
        assert (verdict.status, verdict.since_step) == (other.status, other.since_step)
        assert verdict.slowdown == pytest.approx(other.slowdown, rel=1e-3)


@pytest.mark.parametrize("with_lengths", [True, False])
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 1000))
@example(seed=135)  # a shard of the first step that comes after the second has begun
def test_late_repeated_and_partial_messages_change_nothing(with_lengths: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    stream = batches(with_lengths=with_lengths)
    messages = []
    for batch in stream:
        part = rng.integers(0, 3, len(batch))
        shards = [batch.select(part == i) for i in range(3)]
        messages += [shards[i] for i in rng.permutation(3)]
        if rng.random() < 0.3:
            messages.append(shards[0])
    for at in rng.integers(0, len(messages) - 1, 4).tolist():
        messages[at], messages[at + 1] = messages[at + 1], messages[at]
    assert run(messages).verdicts() == run(stream).verdicts()


@settings(max_examples=3, deadline=None)
@given(cut=st.integers(1, 15), with_lengths=st.booleans())
def test_a_restored_detector_continues_exactly(cut: int, with_lengths: bool) -> None:
    stream = batches(with_lengths=with_lengths)
    straight = Detector(JOB, settings=SETTINGS)
    resumed = Detector(JOB, settings=SETTINGS)
    for at, batch in enumerate(stream):
        straight.update(batch)
        if at == cut:
            half = batch.select(batch.rank < 4)
            resumed.update(half)
            resumed = Detector.restore(JOB, resumed.save(), settings=SETTINGS)
        resumed.update(batch)
    assert resumed.verdicts() == straight.verdicts()
    assert Detector.restore(JOB, straight.save(), settings=SETTINGS).save() == straight.save()


def test_a_state_that_was_not_saved_by_us_is_refused() -> None:
    with pytest.raises(ContractError, match="not a saved state"):
        Detector.restore(JOB, b"\x00nonsense")
    whole = run(batches(with_lengths=True, steps=2)).state()
    moved = unpack(run([]).save())["moved"]
    for state in ({}, {"moved": 3}, {"moved": moved}, {**whole, "moved": moved, "_recent": {}}):
        with pytest.raises(ContractError, match="not that of a detector"):
            Detector.restore(JOB, pack(state))


@settings(max_examples=3, deadline=None)
@given(rank=st.integers(0, 7), factor=st.sampled_from([1.15, 1.3, 2.0]))
def test_what_happens_to_one_rank_does_not_change_what_is_said_of_others(
    rank: int, factor: float
) -> None:
    fault = Fault(rank=rank, factor=factor, from_step=8)
    stream = steps_of(JOB, LENGTHS, steps=16, seed=5, faults=[fault])
    for verdict in run(list(stream)).verdicts():
        named = verdict.status is Status.FAIL_SLOW
        assert named == (verdict.rank == rank)


def test_foreign_ranks_and_older_plans_are_counted_and_ignored() -> None:
    stream = batches(with_lengths=True, steps=12)
    detector = run(stream)
    before = detector.verdicts()
    stranger = replace(stream[0], rank=np.full(len(stream[0]), 99, np.int32))
    assert detector.update(stranger) == []
    assert detector.update(stream[3]) == []
    assert detector.verdicts() == before


def test_the_same_plan_again_does_nothing_and_another_one_of_its_version_replaces_it() -> None:
    detector = run(batches(with_lengths=True, steps=12))
    fewer, more = Layout(LAYOUT.replicas[:2]), Layout(LAYOUT.replicas[:3])
    plan = Plan(version=1, layout=fewer, quotas=(8, 8))
    detector.apply_plan(plan)
    job = replace(JOB, layout=fewer, quotas=plan.quotas)
    for batch in steps_of(job, LENGTHS, steps=4, seed=4, first_step=12, plan_version=1):
        detector.update(batch)
    for same in (detector, Detector.restore(JOB, detector.save())):
        before = same.verdicts()
        same.apply_plan(plan)
        assert same.verdicts() == before
        same.apply_plan(Plan(version=1, layout=more, quotas=(6, 5, 5)))
        assert [verdict.rank for verdict in same.verdicts()] == sorted(more.ranks)


def test_stages_of_a_plan_run_the_chunks_that_they_hold() -> None:
    """Under an interleaved job too, which may leave its chunks; a step is whole without them."""
    both = Layout.grid(dp=1, pp=2, tp=1, layers=8, chunks=2)
    one = Layout.grid(dp=1, pp=2, tp=1, layers=8)
    job = Job(
        name="j", layout=both, microbatches=4, schedule=Schedule.INTERLEAVED, chunks=2,
    )  # fmt: skip
    detector = Detector(job)
    detector.apply_plan(Plan(version=1, layout=one, quotas=job.quotas))
    for same in (detector, Detector.restore(job, detector.save())):
        assert (same.job.layout, same.job.chunks) == (one, 1)
        plan = Plan(version=2, layout=both, quotas=job.quotas, schedule=Schedule.INTERLEAVED)
        same.apply_plan(plan)
        assert (same.job.layout, same.job.chunks) == (both, 2)


def test_stages_of_one_range_keep_the_chunks_of_their_own_schedule() -> None:
    one = Layout.grid(dp=2, pp=2, tp=1, layers=8)
    job = Job(
        name="j", layout=one, microbatches=8, schedule=Schedule.ZERO_BUBBLE, chunks=2,
    )  # fmt: skip
    detector = Detector(job)
    plan = Plan(version=1, layout=one, quotas=(5, 3), schedule=Schedule.ZERO_BUBBLE)
    detector.apply_plan(plan)
    assert (detector.job.quotas, detector.job.chunks) == ((5, 3), 2)


def test_chunks_come_back_with_the_schedule_of_the_job() -> None:
    one = Layout.grid(dp=2, pp=2, tp=1, layers=8)
    job = Job(name="j", layout=one, microbatches=8, schedule=Schedule.INTERLEAVED, chunks=2)
    live = Detector(job)
    restored = Detector.restore(job, live.save())
    plans = [(Schedule.ONE_F_ONE_B, 1), (Schedule.INTERLEAVED, 2), (Schedule.ONE_F_ONE_B, 1)]
    for version, (schedule, chunks) in enumerate(plans, 1):
        plan = Plan(version=version, layout=one, quotas=(4, 4), schedule=schedule)
        for detector in (live, restored):
            detector.apply_plan(plan)
            assert (detector.job.schedule, detector.job.chunks) == (schedule, chunks)
        restored = Detector.restore(job, restored.save())
        assert restored.job == live.job


def test_verdicts_of_records_that_came_before_their_plan_are_returned_by_the_next_update() -> None:
    stream = batches(with_lengths=True, steps=20)
    detector = run(stream[:6])
    for batch in stream[6:16]:
        assert detector.update(replace(batch, plan_version=1)) == []
    detector.apply_plan(Plan(version=1, layout=LAYOUT, quotas=JOB.quotas, from_step=6))
    for same in (Detector.restore(JOB, detector.save(), settings=SETTINGS), detector):
        (verdict,) = same.update(replace(stream[16], plan_version=1))
        assert (verdict.rank, verdict.status) == (5, Status.FAIL_SLOW)
        assert same.update(TelemetryBatch.empty(plan_version=1)) == []


def test_a_verdict_that_waits_to_be_told_is_not_told_of_a_rank_that_has_left_since() -> None:
    """A second plan before any record of the first: the rank was named as working, and slow."""
    fewer = Layout(tuple(replica for replica in LAYOUT.replicas if 5 not in replica.ranks))
    for layout, told in ((fewer, []), (LAYOUT, [(5, Status.FAIL_SLOW)])):
        detector = run(batches(with_lengths=True, steps=6))
        for batch in batches(with_lengths=True)[6:]:
            detector.update(replace(batch, plan_version=1))
        detector.apply_plan(Plan(version=1, layout=LAYOUT, quotas=JOB.quotas))
        assert list(detector._pending) == [5]
        quotas = JOB.quotas if layout is LAYOUT else (6, 5, 5)
        detector.apply_plan(Plan(version=2, layout=layout, quotas=quotas))
        verdicts = detector.update(TelemetryBatch.empty(plan_version=2))
        assert [(verdict.rank, verdict.status) for verdict in verdicts] == told
        status = {verdict.rank: verdict.status for verdict in detector.verdicts()}
        assert status[5] is Status.FAIL_SLOW  # on probation where it has left


def test_records_of_a_plan_that_is_still_to_come_are_counted_once() -> None:
    stream = batches(with_lengths=True)
    detector = run(stream[:6])
    for batch in stream[6:16]:
        detector.update(replace(batch, plan_version=3))
    ahead = sum(map(len, stream[6:16]))
    for version in (1, 2, 3):
        assert detector.counters["ahead"] == ahead
        detector.apply_plan(Plan(version=version, layout=LAYOUT, quotas=JOB.quotas))
    assert detector.counters["ahead"] == ahead
    ((verdict,), _) = (detector.update(TelemetryBatch.empty(plan_version=3)) for _ in range(2))
    assert (verdict.rank, verdict.status) == (5, Status.FAIL_SLOW)


def test_a_rank_that_falls_silent_is_inconclusive_until_it_is_back() -> None:
    stream = batches(with_lengths=True, steps=24)
    detector = Detector(JOB, settings=SETTINGS)
    for batch in stream[:6]:
        detector.update(batch)
    for batch in stream[6:16]:
        detector.update(batch.select(batch.rank != 2))
    assert detector.verdicts()[2].status is Status.INCONCLUSIVE
    assert "no records" in detector.verdicts()[2].evidence[0]
    for batch in stream[16:]:
        detector.update(batch)
    assert detector.verdicts()[2].status is Status.HEALTHY


@pytest.mark.parametrize("with_lengths", [True, False])
def test_a_rank_falls_silent_in_the_same_step_however_the_records_are_cut(
    with_lengths: bool,
) -> None:
    stream = batches(with_lengths=with_lengths, steps=20)
    stream[8:] = [batch.select(batch.rank != 2) for batch in stream[8:]]
    whole = TelemetryBatch.concat(stream)
    by_rank = [whole.select(whole.rank == rank) for rank in LAYOUT.ranks]
    by_step = run(stream)
    assert by_step.finish() == []
    assert by_step.verdicts()[2].since_step == 10
    for messages in ([whole], by_rank):
        detector = run(messages)
        detector.finish()
        assert detector.verdicts() == by_step.verdicts()
