"""Records that no sane trainer sends, and ways of counting that some do."""

from dataclasses import replace

import numpy as np
import pytest

from detector import Detector, DetectorSettings
from detector.diagnosis import diagnose
from detector.expectation.cross_stage import CrossStageModel
from detector.rank_table import RankTable
from detector.steps import progress
from detector.steps.assembler import StepAssembler, numbered
from detector.whatif.dense_records import DenseRecords
from resihp.contracts import Job, Layout, Status, TelemetryBatch, Verdict
from resihp.contracts.telemetry import MOST_MS
from resihp.testing.scenarios import Fault, steps_of

LENGTHS = np.clip(np.exp(np.random.default_rng(0).normal(6.5, 1.2, 3000)), 16, 8192).astype(int)
JOB = Job(name="job", layout=Layout.grid(dp=4, pp=2, tp=1, layers=8), microbatches=16)
SLOW = 3


def stream(*, with_lengths: bool, faulty: bool = False, steps: int = 24) -> list[TelemetryBatch]:
    faults = [Fault(rank=SLOW, factor=1.2, from_step=12)] if faulty else []
    made = steps_of(JOB, LENGTHS, steps=steps, seed=3, faults=faults, with_lengths=with_lengths)
    return list(made)


def judged(batches: list[TelemetryBatch]) -> set[int]:
    """Everyone who was ever named; the diagnosis must be possible as well."""
    detector, named = Detector(JOB), set()
    for batch in batches:
        named |= names(detector.update(batch))
    detector.diagnosis()
    assert Detector.restore(JOB, detector.save()).save() == detector.save()
    return named


def test_one_record_with_a_number_of_millions_makes_no_array_of_so_many() -> None:
    """Of a job with so many microbatches any number is one that it may have."""
    job = replace(JOB, quotas=(), microbatches=2**22)
    assembler = StepAssembler(RankTable.of(job.layout), job.quotas, 1)
    batch = stream(with_lengths=False, steps=1)[0]
    odd = np.arange(len(batch)) == len(batch) - 1
    batch = replace(batch, microbatch=np.where(odd, 2**20 - 1, batch.microbatch))
    list(assembler.add(batch))
    (step,) = assembler.finish()
    assert len(step) == len(batch)
    assert step.microbatch.max() < len(batch)


def test_one_group_of_all_ranks() -> None:
    """Time that grows with the square of the ranks would be hours, for every job of a worker."""
    ranks = 40_000
    layout = Layout.grid(dp=1, pp=1, tp=ranks, layers=1, units=ranks)
    job = Job(name="job", layout=layout, microbatches=1)
    assert CrossStageModel(job, RankTable.of(layout)).references.shape == (ranks, 5)


@pytest.mark.parametrize("with_lengths", [True, False])
@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("tokens", 2**62),
        ("sum_sq_len", 2**63 - 1),
        ("max_len", 2**62),
        ("sequences", 2**62),
        ("compute_ms", MOST_MS),
        ("compute_ms", 1e-300),
        ("compute_ms", 0.0),
        ("wait_ms", MOST_MS),
        ("microbatch", 2**31 - 1),
        ("chunk", 2**15 - 1),
        ("rank", 2**31 - 1),
        ("peer", 2**31 - 1),
    ],
)
@pytest.mark.parametrize("share", [0.02, 1.0])
def test_absurd_values_break_nothing_and_blame_nobody(
    column: str, value: float, share: float, with_lengths: bool
) -> None:
    rng, odd = np.random.default_rng(0), []
    for batch in stream(with_lengths=with_lengths, steps=12):
        values = getattr(batch, column).copy()
        values[rng.random(values.size) < share] = value
        odd.append(replace(batch, **{column: values}))
    assert judged(odd) == set()


@pytest.mark.parametrize("with_lengths", [True, False])
def test_passes_of_no_time_teach_nothing(with_lengths: bool) -> None:
    """All of a step, as of a clock that stood still, and many in the others."""
    rng, odd = np.random.default_rng(0), []
    for batch in stream(with_lengths=with_lengths, faulty=True, steps=32):
        lost = (rng.random(len(batch)) < 0.3) | (batch.step == 0)
        odd.append(replace(batch, compute_ms=np.where(lost, 0.0, batch.compute_ms)))
    assert judged(odd) == {SLOW}


