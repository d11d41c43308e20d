"""A job that starts again from a checkpoint, with nobody telling the detector."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from detector import Detector
from detector.steps.restarts import MessagesBehind
from resihp.contracts import Cause, Heartbeat, Job, Layout, Plan, Status, TelemetryBatch
from resihp.testing.scenarios import Fault, steps_of

LENGTHS = np.clip(np.exp(np.random.default_rng(0).normal(6.5, 1.2, 3000)), 16, 8192).astype(int)
JOB = Job(
    name="job",
    layout=Layout.grid(dp=4, pp=2, tp=1, layers=16),
    microbatches=16,
    tokens_per_microbatch=8192,
)


def by_rank(batches: Iterable[TelemetryBatch]) -> list[TelemetryBatch]:
    return [batch.select(batch.rank == rank) for batch in batches for rank in range(8)]


def test_the_steps_after_a_restart_are_judged() -> None:
    detector = Detector(JOB)
    for message in by_rank(steps_of(JOB, LENGTHS, steps=30, seed=1)):
        detector.update(message)
    fault = Fault(rank=5, factor=1.1, from_step=16)
    for message in by_rank(steps_of(JOB, LENGTHS, steps=16, seed=2, first_step=10, faults=[fault])):
        detector.update(message)
    assert detector.counters["restarts"] == 1
    (named,) = [v for v in detector.verdicts() if v.status is not Status.HEALTHY]
    assert (named.rank, named.status, named.step) == (5, Status.FAIL_SLOW, 25)
    assert named.since_step == pytest.approx(16, abs=1)


def test_a_restart_from_step_0_leaves_no_one_named_for_it() -> None:
    detector = Detector(JOB)
    for first in (40, 0):
        for batch in steps_of(JOB, LENGTHS, steps=20, seed=3, first_step=first):
            detector.update(batch)
    assert detector.counters["restarts"] == 1
    assert {v.status for v in detector.verdicts()} == {Status.HEALTHY}
    assert detector.verdicts()[0].step == 19


def test_old_messages_of_a_few_ranks_are_only_late() -> None:
    detector = Detector(JOB)
    batches = list(steps_of(JOB, LENGTHS, steps=24, seed=4))
    for batch in batches:
        detector.update(batch)
    before = detector.verdicts()
    for batch in batches[2:12]:
        detector.update(batch.select(batch.rank < 3))
    assert detector.counters["restarts"] == 0
    assert detector.verdicts() == before


def test_a_restart_survives_saving_half_way() -> None:
    detector = Detector(JOB)
    for batch in steps_of(JOB, LENGTHS, steps=20, seed=5):
        detector.update(batch)
    messages = by_rank(steps_of(JOB, LENGTHS, steps=8, seed=6))
    for message in messages[:11]:
        detector.update(message)
    detector = Detector.restore(JOB, detector.save())
    for message in messages[11:]:
        detector.update(message)
    assert detector.counters["restarts"] == 1
    assert detector.verdicts()[0].step == 7


def test_a_name_is_no_younger_than_the_step_to_which_the_job_goes_back() -> None:
    fault, detector = Fault(rank=5, factor=1.3, from_step=18), Detector(JOB)
    for message in by_rank(steps_of(JOB, LENGTHS, steps=24, seed=1, faults=[fault])):
        detector.update(message)
    assert detector.verdicts()[5].since_step == 18
    fault = Fault(rank=5, factor=1.3, from_step=0)
    for message in by_rank(steps_of(JOB, LENGTHS, steps=5, seed=2, first_step=10, faults=[fault])):
        detector.update(message)
    assert detector.counters["restarts"] == 1
    named = detector.verdicts()[5]
    assert (named.status, named.since_step, named.step) == (Status.FAIL_SLOW, 10, 14)


def plan_of(version: int, layout: Layout = JOB.layout, quotas: tuple[int, ...] = (4,) * 4) -> Plan:
    return Plan(version=version, layout=layout, quotas=quotas)


def slow_before_a_plan() -> Detector:
    """A detector that has named rank 5 since step 18, in step 23."""
    fault, detector = Fault(rank=5, factor=1.5, from_step=18), Detector(JOB)
    for batch in steps_of(JOB, LENGTHS, steps=24, seed=1, faults=[fault]):
        detector.update(batch)
    assert detector.verdicts()[5].since_step == 18
    return detector


def test_a_plan_with_which_the_job_also_goes_back() -> None:
    detector = slow_before_a_plan()
    detector.apply_plan(plan_of(1))
    until_14 = [Fault(rank=5, factor=1.5, from_step=0, until_step=14)]
    first, *rest = steps_of(
        JOB, LENGTHS, steps=8, seed=2, first_step=10, faults=until_14, plan_version=1
    )
    detector.update(first)
    named = detector.verdicts()[5]
    assert (named.status, named.since_step, named.step) == (Status.FAIL_SLOW, 10, 10)
    diagnosis = detector.diagnosis()
    assert diagnosis.root_cause is Cause.DEVICE
    assert "since step 10, which costs" in diagnosis.detail[0]
    for batch in rest:
        detector.update(batch)
    healthy = detector.verdicts()[5]
    assert (healthy.status, healthy.since_step, healthy.step) == (Status.HEALTHY, 14, 17)


def test_a_rank_that_comes_back_before_the_step_of_its_onset() -> None:
    detector = slow_before_a_plan()
    fewer = Layout(tuple(replica for replica in JOB.layout.replicas if 5 not in replica.ranks))
    plans = [plan_of(1, fewer, (6, 5, 5)), plan_of(2)]
    for plan, first_step in zip(plans, (10, 14), strict=True):
        detector.apply_plan(plan)
        job = replace(JOB, layout=plan.layout, quotas=plan.quotas)
        fault = Fault(rank=5, factor=1.5, from_step=0)
        for batch in steps_of(
            job, LENGTHS, steps=4, seed=2, first_step=first_step, faults=[fault],
            plan_version=plan.version,
        ):  # fmt: skip
            detector.update(batch)
    named = detector.verdicts()[5]
    assert (named.status, named.since_step, named.step) == (Status.FAIL_SLOW, 14, 17)


@pytest.mark.parametrize("by", ["step", "rank", "five steps of a rank"])
def test_whole_steps_that_are_sent_again_change_nothing(by: str) -> None:
    """They were a restart: all pasts were lost, and the slow device was healthy again."""
    steps = list(
        steps_of(JOB, LENGTHS, steps=40, seed=1, faults=[Fault(rank=5, factor=1.2, from_step=22)])
    )
    again = steps[12:22]
    if by == "rank":
        again = by_rank(again)
    elif by == "five steps of a rank":
        again = by_rank(TelemetryBatch.concat(again[at : at + 5]) for at in (0, 5))
    detector, undisturbed = Detector(JOB), Detector(JOB)
    for batch in steps[:26]:
        detector.update(batch)
        undisturbed.update(batch)
    assert undisturbed.verdicts()[5].status is Status.FAIL_SLOW
    for message in again:
        detector = Detector.restore(JOB, detector.save())
        assert detector.update(message) == []
    for batch in steps[26:]:
        assert detector.update(batch) == undisturbed.update(batch)
    assert detector.counters["restarts"] == 0
    assert detector.verdicts() == undisturbed.verdicts()


def test_other_records_of_the_same_steps_are_a_restart_also_after_known_ones() -> None:
    detector, steps = Detector(JOB), list(steps_of(JOB, LENGTHS, steps=30, seed=1))
    for message in by_rank([*steps, *steps[20:24]]):
        detector.update(message)
    assert detector.counters["restarts"] == 0
    for message in by_rank(steps_of(JOB, LENGTHS, steps=6, seed=2, first_step=20)):
        detector.update(message)
    assert detector.counters["restarts"] == 1
    assert detector.verdicts()[0].step == 25


def test_passes_that_take_as_long_in_every_step_do_not_tell_a_restart_from_a_repetition() -> None:
    """As records made by hand do: the job goes back, as it did before there were digests."""
    detector, (batch,) = Detector(JOB), steps_of(JOB, [500], steps=1, seed=1)
    for step in (*range(30), *range(20, 26)):
        detector.update(replace(batch, step=np.full(len(batch), step)))
    assert detector.counters["restarts"] == 1
    assert detector.verdicts()[0].step == 25


@pytest.mark.parametrize("gap", [1, 10])
@pytest.mark.parametrize(
    ("late", "restarts"), [([22, 20, 21], 0), ([22, 10, 11, 12], 1)], ids=["late", "back"]
)
def test_late_steps_whose_numbers_have_gaps_are_no_restart(
    gap: int, late: list[int], restarts: int
) -> None:
    detector = Detector(JOB)
    steps = list(steps_of(JOB, LENGTHS, steps=30, seed=1))
    other = list(steps_of(JOB, LENGTHS, steps=30, seed=2))
    sent = [*steps[:20], *(other[at] for at in late), *other[late[-1] + 1 if restarts else 23 :]]
    for batch in sent:
        detector.update(replace(batch, step=batch.step * gap))
    assert detector.counters["restarts"] == restarts
    assert detector.verdicts()[0].step == 29 * gap


def test_a_rank_that_stays_far_back_takes_little_memory() -> None:
    """Messages of thousands of records: 300 MB were kept, and saved with the state."""
    job = Job(name="many", layout=Layout.grid(dp=128, pp=1, tp=1, layers=1), microbatches=128)
    detector, many, sizes = Detector(job), np.arange(2_000), list[int]()
    for batch in steps_of(job, LENGTHS, steps=4, seed=3, first_step=5_000):
        detector.update(batch)
    for at in range(192):
        far = TelemetryBatch(
            rank=np.full(2_000, 7), step=many // 4 + 500 * (at % 4), microbatch=many // 2 % 2,
            op=many % 2, compute_ms=np.full(2_000, 5.0 + at),
        )  # fmt: skip
        detector.update(far)
        if at % 64 == 63:
            sizes.append(len(detector.save()))
    assert detector.counters["restarts"] == 0
    assert sizes[2] < 1.01 * sizes[0]
    assert Detector.restore(job, detector.save()).save() == detector.save()


def test_of_the_ranks_that_went_back_the_newest_messages_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("detector.steps.restarts._MOST_RECORDS", 2_000)
    behind = MessagesBehind(np.arange(4))
    for step in range(63):
        behind.add(forward([3], step))
    behind.add(forward([0, 1, 2, 3], 63))
    assert [int(message.step[0]) for message in behind.kept()] == list(range(32, 64))
    assert behind.kept()[-1].rank.tolist() == [0, 1, 2, 3]
    for step in (64, 65):
        behind.add(forward([2] * 1_500, step))
    assert [int(message.step[0]) for message in behind.kept()] == [65]


def forward(ranks: list[int], step: int) -> TelemetryBatch:
    zeros = np.zeros(len(ranks), int)
    return TelemetryBatch(
        rank=ranks, step=zeros + step, microbatch=zeros, op=zeros, compute_ms=zeros + 5.0
    )


FEW = Job(
    name="few",
    layout=Layout.grid(dp=2, pp=1, tp=1, layers=1),
    microbatches=2,
    tokens_per_microbatch=512,
)


def beat(detector: Detector, run: int, ranks: Iterable[int] = (0, 1), sequence: int = 1) -> None:
    """The ranks' processes of a run say that they live."""
    beats = [Heartbeat(ranks=(rank,), process=f"{run}-{rank}", sequence=sequence) for rank in ranks]
    detector.take_heartbeats(beats, float(run))


