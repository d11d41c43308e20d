"""The expected time of a step: that of its predicted passes, and of what it takes besides."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detector import Detector, DetectorSettings
from detector.expectation.length_model import features_of
from detector.expectation.predictor import AnalyticCost
from detector.rank_table import RankTable
from detector.step_time import PipelineTime, StepTimeModel
from resihp.contracts import (
    ContractError,
    Job,
    Layout,
    Op,
    Replica,
    Schedule,
    Stage,
    TelemetryBatch,
)
from resihp.pipeline.orders import job_orders
from resihp.pipeline.replay import replay
from resihp.testing.scenarios import Fault, steps_of

LENGTHS = np.clip(np.exp(np.random.default_rng(0).normal(5.0, 1.0, 2000)), 16, 2048).astype(int)
SCHEDULES = st.sampled_from([*Schedule])
SMALL = st.integers(1, 4)


def job_of(dp: int, pp: int, tp: int, quota: int, schedule: Schedule = Schedule.ONE_F_ONE_B) -> Job:
    layout = Layout.grid(dp=dp, pp=pp, tp=tp, layers=16)
    chunks = 2 if schedule is Schedule.INTERLEAVED else 1
    return Job(
        name="j", layout=layout, microbatches=dp * quota, schedule=schedule, chunks=chunks,
        tokens_per_microbatch=2048,
    )  # fmt: skip


def step_of(job: Job) -> TelemetryBatch:
    """All records of a step, in the order of rank, chunk, microbatch, forward and backward."""
    quota = max(job.quotas)
    axes = [job.layout.ranks, range(job.chunks), range(quota), (Op.FORWARD, Op.BACKWARD)]
    rank, chunk, microbatch, op = (a.reshape(-1) for a in np.meshgrid(*axes, indexing="ij"))
    times = {"step": np.zeros(rank.size, int), "compute_ms": np.ones(rank.size)}
    return TelemetryBatch(rank=rank, chunk=chunk, microbatch=microbatch, op=op, **times)


def pipelines(job: Job) -> PipelineTime:
    return PipelineTime(job, RankTable.of(job.layout))


@given(stages=st.integers(1, 6), quota=st.integers(1, 12), forward=st.floats(0.1, 50.0))
@settings(deadline=None, max_examples=30)
def test_equal_passes_take_the_closed_form_of_1f1b(stages: int, quota: int, forward: float) -> None:
    job = job_of(2, stages, 1, quota)
    step = step_of(job)
    passes = np.where(step.op == Op.BACKWARD, 2.0 * forward, forward)
    closed = (quota + stages - 1) * 3.0 * forward
    assert pipelines(job).ms(step, passes) == pytest.approx((closed, closed))


@given(schedule=SCHEDULES, stages=SMALL, quota=st.integers(1, 8), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=40)
def test_any_passes_take_as_long_as_their_replay(
    schedule: Schedule, stages: int, quota: int, seed: int
) -> None:
    job = job_of(1, stages, 1, quota, schedule)
    step = step_of(job)
    passes = np.random.default_rng(seed).lognormal(0.0, 1.0, len(step))
    table = passes.reshape(stages, job.chunks, quota, 2)
    orders = job_orders(job, job.quotas)[0]
    durations = [
        [
            table[stage, item.chunk, item.microbatch, int(item.op is Op.BACKWARD)]
            * (1.0 if item.part == "whole" else 0.5)
            for item in order
        ]
        for stage, order in enumerate(orders)
    ]
    assert pipelines(job).ms(step, passes)[0] == pytest.approx(replay(orders, durations).span)


def test_replicas_with_their_own_numbers_in_flight_are_expected_in_their_order() -> None:
    """The first replica holds one microbatch at a time, the second as many as under 1F1B."""
    job = job_of(2, 3, 1, 4)
    first, second = job.layout.replicas
    job = replace(job, layout=Layout((replace(first, in_flight=(1, 1, 1)), second)))
    step = step_of(job)
    passes = np.where(step.op == Op.BACKWARD, 2.0, 1.0)
    assert pipelines(job).ms(step, passes)[0] == pytest.approx(4 * 3 * 3.0)
    slow = np.where(np.isin(step.rank, second.ranks), 3.0, 1.0) * passes
    assert pipelines(job).ms(step, slow)[0] == pytest.approx((4 + 3 - 1) * 9.0)


def test_of_a_step_of_too_many_passes_nothing_is_expected() -> None:
    job = job_of(1, 1, 1, 2**15 + 1)
    step = step_of(job)
    with pytest.raises(ContractError, match="too many"):
        pipelines(job).ms(step, step.compute_ms, {})


def test_a_replica_of_one_stage_runs_one_chunk_beside_interleaved_ones() -> None:
    """It decides, as each of its passes goes through all layers."""
    (chunked,) = Layout.grid(dp=1, pp=2, tp=1, layers=8, chunks=2).replicas
    layout = Layout((chunked, Replica((Stage((2,), (0, 8)),))))
    job = Job(
        name="j", layout=layout, microbatches=8, schedule=Schedule.INTERLEAVED, chunks=2,
    )  # fmt: skip
    step = step_of(job)
    step = step.select((step.rank != 2) | (step.chunk == 0))
    passes = np.where(step.op == Op.BACKWARD, 2.0, 1.0) * np.where(step.rank == 2, 4.0, 1.0)
    assert pipelines(job).ms(step, passes)[0] == pytest.approx(4 * 3 * 4.0)


@given(schedule=SCHEDULES, dp=SMALL, stages=SMALL, tp=st.integers(1, 2), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=40)
def test_longer_sequences_never_shorten_the_expectation(
    schedule: Schedule, dp: int, stages: int, tp: int, seed: int
) -> None:
    job, rng = job_of(dp, stages, tp, 4, schedule), np.random.default_rng(seed)
    step, places = step_of(job), RankTable.of(job.layout)
    cost = AnalyticCost()
    cost.coefficients_ = rng.uniform(0.0, 1e-3, (2, 3))
    tokens = rng.integers(1, 4096, len(step))
    longer = tokens + rng.integers(0, 2, len(step)) * rng.integers(0, 4096, len(step))

    def expected(lengths: np.ndarray) -> float:
        records = replace(
            step, tokens=lengths, sequences=np.ones(len(step), int), sum_sq_len=lengths**2,
            max_len=lengths,
        )  # fmt: skip
        features = features_of(places, records, places.index(records.rank))
        return pipelines(job).ms(records, cost.predict(features))[1]

    assert expected(longer) >= expected(tokens) * (1.0 - 1e-12)


@given(dp=SMALL, stages=SMALL, tp=st.integers(1, 2), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=40)
def test_a_slow_rank_raises_only_what_is_expected_with_it(
    dp: int, stages: int, tp: int, seed: int
) -> None:
    job, rng = job_of(dp, stages, tp, 4), np.random.default_rng(seed)
    step = step_of(job)
    passes = np.where(step.op == Op.BACKWARD, 2.0, 1.0)
    slow = {int(rng.choice(job.layout.ranks)): float(rng.uniform(1.1, 3.0))}
    healthy = pipelines(job).ms(step, passes)
    expected = pipelines(job).ms(step, passes, slow)
    assert expected[1] == healthy[1] == healthy[0]
    assert expected[0] > healthy[0]


def test_passes_without_a_record_take_as_long_as_the_others_of_their_stage() -> None:
    job = job_of(2, 2, 1, 4)
    step = step_of(job)
    passes = np.where(step.op == Op.BACKWARD, 2.0, 1.0)
    kept = np.random.default_rng(0).random(len(step)) < 0.7
    kept &= step.rank != 1
    assert pipelines(job).ms(step.select(kept), passes[kept])[0] == pytest.approx(5 * 3.0)


@given(
    share=st.floats(0.5, 2.0),
    rest=st.floats(0.0, 500.0),
    sizes=st.lists(st.floats(10.0, 1000.0), min_size=12, max_size=20),
)
@settings(deadline=None, max_examples=40)
def test_what_a_step_takes_besides_is_learned_as_a_constant_or_a_share(
    share: float, rest: float, sizes: list[float]
) -> None:
    job = job_of(1, 1, 1, 1)
    step = step_of(job)
    for a, b in ((1.0, rest), (share, 0.0)):
        model = StepTimeModel(job, RankTable.of(job.layout))
        for number, size in enumerate(sizes):
            records = replace(step, step=np.full(len(step), number))
            model.expect(records, np.full(len(step), size / 2.0), {})
            found = model.measured(number, a * size + b)
        assert found.expected_ms == pytest.approx(found.measured_ms, rel=1e-6)


@pytest.mark.parametrize("absurd", [np.nan, np.inf, -1.0, 0.0])
def test_a_measured_time_that_is_none_is_not_learned(absurd: float) -> None:
    job = job_of(2, 2, 1, 4)
    model, step = StepTimeModel(job, RankTable.of(job.layout)), step_of(job)
    for number in range(8):
        model.expect(replace(step, step=step.step + number), np.ones(len(step)), {})
        told = model.measured(number, absurd if number == 2 else 50.0)
    assert told.expected_ms == told.healthy_ms == pytest.approx(50.0)


def test_nothing_is_expected_of_a_step_without_records_and_of_the_first() -> None:
    job = job_of(1, 2, 1, 4)
    model = StepTimeModel(job, RankTable.of(job.layout))
    step = step_of(job)
    assert model.measured(7, 100.0).expected_ms is None
    model.expect(step, np.ones(len(step)), {})
    assert model.measured(0, 100.0).expected_ms is None


def told(
    job: Job, faults: list[Fault], steps: int, **given: object
) -> tuple[list[float], list[tuple[float, float]]]:
    """Times of the steps of a generated job, with 40 ms besides the passes, and what its detector
    expected: with the known slow devices, and of healthy ones."""
    detector = Detector(job, settings=DetectorSettings(train=False))
    truth = pipelines(job)
    measured, expected = [], []
    for number, batch in enumerate(
        steps_of(job, LENGTHS, steps=steps, seed=3, faults=faults, **given)
    ):
        if number == steps // 2:
            detector = Detector.restore(job, detector.save(), settings=detector.settings)
        detector.update(batch)
        measured.append(truth.ms(batch, batch.compute_ms)[0] + 40.0)
        found = detector.step_time(number, measured[-1])
        if found.expected_ms is None or found.healthy_ms is None:
            expected.append((np.nan, np.nan))
        else:
            expected.append((found.expected_ms, found.healthy_ms))
    return measured, expected


@pytest.mark.parametrize("with_lengths", [True, False])
def test_a_detector_expects_the_time_of_each_step_and_what_it_would_be_if_healthy(
    with_lengths: bool,
) -> None:
    job = job_of(3, 4, 1, 6)
    last = job.layout.replicas[1].stages[-1]  # it has the head, and bounds the step
    fault = Fault(rank=last.ranks[0], factor=1.6, from_step=12)
    slow, expected = told(job, [fault], 24, with_lengths=with_lengths)
    healthy, _ = told(job, [], 24, with_lengths=with_lengths)
    known = range(16, 24)  # the device is named by then
    assert all(slow[step] > 1.1 * healthy[step] for step in known)
    errors = [abs(expected[step][0] / slow[step] - 1.0) for step in (*range(5, 12), *known)]
    assert np.median(errors) < 0.02
    errors = [abs(expected[step][1] / healthy[step] - 1.0) for step in known]
    assert np.median(errors) < 0.03