@pytest.mark.parametrize("with_lengths", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_times_of_all_sizes_break_nothing(seed: int, with_lengths: bool) -> None:
    rng, odd = np.random.default_rng(seed), []
    for batch in stream(with_lengths=with_lengths, steps=8):
        some = rng.random(len(batch)) < 0.1
        sizes = np.exp(rng.normal(0.0, 1.0 + 2.0 * seed, len(batch)))
        times = np.where(rng.random(len(batch)) < 0.5, 1e-6, batch.compute_ms * sizes)
        odd.append(replace(batch, compute_ms=np.clip(times, 0.0, MOST_MS)).select(~some))
    judged(odd)


@pytest.mark.parametrize("with_lengths", [True, False])
def test_microbatches_may_be_counted_through_the_whole_job(with_lengths: bool) -> None:
    usual = stream(with_lengths=with_lengths, faulty=True)
    counted = [replace(b, microbatch=b.microbatch + 1_000_000 + 4 * b.step) for b in usual]
    assert judged(counted) == judged(usual) == {SLOW}


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_records_of_no_microbatch_break_nothing(share: float) -> None:
    """Without lengths, nothing is expected of them; the others are compared as ever."""
    rng, odd = np.random.default_rng(0), []
    for batch in stream(with_lengths=False, faulty=True):
        lost = rng.random(len(batch)) < share
        odd.append(replace(batch, microbatch=np.where(lost, -1, batch.microbatch)))
    assert judged(odd) == (set() if share == 1.0 else {SLOW})


def test_the_work_of_a_record_of_no_microbatch_is_not_that_of_the_first() -> None:
    places, (batch, *_) = RankTable.of(JOB.layout), stream(with_lengths=False, steps=1)
    lost = replace(batch.select(batch.rank == SLOW), microbatch=np.full(8, -1))
    mixed = TelemetryBatch.concat([batch, lost])
    model = CrossStageModel(JOB, places)
    found = model.residuals(mixed, places.index(mixed.rank), np.ones(places.size, bool))
    assert found.expected_ms is not None
    assert np.isfinite(found.expected_ms).tolist() == [True] * len(batch) + [False] * len(lost)


def test_steps_may_be_far_apart_and_far_on() -> None:
    usual = stream(with_lengths=True, faulty=True)
    assert judged([replace(b, step=b.step * 1000 + 2**52) for b in usual]) == {SLOW}


def astray(step: int) -> TelemetryBatch:
    """A record of rank 0 in a step that the job is nowhere near."""
    return TelemetryBatch(rank=[0], step=[step], microbatch=[0], op=[0], compute_ms=[10.0])


@pytest.mark.parametrize("at", [0, 1, 20])
def test_steps_that_one_rank_makes_up_change_nothing(at: int) -> None:
    usual = stream(with_lengths=True, faulty=True, steps=32)
    odd = usual[:at] + [astray(2**50 + step) for step in range(8)] + usual[at:]
    assert judged(odd) == {SLOW}


def test_large_messages_of_a_plan_that_never_comes_are_not_all_kept() -> None:
    detector, zeros = Detector(JOB), np.zeros(300_000, int)
    large = TelemetryBatch(
        rank=zeros, step=zeros, microbatch=zeros, op=zeros, compute_ms=zeros, plan_version=9
    )
    sizes = []
    for _ in range(5):
        assert detector.update(large) == []
        sizes.append(len(detector.save()))
    assert sizes[0] < sizes[1] < sizes[2] == sizes[3] == sizes[4]


def test_thousands_of_microbatches_of_one_rank_make_the_diagnosis_no_larger() -> None:
    """They took 1 GB with 64 steps, and a minute in which a worker did nothing else."""
    job = Job(name="job", layout=Layout.grid(dp=8, pp=4, tp=1, layers=8), microbatches=32)
    steps = list(steps_of(job, LENGTHS, steps=32, seed=3))
    count, odd = 2_000, list[TelemetryBatch]()
    for step in steps:
        made_up = TelemetryBatch(
            rank=np.zeros(count, int), step=np.full(count, step.step[0]), op=np.zeros(count, int),
            microbatch=np.arange(100, 100 + count), compute_ms=np.full(count, 5.0),
            tokens=np.full(count, 900), sum_sq_len=np.full(count, 9_000),
        )  # fmt: skip
        odd.append(TelemetryBatch.concat([step, made_up]))
    usual, broken = (DenseRecords.of(job, job.layout, batches) for batches in (steps, odd))
    assert usual is not None
    assert broken is not None
    assert broken.passes.size <= 2**20
    assert np.array_equal(broken.passes[..., :4], usual.passes, equal_nan=True)
    assert diagnose(job, job.layout, odd).steps == 32


def made_up(batch: TelemetryBatch, count: int) -> TelemetryBatch:
    """A step in which rank 0 sends many forward passes besides its own."""
    zeros = np.zeros(count, int)
    more = TelemetryBatch(
        rank=zeros, step=zeros + batch.step[0], op=zeros, microbatch=100 + np.arange(count),
        compute_ms=np.full(count, 5.0),
    )  # fmt: skip
    return TelemetryBatch.concat([batch, more])


@pytest.mark.parametrize("alone", [True, False])
def test_thousands_of_microbatches_of_one_rank_make_no_step_larger(*, alone: bool) -> None:
    """A step of 8,000 took 20 s and a gigabyte, also where it was of that rank alone."""
    job = Job(name="job", layout=Layout.grid(dp=64, pp=4, tp=1, layers=8), microbatches=256)
    assembler = StepAssembler(RankTable.of(job.layout), job.quotas, job.chunks)
    (batch,) = steps_of(job, LENGTHS, steps=1, seed=3, with_lengths=False)
    sent = made_up(batch, 8_000)
    (step,) = [
        *assembler.add(sent.select(sent.rank == 0) if alone else sent),
        *assembler.finish(),
    ]
    usual = step.microbatch < 4
    assert int(step.microbatch.max()) == 31
    assert np.count_nonzero(usual) == (8 if alone else len(batch))
    assert assembler.excess == 4 + 8_000 - 32


def test_the_microbatches_of_the_largest_quota_are_all_kept() -> None:
    job = Job(
        name="job",
        layout=Layout.grid(dp=64, pp=4, tp=1, layers=8),
        microbatches=63 + 200,
        quotas=(200,) + (1,) * 63,
    )
    detector, batches = Detector(job), list(steps_of(job, LENGTHS, steps=1, seed=3))
    for batch in batches:
        detector.update(batch)
    assert detector.counters["excess"] == 0
    assert [len(step) for step in detector._recent.batches()] == [2 * 4 * (63 + 200)]


def test_records_of_microbatches_that_are_left_out_are_counted() -> None:
    detector, steps = Detector(JOB), stream(with_lengths=False, steps=2)
    for batch in steps:
        detector.update(made_up(batch, 2_000))
    assert detector.counters["excess"] == 2 * (4 + 2_000 - 1_024)


def test_of_replicas_with_other_numbers_of_microbatches_none_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their job says that each has one: as of a loop that was described before it ran."""
    monkeypatch.setattr("detector.whatif.dense_records._FEW_CELLS", 0)
    layout = Layout.grid(dp=8, pp=2, tp=1, layers=8)
    job = Job(name="job", layout=layout, microbatches=8 * 24)
    replica, batches = RankTable.of(layout).dp, list[TelemetryBatch]()
    for step in steps_of(job, LENGTHS, steps=8, seed=3):
        batches.append(step.select(step.microbatch < 3 * (1 + replica[step.rank])))
    told = replace(job, microbatches=8, quotas=())
    found = DenseRecords.of(told, layout, batches)
    assert found is not None
    assert found.quotas == tuple(range(3, 27, 3))
    assert np.isfinite(found.passes).sum() == sum(map(len, batches))


def test_numbers_are_dense_within_each_part() -> None:
    parts, microbatch = np.array([0, 0, 0, 1, 1]), np.array([9, 7, -1, 8, 9])
    assert numbered(parts, microbatch, 2).tolist() == [1, 0, -1, 0, 1]
    assert numbered(parts, microbatch, 10).tolist() == microbatch.tolist()


@pytest.mark.parametrize("with_lengths", [True, False])
@pytest.mark.parametrize("factors", [(1.7, 1.7), (1.7, 0.6), (1.0, 1.25)])
def test_a_model_that_changes_while_the_job_runs_blames_nobody(
    factors: tuple[float, float], with_lengths: bool
) -> None:
    """All replicas' stages take other times from step 16 on; a device that slows later is found."""
    first = [replica.stages[0].ranks[0] for replica in JOB.layout.replicas]
    faults = [Fault(rank=SLOW, factor=1.2, from_step=32)]
    changed = []
    for batch in steps_of(JOB, LENGTHS, steps=40, seed=3, faults=faults, with_lengths=with_lengths):
        factor = np.where(np.isin(batch.rank, first), *factors) if batch.step[0] >= 16 else 1.0
        changed.append(replace(batch, compute_ms=batch.compute_ms * factor))
    assert judged(changed) == {SLOW}
    assert judged(changed[:32]) == set()


def test_a_rank_whose_messages_always_come_last_is_waited_for_again() -> None:
    """Messages of many steps: a rank that was late once, as at a start, must not stay so."""
    batches, cut = stream(with_lengths=True, faulty=True, steps=40), 4
    detector, named, held = Detector(JOB), set(), list[TelemetryBatch]()
    for first in range(0, 40, cut):
        part = TelemetryBatch.concat(batches[first : first + cut])
        late = part.select(part.rank == SLOW)
        for rank in (r for r in JOB.layout.ranks if r != SLOW):
            named |= names(detector.update(part.select(part.rank == rank)))
        held.append(late)
        while held and first >= 3 * cut:
            named |= names(detector.update(held.pop(0)))
    assert named == {SLOW}
    assert {v.status for v in detector.verdicts() if v.rank != SLOW} == {Status.HEALTHY}


def names(verdicts: list[Verdict]) -> set[int]:
    return {verdict.rank for verdict in verdicts if verdict.status is Status.FAIL_SLOW}


def test_whole_steps_that_overtake_each_other_are_kept() -> None:
    """From the second time on: numbers of steps may have gaps, so the first is not waited for."""
    batches = stream(with_lengths=True)
    detector = Detector(JOB)
    for index in range(len(batches)):
        detector.update(batches[index ^ 1])
    detector.finish()
    assert detector.diagnosis().steps == len(batches) - 1


def test_steps_with_gaps_are_not_waited_for_once_nothing_overtakes() -> None:
    batches = stream(with_lengths=True)
    detector = Detector(JOB)
    for index in (1, 0, 3, 2):
        detector.update(batches[index])
    assert [steps_after(detector, batches[index]) for index in (5, 8, 12)] == [3, 3, 3]
    assert [steps_after(detector, batches[index]) for index in (15, 17, 20)] == [7, 8, 9]


def steps_after(detector: Detector, batch: TelemetryBatch) -> int:
    detector.update(batch)
    return detector.diagnosis().steps


OFF = 5


def by_rank(batch: TelemetryBatch, off: int) -> list[TelemetryBatch]:
    """One message of each rank; the numbers of steps of one rank are off."""
    messages = [batch.select(batch.rank == rank) for rank in range(8)]
    messages[OFF] = replace(messages[OFF], step=messages[OFF].step + off)
    return messages


@pytest.mark.parametrize("from_step", [0, 6])
@pytest.mark.parametrize("off", [-5_000, -300, 300, 5_000, 90_000, 200_000])
def test_a_rank_whose_steps_are_off_is_inconclusive_and_hides_no_other(
    off: int, from_step: int
) -> None:
    """As of a process that was replaced and counts from 0, or counts something else."""
    detector, named = Detector(JOB), set()
    faults = [Fault(rank=SLOW, factor=1.2, from_step=5_016)]
    for at, batch in enumerate(
        steps_of(JOB, LENGTHS, steps=30, seed=3, faults=faults, first_step=5_000)
    ):
        for message in by_rank(batch, off if at >= from_step else 0):
            named |= names(detector.update(message))
    status = {verdict.rank: verdict.status for verdict in detector.verdicts()}
    assert named == {SLOW}
    assert status.pop(SLOW) is Status.FAIL_SLOW
    assert status.pop(OFF) is Status.INCONCLUSIVE
    assert Status.INCONCLUSIVE not in status.values()
    assert (detector.counters["late"] > 0) is (off < 0)
    assert detector.diagnosis().steps >= 28


@pytest.mark.parametrize("off", [10, 300])
def test_steps_far_ahead_of_most_ranks_stay_few(off: int) -> None:
    """Of a rank that is ahead of the others by as many steps all the time."""
    detector, sizes = Detector(JOB, settings=DetectorSettings(train=False)), list[int]()
    (batch,) = steps_of(JOB, LENGTHS, steps=1, seed=3)
    for at in range(400):
        for message in by_rank(replace(batch, step=batch.step + at), off):
            detector.update(message)
        sizes.append(len(detector.save()) if at % 100 == 99 else 0)
    assert max(sizes) < 1.1 * sizes[199]
    assert detector.verdicts()[0].step >= 395


def held(detector: Detector) -> int:
    """Records of open steps."""
    opened = detector._layout_state.assembler._records.values()
    return sum(len(part) for each in opened for part in each.parts)


def test_few_steps_wait_for_a_lost_message_where_messages_hold_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of senders that are asked for fewer messages, one of which is refused. Those of three more
    waited, half a gigabyte of 16,384 ranks."""
    most, together = 640, 6  # records, ten steps of them; steps of a message
    monkeypatch.setattr(progress, "_MUCH_KEPT", most)
    detector, named, kept = Detector(JOB), set(), list[int]()
    steps = stream(with_lengths=True, faulty=True, steps=48)
    for at in range(0, len(steps), together):
        messages = by_rank(TelemetryBatch.concat(steps[at : at + together]), 0)
        for message in messages[at == together :]:
            named |= names(detector.update(message))
            kept.append(held(detector))
    assert max(kept) <= most
    assert named == {SLOW}
    assert detector.counters["late"] == 0
    again = Detector.restore(JOB, detector.save())
    assert again.save() == detector.save()


def test_the_steps_of_an_outage_wait_for_all_ranks_while_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outage = by_rank(TelemetryBatch.concat(stream(with_lengths=True, faulty=True)), 0)
    monkeypatch.setattr(progress, "_MUCH_KEPT", 640)
    detector, named = Detector(JOB), set()
    for message in outage:
        named |= names(detector.update(message))
    assert named == {SLOW}
    assert detector.counters["late"] == 0
    monkeypatch.setattr(progress, "_MOST_KEPT", 640)
    detector, kept = Detector(JOB), list[int]()
    for message in outage:
        named |= names(detector.update(message))
        kept.append(held(detector))
    assert max(kept) <= 640
    assert named == {SLOW}


def test_more_than_half_of_the_ranks_may_fall_silent_in_the_middle_of_a_step() -> None:
    detector = Detector(JOB)
    for batch in stream(with_lengths=True, steps=24):
        gone = (batch.rank >= 3) & ((batch.step > 8) | ((batch.step == 8) & (batch.microbatch > 1)))
        for message in by_rank(batch.select(~gone), 0):
            detector.update(message)
    status = [verdict.status for verdict in detector.verdicts()]
    assert status == [Status.HEALTHY] * 3 + [Status.INCONCLUSIVE] * 5
    assert detector.verdicts()[0].step == 23


def test_a_step_is_not_waited_for_long_after_a_job_has_fewer_microbatches() -> None:
    """The first steps have four of each replica, all later ones three."""
    detector, judged_at = Detector(JOB), list[int | None]()
    for batch in stream(with_lengths=True, steps=32):
        detector.update(batch.select((batch.microbatch < 3) | (batch.step < 8)))
        judged_at.append(detector.verdicts()[0].step)
    assert judged_at[7] == 7
    assert judged_at[12] == 9
    assert judged_at[24:] == list(range(24, 32))


def test_the_rest_of_a_step_is_waited_for_again_where_it_comes_late() -> None:
    """For ten steps one rank's second message of a step overtakes none of the next four."""
    detector, held = Detector(JOB), list[TelemetryBatch]()
    for batch in stream(with_lengths=True, steps=40):
        at = int(batch.step[0])
        rest = (batch.rank == OFF) & (batch.microbatch >= 2)
        detector.update(batch.select(~rest))
        held.append(batch.select(rest))
        while held and (at < 8 or at >= 20 or len(held) > 5):
            detector.update(held.pop(0))
    whole = [len(step) for step in detector._recent.batches()]
    assert whole[:8] == [64] * 8
    assert whole[-12:] == [64] * 12


def test_the_first_messages_after_an_outage_are_judged_with_all_ranks() -> None:
    """Each of hundreds of steps of one rank."""
    outage = TelemetryBatch.concat(stream(with_lengths=True, faulty=True, steps=300))
    detector, named = Detector(JOB), set()
    for message in by_rank(outage, 0):
        named |= names(detector.update(message))
    assert named == {SLOW}
    assert detector.counters["late"] == detector.counters["astray"] == 0
    assert detector.verdicts()[SLOW].since_step == pytest.approx(12, abs=1)
