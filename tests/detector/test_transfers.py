"""What a transfer takes is told from what its ends wait for each other, by any clocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detector import Detector, DetectorSettings
from detector.rank_table import RankTable
from detector.transfers import ClockBounds, PairedTransfers, TransferTimes, balanced
from resihp.contracts import Job, Layout, Op, Status, TelemetryBatch
from resihp.contracts.telemetry import MOST_MS
from resihp.testing.scenarios import Fault, SlowLink, steps_of, transfers

LENGTHS = np.clip(np.exp(np.random.default_rng(0).normal(6.5, 1.2, 3000)), 16, 8192).astype(int)
JOB = Job(
    name="job",
    layout=Layout.grid(dp=3, pp=4, tp=1, layers=16),
    microbatches=18,
    tokens_per_microbatch=8192,
)
PLACES = RankTable.of(JOB.layout)
STEPS, ONSET = 22, 11


def judged(seed: int, *, blocking: bool, faults=(), slow: SlowLink | None = None) -> Detector:
    detector = Detector(JOB, settings=DetectorSettings(train=False))
    for batch in steps_of(JOB, LENGTHS, steps=STEPS, seed=seed, faults=faults):
        sent = transfers(JOB, batch, seed=seed, slow=slow, blocking=blocking, clock_spread_ms=1e6)
        detector.update(TelemetryBatch.concat([batch, sent]))
    return detector


def named(detector: Detector) -> set[int]:
    return {v.rank for v in detector.verdicts() if v.status is Status.FAIL_SLOW}


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_a_slow_device_makes_no_slow_link(seed: int, blocking: bool) -> None:
    rng = np.random.default_rng(seed)
    rank, factor = int(rng.integers(JOB.layout.dp * 4)), float(rng.choice([1.3, 2.0, 3.0]))
    fault = Fault(rank=rank, factor=factor, from_step=ONSET)
    detector = judged(seed, blocking=blocking, faults=(fault,))
    assert detector.links() == []
    assert named(detector) == {rank}


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_a_slow_link_is_named_and_no_device(seed: int, blocking: bool) -> None:
    rng = np.random.default_rng(seed)
    replica, at = JOB.layout.replicas[int(rng.integers(3))], int(rng.integers(3))
    ends = replica.stages[at].ranks[0], replica.stages[at + 1].ranks[0]
    factor = float(rng.choice([1.5, 3.0]))
    detector = judged(
        seed, blocking=blocking, slow=SlowLink(ranks=ends, factor=factor, from_step=ONSET)
    )
    (link,) = detector.links()
    assert {link.rank, link.peer} == set(ends)
    assert link.slowdown == pytest.approx(factor, rel=0.2)
    assert link.since_step == pytest.approx(ONSET, abs=3)
    assert named(detector) == set()


@settings(deadline=None, max_examples=60)
@given(
    offset=st.floats(-1e9, 1e9),
    rate=st.floats(-4e-5, 4e-5),
    fastest=st.tuples(st.floats(0.1, 5.0), st.floats(0.1, 5.0)),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_bounds_hold_the_difference_of_two_clocks(
    offset: float, rate: float, fastest: tuple[float, float], seed: int
) -> None:
    """The difference lies within them, and their middle is off by half of what the fastest
    transfers differ by, and what the clocks drift by in the time of a step."""
    rng = np.random.default_rng(seed)
    bounds = ClockBounds.of(between([], []))
    for step in range(6):
        sent = step * 1e3 + np.sort(rng.uniform(0.0, 500.0, 8))
        up = np.arange(8) % 2 == 0
        spent = np.where(up, *fastest) * rng.uniform(1.0, 3.0, 8)
        spent[:2] = fastest
        begun = np.where(up, sent, sent * (1 + rate) + offset)
        ended = np.where(up, (sent + spent) * (1 + rate) + offset, sent + spent)
        bounds = bounds.later(ClockBounds.of(between(begun, ended, up)))
        now = offset + rate * float(bounds.at_ms[0])
        slack = 1e-6 * abs(offset) * 1e-3 + 1e-4 * 1e3
        assert bounds.low[0] - slack <= now <= bounds.high[0] + slack
        middle = float(bounds.differences(bounds.links)[0])
        assert abs(middle - now) <= 0.5 * abs(fastest[0] - fastest[1]) + slack


def between(begun, ended, up=()) -> PairedTransfers:
    """Transfers between two ranks, upwards or not, whose receiver waited from long before."""
    begun, ended, up = np.asarray(begun), np.asarray(ended), np.asarray(up, bool)
    starts = np.stack([np.where(up, begun, ended - 900), np.where(up, ended - 900, begun)])
    ends = np.stack([np.where(up, begun, ended), np.where(up, ended, begun)])
    none = np.zeros((2, begun.size), np.int64)
    return PairedTransfers(np.ones(begun.size, np.int64), none, starts, ends)


def one_step(seed: int = 0, **given: object) -> TelemetryBatch:
    (batch,) = steps_of(JOB, LENGTHS, steps=1, seed=seed)
    return transfers(JOB, batch, seed=seed, **given)  # type: ignore[arg-type]


def by_place(step: TelemetryBatch) -> dict[tuple[int, ...], list[float]]:
    """Sorted times by ranks and microbatch."""
    found: dict[tuple[int, ...], list[float]] = {}
    keys = zip(step.rank.tolist(), step.peer.tolist(), step.microbatch.tolist(), strict=True)
    for key, time in zip(keys, step.compute_ms.tolist(), strict=True):
        found.setdefault(key, []).append(round(time, 3))
    return {key: sorted(times) for key, times in sorted(found.items())}


@settings(deadline=None, max_examples=25)
@given(blocking=st.booleans(), seed=st.integers(0, 2**32 - 1))
def test_neither_the_order_of_records_nor_the_clocks_matter(blocking: bool, seed: int) -> None:
    step = one_step(seed % 4, blocking=blocking)
    rng = np.random.default_rng(seed)
    clock = rng.uniform(-1e7, 1e7, int(step.rank.max()) + 1)
    moved = replace(step, start_ms=step.start_ms + clock[step.rank])
    shuffled = moved.select(rng.permutation(len(step)))
    expected = by_place(TransferTimes(PLACES).separated(step))
    found = by_place(TransferTimes(PLACES).separated(shuffled))
    assert found.keys() == expected.keys()
    for key, times in expected.items():
        assert found[key] == pytest.approx(times, abs=0.01)


@pytest.mark.parametrize("blocking", [True, False])
def test_transfers_are_measured_as_they_were(blocking: bool) -> None:
    found = TransferTimes(PLACES).separated(one_step(blocking=blocking, clock_spread_ms=1e6))
    times = found.compute_ms
    assert np.median(times) == pytest.approx(2.0, rel=0.05)
    assert ((times > 1.5) & (times < 4.5)).all()
    assert (found.rank < found.peer).all() or not blocking
    assert {tuple(sorted(pair)) for pair in zip(found.rank, found.peer, strict=True)} == {
        (before.ranks[0], after.ranks[0])
        for replica in JOB.layout.replicas
        for before, after in zip(replica.stages, replica.stages[1:], strict=False)
    }


def test_an_end_without_the_other_tells_nothing() -> None:
    step = one_step(blocking=True)
    lower = step.select(step.rank < step.peer)
    assert len(TransferTimes(PLACES).separated(lower)) == 0
    lost = (step.microbatch == 2) & (step.rank == 0)
    found = TransferTimes(PLACES).separated(step.select(~lost))
    whole = TransferTimes(PLACES).separated(step)
    assert by_place(found) == by_place(
        whole.select((whole.microbatch != 2) | (np.minimum(whole.rank, whole.peer) > 0))
    )


def test_both_directions_of_a_link_count_or_none() -> None:
    """The error of a clock's difference lengthens one of them and shortens the other."""
    there = between([0.0, 10.0], [2.0, 12.0], [True, True])
    assert np.isnan(balanced(there, np.array([2.0, 2.0]))).all()
    and_back = between([0.0, 10.0, 20.0], [1.5, 13.0, 22.5], [True, False, False])
    assert balanced(and_back, np.array([1.5, 3.0, 2.5])).tolist() == [2.125, 2.375, 1.875]