def messages(run: int, steps_each: int, by: str, *, slow: bool) -> list[TelemetryBatch]:
    """A run of 40 steps, in messages of so many steps of one rank, in turns or one rank first."""
    faults = [Fault(rank=1, factor=2.0, from_step=0)] if slow else []
    whole = TelemetryBatch.concat(
        steps_of(FEW, np.full(3000, 512), steps=40, seed=run, faults=faults)
    )
    found = [
        whole.select((whole.rank == rank) & (whole.step // steps_each == part))
        for part in range(-(-40 // steps_each))
        for rank in (0, 1)
    ]
    return found if by == "turns" else found[::2] + found[1::2]


@pytest.mark.parametrize("by", ["turns", "rank"])
@pytest.mark.parametrize("steps_each", [1, 10, 14, 20, 40])
def test_a_run_of_other_processes_begins_with_their_first_messages(
    steps_each: int, by: str
) -> None:
    detector = Detector(FEW)
    for run in range(4):
        beat(detector, run)
        for message in messages(run, steps_each, by, slow=run > 0):
            detector.update(message)
        assert detector.counters["restarts"] == run
    alone = Detector(FEW)
    for message in messages(3, steps_each, by, slow=True):
        alone.update(message)
    found, due = detector.verdicts()[1], alone.verdicts()[1]
    assert (found.status, found.step) == (due.status, due.step)
    assert due.status is Status.FAIL_SLOW or by == "rank"  # some steps are closed without rank 1


@pytest.mark.parametrize(
    ("ranks", "again"),
    [
        pytest.param([0, 1], [8, 9], id="all go on where the job was"),
        pytest.param([1], [1, 3], id="one of them goes back"),
    ],
)
def test_other_processes_that_begin_no_run(ranks: list[int], again: list[int]) -> None:
    detector = Detector(FEW)
    sent = messages(0, 4, "turns", slow=False)
    beat(detector, 0)
    for message in sent[:10]:
        detector.update(message)
    beat(detector, 1, ranks)
    for message in [*(sent[number] for number in again), *sent[10:]]:
        detector.update(message)
    assert detector.counters["restarts"] == 0
    assert detector.verdicts()[0].step == 39


def test_that_other_processes_began_survives_saving() -> None:
    detector = Detector(FEW)
    for run in range(2):
        beat(detector, run)
        for message in messages(run, 40, "rank", slow=False):
            detector = Detector.restore(FEW, detector.save())
            detector.update(message)
    assert detector.counters["restarts"] == 1
    beat(detector, 1, sequence=2)
    assert detector.begun == []
