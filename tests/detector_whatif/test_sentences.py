"""Whoever reads the first sentence of a diagnosis knows what is lost, where, and what to do."""

import pytest

from detector.diagnosis import Costs, conclude
from detector.whatif import SlowDevice
from detector.whatif.operations import P2P, OpKind
from resihp.contracts import Cause
from resihp.offline import analyze, read_trace
from resihp.testing.synthetic_traces import Recipe, Trouble, record, write_whatif

DEVICE = SlowDevice(rank=9, dp=1, pp=2, factor=1.25, since=8)


def costs(**lost):
    return Costs(step=100.0, ideal=80.0, lost={Cause[k]: v for k, v in lost.items()}, steps=9)


def test_a_slow_device_comes_with_its_place_its_onset_its_cost_and_its_speed():
    (first,) = conclude(costs(DEVICE=12.0), slow=[DEVICE]).detail
    assert first == (
        "Rank 9 (replica 1, stage 2) computes 1.25x as long as it should since step 8, which costs "
        "12.0% of the step: check the device, or give it less work (speed 0.80)."
    )


@pytest.mark.parametrize(
    ("since", "until", "words"),
    [
        (None, None, "computes 1.25x as long as it should from the start, "),
        (None, 5, "computed 1.25x as long as it should from the start to step 4, "),
        (3, 5, "computed 1.25x as long as it should from step 3 to step 4, "),
    ],
)
def test_a_time_that_is_over_is_told_as_such(since, until, words):
    device = SlowDevice(rank=9, dp=1, pp=2, factor=1.25, since=since, until=until)
    assert words in conclude(costs(DEVICE=12.0), slow=[device]).detail[0]


def test_a_device_that_was_slow_twice_is_one_device():
    before = SlowDevice(rank=9, dp=1, pp=2, factor=1.5, since=2, until=5)
    (first,) = conclude(costs(DEVICE=12.0), slow=[DEVICE, before]).detail
    assert first == (
        "Rank 9 (replica 1, stage 2) computes longer than it should (1.25x since step 8 and 1.50x "
        "from step 2 to step 4), which costs 12.0% of the step: check the device, or give it less "
        "work (speed 0.80)."
    )
    other = SlowDevice(rank=3, dp=0, pp=1, factor=1.2, since=1)
    first = conclude(costs(DEVICE=12.0), slow=[DEVICE, other, before]).detail[0]
    assert first.startswith(
        "Ranks 9 (replica 1, stage 2, 1.25x since step 8 and 1.50x from step 2 to step 4) and 3 "
        "(replica 0, stage 1, 1.20x since step 1) compute longer"
    )


def test_slow_devices_that_nobody_named_need_not_have_a_verdict():
    (first,) = conclude(costs(DEVICE=12.0)).detail
    assert first == (
        "Slow devices cost 12.0% of the step; which ones could not be told for certain: see the "
        "verdicts that are not healthy, if any."
    )


def test_of_many_slow_devices_the_slowest_are_told():
    many = [SlowDevice(rank=r, dp=r, pp=0, factor=2.0 - r / 10, since=r) for r in range(7)]
    first = conclude(costs(DEVICE=30.0), slow=many).detail[0]
    assert first.startswith("Ranks 0 (replica 0, stage 0, 2.00x since step 0), 1 (")
    assert "and 3 more compute longer" in first


def test_a_named_device_that_costs_nothing_is_not_passed_over():
    diagnosis = conclude(costs(SEQUENCE_IMBALANCE=12.0), slow=[DEVICE])
    assert diagnosis.root_cause is Cause.SEQUENCE_IMBALANCE
    assert "Rank 9" in diagnosis.detail[-1]
    assert "the step waits for others" in diagnosis.detail[-1]
    nothing = conclude(costs(), slow=[DEVICE])
    assert nothing.root_cause is Cause.NONE
    assert "No cause" in nothing.detail[0]
    assert "Rank 9" in nothing.detail[-1]


P = {"replica": 1, "stage": 2}
PLACES = {
    "stage": (Recipe(stage_weight=(1, 1.5, 1, 1)), "stage 1 takes 1.50x as long as the others"),
    "work": (Recipe(dp=8, work_spread=0.3), "the longest one of a step has 1."),
    "link": (
        Recipe(troubles=(Trouble(kinds=P2P, factor=100, **P),)),
        "transfers between stages of stage 2 in replica 1",
    ),
    "collective": (
        Recipe(troubles=(Trouble(kinds=(OpKind.GRADS_SCATTER,), factor=15, stage=2, since=5),)),
        "most is in collectives of stage 2",
    ),
    "garbage": (
        Recipe(troubles=(Trouble(kinds=(OpKind.GC,), extra_s=0.4, every=3, **P),)),
        "garbage collection on the ranks of stage 2 in replica 1",
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_the_place_is_told_and_what_to_do(name, tmp_path):
    recipe, words = PLACES[name]
    write_whatif(tmp_path / "t.parquet", record(recipe, seed=1))
    first = analyze(read_trace(tmp_path / "t.parquet")).diagnosis.detail[0]
    assert words in first
    assert "; " in first
    assert "% of the step" in first
