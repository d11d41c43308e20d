"""Orders run every pass once, in a possible order, within the cap; spans follow the formulas."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.contracts import ContractError, Op, Schedule
from resihp.pipeline.orders import Part, Pass, most_in_flight, most_split, stage_order
from resihp.pipeline.replay import pass_durations, replay

SHAPES = [(p, m) for p in range(1, 7) for m in (0, 1, 2, 5, 8, 13)]


def orders(schedule, stages, microbatches, chunks=1, cap=None):
    return [
        stage_order(
            schedule,
            stage=stage,
            stages=stages,
            microbatches=microbatches,
            chunks=chunks,
            max_in_flight=cap,
        )
        for stage in range(stages)
    ]


def span(schedule, stages, microbatches, *, forward=1.0, backward=2.0, chunks=1, weight_part=0.5):
    plan = orders(schedule, stages, microbatches, chunks)
    return replay(plan, pass_durations(plan, forward, backward, weight_part=weight_part)).span


def peak_in_flight(order):
    """Most microbatches begun and not finished, counted in whole stages."""
    chunks = 1 + max((p.chunk for p in order), default=0)
    held, peak = 0, 0
    for item in order:
        if item.op is Op.FORWARD:
            held += 1
        elif item.part is not Part.INPUT:
            held -= 1
        peak = max(peak, held)
    return -(-peak // chunks)


@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_one_f_one_b_takes_what_the_formula_says(stages, microbatches):
    expected = (microbatches + stages - 1) * 3 if microbatches else 0
    assert span(Schedule.ONE_F_ONE_B, stages, microbatches) == pytest.approx(expected)


@pytest.mark.parametrize(("stages", "microbatches"), [(p, m) for p, m in SHAPES if m >= p])
def test_zero_bubble_takes_what_the_formula_says(stages, microbatches):
    """m * w + (p - 1)(F + B - W), Qi et al. 2024, for equal passes."""
    expected = microbatches * 3 + (stages - 1)
    assert span(Schedule.ZERO_BUBBLE, stages, microbatches) == pytest.approx(expected)


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(("stages", "microbatches"), [(p, m) for p, m in SHAPES if m >= p])
def test_interleaving_divides_the_bubble(stages, microbatches, chunks):
    expected = microbatches * 3 + (stages - 1) * 3 / chunks
    taken = span(Schedule.INTERLEAVED, stages, microbatches, chunks=chunks)
    assert taken == pytest.approx(expected)


@settings(deadline=None, max_examples=200)
@given(
    schedule=st.sampled_from(list(Schedule)),
    stages=st.integers(1, 7),
    microbatches=st.integers(0, 20),
    chunks=st.integers(2, 4),
    cap=st.none() | st.integers(1, 8),
)
def test_every_pass_runs_once_within_the_cap(schedule, stages, microbatches, chunks, cap):
    if schedule is not Schedule.INTERLEAVED:
        chunks = 1
    if chunks > 1:
        cap = None
    plan = orders(schedule, stages, microbatches, chunks, cap)
    backward = (Part.INPUT, Part.WEIGHT) if schedule is Schedule.ZERO_BUBBLE else (Part.WHOLE,)
    expected = {
        Pass(op, m, c, part)
        for m in range(microbatches)
        for c in range(chunks)
        for op, parts in ((Op.FORWARD, (Part.WHOLE,)), (Op.BACKWARD, backward))
        for part in parts
    }
    for order in plan:
        assert len(order) == len(expected)
        assert set(order) == expected
        if cap is not None:
            assert peak_in_flight(order) <= cap
    assert replay(plan, pass_durations(plan, 1.0, 2.0)).span >= 2.999 * microbatches


def test_zero_bubble_holds_no_more_than_the_first_stage_of_1f1b():
    assert {peak_in_flight(order) for order in orders(Schedule.ZERO_BUBBLE, 4, 12)} == {4}
    assert [peak_in_flight(o) for o in orders(Schedule.ONE_F_ONE_B, 4, 12)] == [4, 3, 2, 1]


def test_too_small_a_cap_for_interleaving_names_the_least():
    with pytest.raises(ContractError, match="must be 6 or more with 2 chunks"):
        orders(Schedule.INTERLEAVED, 4, 8, chunks=2, cap=5)
    plan = orders(Schedule.INTERLEAVED, 4, 8, chunks=2, cap=6)
    assert max(map(peak_in_flight, plan)) <= 6


@given(
    stages=st.integers(2, 5),
    microbatches=st.integers(0, 12),
    chunks=st.integers(2, 4),
    cap=st.integers(1, 12),
)
def test_a_cap_refuses_those_interleaved_orders_that_exceed_it(stages, microbatches, chunks, cap):
    """One that no stage could exceed, as there are no more microbatches, refuses none."""
    free = orders(Schedule.INTERLEAVED, stages, microbatches, chunks)
    peak = max(map(peak_in_flight, free))
    assert peak <= microbatches
    if peak <= cap:
        assert orders(Schedule.INTERLEAVED, stages, microbatches, chunks, cap) == free
        return
    with pytest.raises(ContractError, match=f"must be {peak} or more with {chunks} chunks"):
        orders(Schedule.INTERLEAVED, stages, microbatches, chunks, cap)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"stage": 2, "stages": 2, "microbatches": 1}, "stage"),
        ({"stage": 0, "stages": 2, "microbatches": -1}, "microbatches"),
        ({"stage": 0, "stages": 2, "microbatches": 1, "chunks": 2}, "chunks"),
        ({"stage": 0, "stages": 2, "microbatches": 1, "max_in_flight": 0}, "max_in_flight"),
    ],
)
def test_a_wrong_argument_is_named(arguments, field):
    with pytest.raises(ContractError) as caught:
        stage_order(Schedule.ONE_F_ONE_B, **arguments)
    assert caught.value.field == field


def test_eager_1f1b_runs_twice_as_far_ahead():
    assert [peak_in_flight(o) for o in orders(Schedule.EAGER_1F1B, 4, 12)] == [7, 5, 3, 1]
    assert span(Schedule.EAGER_1F1B, 4, 12) == pytest.approx(15 * 3)


@st.composite
def in_flight(draw):
    """Numbers in flight of 1 to 5 stages, each no more than before."""
    lags = draw(st.lists(st.integers(0, 3), min_size=0, max_size=4))
    counts = [1 + draw(st.integers(0, 2))]
    for lag in lags:
        counts.append(counts[-1] + lag)
    return tuple(reversed(counts))


@settings(deadline=None, max_examples=100)
@given(counts=in_flight(), microbatches=st.integers(0, 12), p2p=st.sampled_from([0.0, 0.5, 9.0]))
def test_any_numbers_in_flight_run_every_pass_once_and_keep_to_them(counts, microbatches, p2p):
    plan = [
        stage_order(
            Schedule.EAGER_1F1B,
            stage=stage,
            stages=len(counts),
            microbatches=microbatches,
            in_flight=count,
        )
        for stage, count in enumerate(counts)
    ]
    everything = {Pass(op, m) for op in (Op.FORWARD, Op.BACKWARD) for m in range(microbatches)}
    assert all(len(order) == len(everything) for order in plan)
    assert all(set(order) == everything for order in plan)
    peaks = [peak_in_flight(order) for order in plan]
    assert peaks == [min(count, microbatches) for count in counts]
    replay(plan, pass_durations(plan, 1.0, 2.0), p2p=p2p)  # raises if they wait for ever


@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.EAGER_1F1B])
def test_the_numbers_in_flight_of_a_schedule_give_its_order(schedule):
    for stage, count in enumerate(most_in_flight(schedule, 4)):
        given_ = {"stage": stage, "stages": 4, "microbatches": 9}
        own = stage_order(Schedule.ONE_F_ONE_B, in_flight=count, **given_)
        assert own == stage_order(schedule, **given_)


@given(
    stages=st.integers(1, 6),
    microbatches=st.integers(1, 16),
    cap=st.one_of(st.none(), st.integers(1, 8)),
)
def test_as_many_as_are_said_are_between_the_halves_of_a_split_backward(stages, microbatches, cap):
    """And then as many as ever are in flight, so that both decide a stage's memory."""
    between = most_split(Schedule.ZERO_BUBBLE, stages, cap)
    for stage in range(stages):
        order = stage_order(
            Schedule.ZERO_BUBBLE,
            stage=stage,
            stages=stages,
            microbatches=microbatches,
            max_in_flight=cap,
        )
        whole = split = 0
        seen = []
        for item in order:
            whole += (item.op is Op.FORWARD) - (item.part is Part.INPUT)
            split += (item.part is Part.INPUT) - (item.part is Part.WEIGHT)
            seen.append((split, whole + split))
        assert max(seen) == (min(between[stage], microbatches), max(total for _, total in seen))
    assert most_split(Schedule.ONE_F_ONE_B, stages, cap) == (0,) * stages


@pytest.mark.parametrize("schedule", [Schedule.ZERO_BUBBLE, Schedule.INTERLEAVED])
def test_schedules_without_a_choice_refuse_numbers_in_flight(schedule):
    with pytest.raises(ContractError, match="in_flight"):
        stage_order(schedule, stage=0, stages=2, microbatches=4, in_flight=3)