def test_records_without_a_start_are_left_as_they_are() -> None:
    step = replace(one_step(blocking=True), start_ms=None)
    assert TransferTimes(PLACES).separated(step) is step
    (batch,) = steps_of(JOB, LENGTHS, steps=1, seed=0)
    assert TransferTimes(PLACES).separated(batch) is batch


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("column", ["compute_ms", "wait_ms", "start_ms"])
@pytest.mark.parametrize("rank", [None, 0])
def test_absurd_times_break_nothing(column: str, rank: int | None, *, blocking: bool) -> None:
    """The longest times that a record may hold, at both ends of all transfers or at one."""
    separated = TransferTimes(PLACES)
    for seed in range(2):
        step = one_step(seed, blocking=blocking)
        everywhere = np.isfinite(step.start_ms) & ((step.rank == rank) | (rank is None))
        longest = np.where(everywhere, MOST_MS, getattr(step, column))
        told = separated.separated(replace(step, **{column: longest}))
        assert (told.compute_ms[told.op == Op.P2P] > 0).all()


def test_a_clock_that_begins_anew_is_followed() -> None:
    times = TransferTimes(PLACES)
    for number in range(4):
        (batch,) = steps_of(JOB, LENGTHS, steps=1, seed=1, first_step=number)
        sent = transfers(JOB, batch, seed=1)
        restarted = np.where((sent.rank >= 6) & (number >= 2), -3e5, 0.0)
        found = times.separated(replace(sent, start_ms=sent.start_ms + restarted))
        assert np.median(found.compute_ms) == pytest.approx(2.0, rel=0.05)
        assert int(Op.P2P) in found.op


def test_the_state_of_a_detector_holds_the_clocks() -> None:
    batches = [
        TelemetryBatch.concat([batch, transfers(JOB, batch, seed=3, clock_spread_ms=1e6)])
        for batch in steps_of(JOB, LENGTHS, steps=6, seed=3)
    ]
    whole = Detector(JOB)
    for batch in batches:
        whole.update(batch)
    half = Detector(JOB)
    for batch in batches[:3]:
        half.update(batch)
    half = Detector.restore(JOB, half.save())
    for batch in batches[3:]:
        half.update(batch)
    assert half.save() == whole.save()
