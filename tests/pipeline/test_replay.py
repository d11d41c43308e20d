"""Replays: dependencies hold, delays reach the receiver only, impossible orders are named."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.contracts import ContractError, Op, Schedule
from resihp.pipeline.orders import Pass, stage_order
from resihp.pipeline.replay import pass_durations, replay


def orders(schedule, stages, microbatches, chunks=1):
    return [
        stage_order(schedule, stage=s, stages=stages, microbatches=microbatches, chunks=chunks)
        for s in range(stages)
    ]


def test_a_transfer_delays_its_receiver_and_not_its_sender():
    plan = orders(Schedule.ONE_F_ONE_B, 2, 1)
    result = replay(plan, pass_durations(plan, 1.0, 2.0), p2p=[[[0.5]], [[0.25]]])
    assert result.starts[1].tolist() == [1.5, 2.5]
    assert result.starts[0].tolist() == [0.0, 4.75]


def test_a_blocking_transfer_holds_both_ends():
    plan = orders(Schedule.ONE_F_ONE_B, 2, 2)
    durations = pass_durations(plan, 1.0, 2.0)
    result = replay(plan, durations, p2p=0.5, blocking=True)
    assert result.starts[0].tolist() == [0.0, 1.5, 5.0, 8.5]  # F0 F1 B0 B1
    assert result.starts[1].tolist() == [1.5, 2.5, 5.0, 6.0]  # F0 B0 F1 B1


def test_unequal_stages_wait_for_the_slowest():
    plan = orders(Schedule.ONE_F_ONE_B, 2, 4)
    result = replay(plan, pass_durations(plan, [[1.0], [3.0]], [[1.0], [3.0]]))
    assert result.span == pytest.approx(1 + 4 * 6 + 1)


def test_orders_that_wait_for_each_other_are_named():
    plan = [
        [Pass(Op.FORWARD, 0), Pass(Op.BACKWARD, 0), Pass(Op.FORWARD, 1), Pass(Op.BACKWARD, 1)],
        [Pass(Op.FORWARD, 0), Pass(Op.FORWARD, 1), Pass(Op.BACKWARD, 0), Pass(Op.BACKWARD, 1)],
    ]
    with pytest.raises(ContractError, match="for ever"):
        replay(plan, pass_durations(plan, 1.0, 1.0))
    with pytest.raises(ContractError, match="before its forward"):
        replay([[Pass(Op.BACKWARD, 0)]], [[1.0]])


@settings(deadline=None, max_examples=100)
@given(
    stages=st.integers(1, 5),
    microbatches=st.integers(1, 9),
    p2p=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 2**32 - 1),
)
def test_blocking_transfers_only_ever_delay(stages, microbatches, p2p, seed):
    random = np.random.default_rng(seed)
    plan = orders(Schedule.ONE_F_ONE_B, stages, microbatches)
    forward, backward = random.uniform(0.1, 3.0, (2, stages, microbatches))
    durations = pass_durations(plan, forward, backward)
    free, held = (replay(plan, durations, p2p=p2p, blocking=b) for b in (False, True))
    for early, late in zip(free.starts, held.starts, strict=True):
        assert (late >= early - 1e-9).all()


@settings(deadline=None, max_examples=100)
@given(
    schedule=st.sampled_from(list(Schedule)),
    stages=st.integers(1, 5),
    microbatches=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
)
def test_starts_are_the_earliest_that_the_dependencies_allow(schedule, stages, microbatches, seed):
    random = np.random.default_rng(seed)
    chunks = 2 if schedule is Schedule.INTERLEAVED else 1
    plan = orders(schedule, stages, microbatches, chunks)
    forward, backward = random.uniform(0.1, 3.0, (2, stages, microbatches))
    durations = pass_durations(plan, forward, backward)
    result = replay(plan, durations, p2p=0.125)
    end = {
        (s, item): float(e)
        for s, order in enumerate(plan)
        for item, e in zip(order, result.ends[s], strict=True)
    }
    last = stages * chunks - 1
    for s, order in enumerate(plan):
        for k, item in enumerate(order):
            earliest = float(result.ends[s][k - 1]) if k else 0.0
            here, step = item.chunk * stages + s, 1 if item.op is Op.BACKWARD else -1
            if item.part != "weight" and 0 <= here + step <= last:
                chunk, stage = divmod(here + step, stages)
                other = Pass(item.op, item.microbatch, chunk, item.part)
                earliest = max(earliest, end[stage, other] + 0.125)
            assert result.starts[s][k] == pytest.approx(earliest)
            assert result.ends[s][k] - result.starts[s][k] == pytest.approx(durations[s][k])
