"""Cases that the data cannot tell, cases that must not be blamed on a device, and easy ones."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from detector import Detector, DetectorSettings
from detector.rank_table import RankTable
from resihp.contracts import Job, Layout, ModelShape, Op, Status, TelemetryBatch
from resihp.testing.scenarios import Fault, Noise, steps_of

LENGTHS = np.clip(np.exp(np.random.default_rng(0).normal(6.5, 1.2, 3000)), 16, 8192).astype(int)
MODEL = ModelShape(layers=16, hidden=1024, heads=16, kv_heads=8, ffn=4096, vocab=32000)


def job_of(dp: int, pp: int, tp: int, per_replica: int = 4) -> Job:
    return Job(
        name="job",
        layout=Layout.grid(dp=dp, pp=pp, tp=tp, layers=16),
        microbatches=dp * per_replica,
        model=MODEL,
        tokens_per_microbatch=8192,
    )


def statuses(job: Job, stream: Sequence[TelemetryBatch]) -> dict[Status, set[int]]:
    detector = Detector(job)
    for batch in stream:
        detector.update(batch)
    found: dict[Status, set[int]] = {status: set() for status in Status}
    for verdict in detector.verdicts():
        found[verdict.status].add(verdict.rank)
    return found


def test_a_coupled_group_without_waits_is_inconclusive() -> None:
    job = job_of(4, 2, 2)
    fault = Fault(rank=6, factor=1.15, from_step=10)
    stream = steps_of(job, LENGTHS, steps=20, seed=1, faults=[fault], coupled=True, waits=False)
    found = statuses(job, list(stream))
    assert found[Status.FAIL_SLOW] == set()
    assert found[Status.INCONCLUSIVE] == {6, 7}


def test_in_a_coupled_group_the_one_that_waits_least_is_named() -> None:
    job = job_of(4, 2, 2)
    fault = Fault(rank=6, factor=1.15, from_step=10)
    stream = steps_of(job, LENGTHS, steps=20, seed=1, faults=[fault], coupled=True)
    found = statuses(job, list(stream))
    assert found[Status.FAIL_SLOW] == {6}
    assert found[Status.HEALTHY] == set(job.layout.ranks) - {6}


def test_two_stages_and_two_replicas_without_lengths_name_nobody() -> None:
    job = job_of(2, 2, 1)
    fault = Fault(rank=1, factor=1.2, from_step=12)
    stream = steps_of(job, LENGTHS, steps=24, seed=2, faults=[fault], with_lengths=False)
    assert statuses(job, list(stream))[Status.FAIL_SLOW] == set()


def test_a_whole_replica_without_lengths_is_inconclusive() -> None:
    job = job_of(8, 2, 1)
    replica = job.layout.replicas[3].ranks
    faults = [Fault(rank=rank, factor=1.6, from_step=12) for rank in replica]
    stream = steps_of(job, LENGTHS, steps=30, seed=3, faults=faults, with_lengths=False)
    found = statuses(job, list(stream))
    assert found[Status.FAIL_SLOW] == set()
    assert found[Status.INCONCLUSIVE] == set(replica)


def test_a_whole_replica_with_lengths_is_named() -> None:
    job = job_of(8, 2, 1)
    replica = job.layout.replicas[3].ranks
    faults = [Fault(rank=rank, factor=1.2, from_step=12) for rank in replica]
    stream = list(steps_of(job, LENGTHS, steps=20, seed=3, faults=faults))
    assert statuses(job, stream)[Status.FAIL_SLOW] == set(replica)


def test_the_first_document_four_times_longer_than_any_before_alarms_nobody() -> None:
    job = replace(job_of(4, 1, 1), tokens_per_microbatch=16384)
    short, long = np.minimum(LENGTHS, 4096), np.full(4, 16384)
    stream = list(steps_of(job, short, steps=24, seed=4))
    stream += steps_of(job, long, steps=6, seed=5, first_step=24)
    stream = [*stream, *steps_of(job, short, steps=6, seed=6, first_step=30)]
    detector = Detector(job)
    said = [verdict for batch in stream for verdict in detector.update(batch)]
    assert [v for v in said if v.status is Status.FAIL_SLOW] == []


@pytest.mark.parametrize("shape", [(8, 1, 1), (4, 2, 2), (1, 4, 1), (2, 2, 2)])
def test_a_clean_job_names_nobody(shape: tuple[int, int, int]) -> None:
    job = job_of(*shape)
    stream = list(steps_of(job, LENGTHS, steps=50, seed=7, noise=Noise(outliers=0.01)))
    found = statuses(job, stream)
    assert found[Status.HEALTHY] == set(job.layout.ranks)


def test_two_devices_at_once_are_both_named() -> None:
    job = job_of(8, 2, 1)
    faults = [Fault(rank=3, factor=1.1, from_step=10), Fault(rank=12, factor=1.2, from_step=13)]
    stream = list(steps_of(job, LENGTHS, steps=22, seed=8, faults=faults))
    assert statuses(job, stream)[Status.FAIL_SLOW] == {3, 12}


def test_a_device_slow_from_its_first_step_is_named_against_its_peers() -> None:
    job = job_of(8, 2, 1)
    fault = Fault(rank=4, factor=1.08, from_step=0)
    detector = Detector(job)
    for batch in steps_of(job, LENGTHS, steps=12, seed=9, faults=[fault]):
        detector.update(batch)
    named = [v for v in detector.verdicts() if v.status is Status.FAIL_SLOW]
    assert [v.rank for v in named] == [4]
    assert named[0].since_step is None


@pytest.mark.parametrize("shape", [(16, 1, 1), (8, 2, 1)])
def test_one_microbatch_a_step_is_enough(shape: tuple[int, int, int]) -> None:
    job = job_of(*shape, per_replica=1)
    fault = Fault(rank=5, factor=1.15, from_step=16)
    stream = list(steps_of(job, LENGTHS, steps=30, seed=3, faults=[fault]))
    assert statuses(job, stream)[Status.FAIL_SLOW] == {5}


def test_a_recovered_device_is_healthy_again() -> None:
    job = job_of(8, 2, 1)
    fault = Fault(rank=4, factor=1.1, from_step=8, until_step=16)
    assert statuses(job, list(steps_of(job, LENGTHS, steps=24, seed=1, faults=[fault])))[
        Status.HEALTHY
    ] == set(job.layout.ranks)


def test_a_few_quick_steps_of_a_noisy_host_are_no_recovery() -> None:
    """Of eight jobs in which rank 2 is slow until step 80, one has its name end before."""
    job = job_of(8, 1, 1, per_replica=1)
    fault = Fault(rank=2, factor=1.3, from_step=30, until_step=80)
    ended, recovered = 0, 0
    for seed in range(8):
        detector, named = Detector(job, settings=DetectorSettings(train=False)), False
        noise = Noise(step=0.15)
        for batch in steps_of(job, LENGTHS, steps=120, seed=seed, faults=[fault], noise=noise):
            detector.update(batch)
            before, named = named, detector.verdicts()[2].status is Status.FAIL_SLOW
            ended += before and not named and batch.step[0] < 80
        recovered += not named
    assert (ended, recovered) == (1, 8)


def test_delays_of_a_busy_host_name_nobody_in_a_long_job() -> None:
    """Once most ranks were in some doubt, those that were quick of late told what is usual."""
    job = job_of(16, 1, 1, per_replica=1)
    detector = Detector(job, settings=DetectorSettings(train=False))
    for batch in steps_of(job, LENGTHS, steps=450, seed=3, noise=Noise(delays=0.05)):
        for verdict in detector.update(batch):
            assert verdict.status is not Status.FAIL_SLOW, verdict


def with_transfers(batch: TelemetryBatch, job: Job, slow: tuple[int, int], factor: float):
    """The batch with one transfer a microbatch between the two stages of each replica."""
    rng = np.random.default_rng(int(batch.step[0]))
    rows = []
    for replica in job.layout.replicas:
        sender, receiver = replica.stages[0].ranks[0], replica.stages[1].ranks[0]
        for microbatch in range(4):
            time = 2.0 * rng.lognormal(0.0, 0.05)
            time *= factor if (receiver, sender) == slow else 1.0
            rows.append((receiver, sender, microbatch, time))
    receiver, sender, microbatch, times = (np.array(column) for column in zip(*rows, strict=True))
    count = len(rows)
    return TelemetryBatch.concat(
        [
            batch,
            TelemetryBatch(
                rank=receiver,
                peer=sender,
                step=np.full(count, batch.step[0]),
                microbatch=microbatch,
                op=np.full(count, int(Op.P2P)),
                compute_ms=times,
            ),
        ]
    )


@pytest.mark.parametrize("dp", [2, 3])
def test_noise_of_the_first_steps_names_nobody_in_a_job_of_few_ranks(dp: int) -> None:
    """What is expected of two or three ranks is learned in a few steps, and off by their noise."""
    job, wrong = job_of(dp, 1, 1, per_replica=1), []
    for seed in range(20):
        detector = Detector(job, settings=DetectorSettings(train=False))
        for batch in steps_of(job, [500], steps=60, seed=seed, noise=Noise(step=0.2)):
            slow = [v for v in detector.update(batch) if v.status is Status.FAIL_SLOW]
            wrong += [(seed, int(batch.step[0]), v.rank, v.slowdown) for v in slow]
    assert wrong == []


def test_a_slow_link_is_no_slow_device() -> None:
    job = job_of(8, 2, 1)
    replica = job.layout.replicas[2]
    slow = (replica.stages[1].ranks[0], replica.stages[0].ranks[0])
    detector = Detector(job)
    for batch in steps_of(job, LENGTHS, steps=24, seed=1):
        factor = 2.0 if batch.step[0] >= 12 else 1.0
        detector.update(with_transfers(batch, job, slow, factor))
    (link,) = detector.links()
    assert (link.rank, link.peer) == slow
    assert link.slowdown == pytest.approx(2.0, rel=0.15)
    assert {v.status for v in detector.verdicts()} == {Status.HEALTHY}
    assert "transfers" in " ".join(detector.verdicts()[slow[0]].evidence)


@pytest.mark.parametrize(("usual_ms", "is_noted"), [(20.0, True), (0.1, False)])
def test_a_slow_host_is_no_slow_device(usual_ms: float, is_noted: bool) -> None:
    job = job_of(8, 1, 1)
    detector = Detector(job)
    for batch in steps_of(job, LENGTHS, steps=24, seed=1):
        late = np.where((np.arange(8) == 3) & (batch.step[0] >= 12), 5.0, 1.0)
        data = TelemetryBatch(
            rank=np.arange(8),
            step=np.full(8, batch.step[0]),
            microbatch=np.full(8, -1),
            op=np.full(8, int(Op.DATA)),
            compute_ms=usual_ms * late,
        )
        detector.update(TelemetryBatch.concat([batch, data]))
    assert {v.status for v in detector.verdicts()} == {Status.HEALTHY}
    assert ("host" in " ".join(detector.verdicts()[3].evidence)) is is_noted


@pytest.mark.parametrize("op", [Op.FORWARD, Op.BACKWARD])
@pytest.mark.parametrize(("shape", "with_lengths"), [((16, 1, 1), True), ((4, 4, 1), False)])
def test_one_kind_of_pass_of_one_microbatch_is_enough(
    shape: tuple[int, int, int], with_lengths: bool, op: Op
) -> None:
    job = job_of(*shape, per_replica=1)
    detector = Detector(job, settings=DetectorSettings(train=False))
    for batch in steps_of(job, LENGTHS, steps=30, seed=3, with_lengths=with_lengths):
        slow = (batch.rank == 5) & (batch.op == op) & (batch.step >= 14)
        detector.update(replace(batch, compute_ms=batch.compute_ms * np.where(slow, 1.5, 1.0)))
    named = [v for v in detector.verdicts() if v.status is Status.FAIL_SLOW]
    assert [v.rank for v in named] == [5]
    assert named[0].slowdown == pytest.approx(1.16 if op == Op.FORWARD else 1.34, abs=0.02)


@pytest.mark.parametrize("seed", range(4))
def test_slow_forward_passes_are_named_beside_noisy_backward_passes(seed: int) -> None:
    job = job_of(4, 1, 1, per_replica=1)
    detector = Detector(job, settings=DetectorSettings(train=False))
    noise, named = np.random.default_rng(seed), dict[int, int]()
    for batch in steps_of(job, LENGTHS, steps=40, seed=seed):
        slow = (batch.rank == seed) & (batch.op == Op.FORWARD) & (batch.step >= 20)
        times = batch.compute_ms * np.where(slow, 1.5, 1.0)
        times *= np.exp(0.1 * noise.standard_t(5, times.size))
        for verdict in detector.update(replace(batch, compute_ms=times)):
            if verdict.status is Status.FAIL_SLOW:
                named.setdefault(verdict.rank, int(batch.step[0]))
    assert list(named) == [seed]
    assert 20 < named[seed] < 34


@pytest.mark.parametrize("op", [Op.FORWARD, Op.BACKWARD])
@pytest.mark.parametrize("seed", range(4))
def test_one_kind_of_pass_of_four_microbatches_is_named_in_noisy_steps(seed: int, op: Op) -> None:
    """All passes of a kind in a step take longer together, so that their number does not help."""
    job = job_of(4, 1, 1, per_replica=4)
    detector = Detector(job, settings=DetectorSettings(train=False))
    noise, named = np.random.default_rng(seed), dict[int, int]()
    for batch in steps_of(job, LENGTHS, steps=45, seed=seed):
        slow = (batch.rank == seed) & (batch.op == op) & (batch.step >= 20)
        kind = 2 * batch.rank + (batch.op == Op.BACKWARD)
        times = batch.compute_ms * np.where(slow, 1.25, 1.0)
        times *= np.exp(0.08 * noise.standard_t(5, 8))[kind]
        for verdict in detector.update(replace(batch, compute_ms=times)):
            if verdict.status is Status.FAIL_SLOW:
                named.setdefault(verdict.rank, int(batch.step[0]))
    assert list(named) == [seed]
    assert 20 < named[seed] <= 40


@pytest.mark.parametrize("from_step", [0, 12])
@pytest.mark.parametrize(("tp", "slow"), [(2, 7), (4, 0), (4, 15)])
def test_a_slow_member_does_not_get_the_opposite_group_named(
    tp: int, slow: int, from_step: int
) -> None:
    """Two replicas of two stages: what lifts one corner lifts the other one, too."""
    job = Job(name="job", layout=Layout.grid(dp=2, pp=2, tp=tp, layers=8), microbatches=16)
    fault = Fault(rank=slow, factor=1.3, from_step=from_step)
    detector = Detector(job)
    named = set()
    for batch in steps_of(
        job, LENGTHS, steps=24, seed=3, faults=[fault], with_lengths=False, coupled=True
    ):
        named |= {v.rank for v in detector.update(batch) if v.status is Status.FAIL_SLOW}
    assert named == {slow}


@pytest.mark.parametrize("slow", [None, 5, 10])
def test_hosts_that_load_more_than_those_of_other_stages_are_not_slow(slow: int | None) -> None:
    """The first of three stages loads the tokens, the others next to nothing."""
    job = job_of(4, 3, 1)
    detector, places = Detector(job), RankTable.of(job.layout)
    usual_ms = np.where(places.pp == 0, 100.0, 20.0)
    for batch in steps_of(job, LENGTHS, steps=24, seed=1):
        late = np.where((places.ranks == slow) & (batch.step[0] >= 12), 5.0, 1.0)
        data = TelemetryBatch(
            rank=places.ranks,
            step=np.full(12, batch.step[0]),
            microbatch=np.full(12, -1),
            op=np.full(12, int(Op.DATA)),
            compute_ms=usual_ms * late,
        )
        detector.update(TelemetryBatch.concat([batch, data]))
    told = [v.rank for v in detector.verdicts() if "host" in " ".join(v.evidence)]
    assert told == ([] if slow is None else [slow])


@pytest.mark.parametrize("known", [0.4, 0.5, 0.6])
def test_a_device_is_named_where_half_of_the_records_have_lengths(known: float) -> None:
    """A few more or less of them in a step do not throw away what was learned."""
    job, rng = job_of(4, 4, 1), np.random.default_rng(0)
    fault = Fault(rank=5, factor=1.06, from_step=14)
    detector, named = Detector(job), set()
    for batch in steps_of(job, LENGTHS, steps=30, seed=2, faults=[fault]):
        has = rng.random(len(batch)) < known + (0.1 if batch.step[0] % 2 else -0.1)
        columns = ("tokens", "sequences", "sum_sq_len", "max_len")
        partly = {name: np.where(has, getattr(batch, name), -1) for name in columns}
        named |= {
            v.rank
            for v in detector.update(replace(batch, **partly))
            if v.status is Status.FAIL_SLOW
        }
    assert named == {5}
    assert detector.verdicts()[5].status is Status.FAIL_SLOW


def test_a_name_outlasts_the_loss_of_the_lengths() -> None:
    job, found = job_of(4, 4, 1), list[Status]()
    fault = Fault(rank=5, factor=1.06, from_step=10)
    detector = Detector(job)
    for first, with_lengths in ((0, True), (20, False), (36, True)):
        for batch in steps_of(
            job, LENGTHS, steps=16 if first else 20, seed=2, first_step=first,
            faults=[fault], with_lengths=with_lengths,
        ):  # fmt: skip
            detector.update(batch)
            found.append(detector.verdicts()[5].status)
    assert set(found[16:]) == {Status.FAIL_SLOW}
    others = {v.status for v in detector.verdicts() if v.rank != 5}
    assert others == {Status.HEALTHY}
