"""Scenarios: speeds over time, pauses, and the work that gets done."""

import math
from functools import partial

import pytest

from resihp.contracts import ContractError, Job, LayerCost, Layout
from scheduler.scenario import (
    FaultEvent,
    PolicyRun,
    Scenario,
    Segment,
    parse_scenario,
    play_scenario,
    throughput,
)

TEXT = """
hours = 1
restart_s = 60

[[fault]]
at_s = 600
rank = 1
speed = 0.5
until_s = 1200

[[fault]]
at_s = 1800
rank = 2
speed = 0.0
"""


def a_job():
    return Job(
        name="j",
        layout=Layout.grid(dp=2, pp=2, tp=2, layers=8, units=8),
        microbatches=16,
        cost=LayerCost(forward_ms=1.0, backward_ms=2.0),
    )


def test_speeds_follow_the_faults():
    scenario = parse_scenario(TEXT)
    assert scenario.changes() == [0.0, 600.0, 1200.0, 1800.0]
    assert scenario.speeds_at(599) == {}
    assert scenario.speeds_at(600) == {1: 0.5}
    assert scenario.speeds_at(1200) == {}
    assert scenario.speeds_at(3000) == {2: 0.0}


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize(
    ("make", "field"),
    [
        (Scenario, "hours"),
        (partial(Scenario, hours=1.0), "restart_s"),
        (partial(FaultEvent, rank=0, speed=0.5), "at_s"),
        (partial(FaultEvent, rank=0, speed=0.5, at_s=0.0), "until_s"),
    ],
)
def test_a_time_that_is_none_is_refused_from_python_as_from_a_file(make, field, value):
    with pytest.raises(ContractError) as caught:
        make(**{field: value})
    assert caught.value.field == field


def test_work_done_counts_steps_outside_of_pauses():
    played = PolicyRun("p", (Segment(0, 50, 10, 100.0), Segment(50, 100, 0, math.inf)), 100.0)
    assert played.goodput == pytest.approx(0.4)
    assert played.paused_s == 10
    assert throughput(played, 8)[1] == [0.0, 80.0, 0.0, 0.0]


def test_policies_play_through():
    seen = []
    results = {
        p.policy: p
        for p in play_scenario(
            a_job(),
            parse_scenario(TEXT),
            ["nothing", "restart", "joint"],
            lambda name, seconds: seen.append((name, seconds)),
        )
    }
    assert results["nothing"].goodput < results["joint"].goodput <= 1.0
    assert results["restart"].goodput < results["joint"].goodput
    assert results["nothing"].segments[-1].steps() == 0.0
    assert results["restart"].paused_s >= 60
    assert [p.segments[0].step_ms for p in results.values()] == [results["joint"].fault_free_ms] * 3
    assert seen[-1] == ("joint", 3600.0)


def test_a_pause_goes_on_through_further_faults():
    """One second after the restart began, a device is slow in the replica that was left out."""
    again = TEXT + "[[fault]]\nat_s = 1801\nrank = 3\nspeed = 0.9\n"
    one, two = (play_scenario(a_job(), parse_scenario(t), ["restart"])[0] for t in (TEXT, again))
    assert [segment.pause_s for segment in two.segments[-2:]] == [1.0, 59.0]
    assert two.paused_s == one.paused_s == 60.0
    assert two.goodput == pytest.approx(one.goodput)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (("hours = 1", "hours = 0"), "hours"),
        (("hours = 1", "hours = 1e306"), "hours"),
        (("speed = 0.5", "speed = 1e-40"), "fault[0].speed"),
        (("speed = 0.5", "speed = 2.0"), "fault[0].speed"),
        (("until_s = 1200", "until_s = 1"), "fault[0].until_s"),
        (("rank = 2", "rang = 2"), "fault[1].rang"),
        (("hours = 1", f"hours = {'[' * 5000}"), ""),
        (("hours = 1", f"hours = {'9' * 5000}"), ""),
    ],
)
def test_what_is_wrong_is_named(change, field):
    with pytest.raises(ContractError) as caught:
        parse_scenario(TEXT.replace(*change))
    assert caught.value.field == field


def test_a_rank_outside_of_the_job_is_named():
    scenario = parse_scenario(TEXT.replace("rank = 2", "rank = 99"))
    with pytest.raises(ContractError, match="rank 99"):
        play_scenario(a_job(), scenario, ["nothing"])


def test_a_policy_that_there_is_not_is_named():
    with pytest.raises(ContractError, match=r"policy: must be one of nothing, .* not other"):
        play_scenario(a_job(), parse_scenario(TEXT), ["other"])
