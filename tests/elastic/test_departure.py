"""A rank whose node is taken away hands over in time, or is lost between two steps."""

from __future__ import annotations

from math import inf

from hypothesis import assume, given
from hypothesis import strategies as st

from resihp.elastic.state.departure import Departure, HandOverCost, HandOverMeter

SECONDS = st.floats(0.01, 60.0)
COSTS = st.builds(HandOverCost, SECONDS, SECONDS, SECONDS, SECONDS)


@given(COSTS, st.floats(0.0, 1000.0), st.floats(0.0, 1000.0))
def test_a_longer_window_never_turns_a_hand_over_into_a_loss(
    cost: HandOverCost, window_s: float, more_s: float
) -> None:
    now_s = 7.0
    if Departure.at_notice(now_s + window_s, now_s, cost).hands_over:
        assert Departure.at_notice(now_s + window_s + more_s, now_s, cost).hands_over
        assert cost.total_s < window_s
    assert Departure.at_notice(inf, now_s, cost).hands_over


@given(COSTS, st.lists(st.tuples(st.floats(0.0, 50.0), COSTS), max_size=10), st.floats(0, 500))
def test_a_loss_that_is_decided_is_final(
    cost: HandOverCost, votes: list[tuple[float, HandOverCost]], window_s: float
) -> None:
    departure, now_s = Departure.at_notice(window_s, 0.0, cost), 0.0
    for passed_s, measured in votes:
        now_s += passed_s
        after = departure.at_vote(now_s, measured)
        assert departure.hands_over or not after.hands_over
        assert not after.hands_over or after.may_commit(now_s, measured)
        departure = after


@given(COSTS, st.floats(1.5, 600.0), st.data())
def test_the_rank_is_gone_in_time_and_never_within_a_change(
    cost: HandOverCost, window_s: float, data: st.DataObject
) -> None:
    """Whatever takes up to half as long again as measured, or a plan that comes late or never."""
    late = st.floats(0.2, 1.5)
    departure, now_s = Departure.at_notice(window_s, 0.0, cost), 0.0
    assume(not departure.ends(0.0, cost))
    prepared_s = data.draw(st.one_of(st.floats(0.0, window_s), st.just(inf)))
    handed_over = False
    for _ in range(1000):
        if departure.ends(now_s, cost):
            break
        now_s += cost.step_s * data.draw(late)
        departure = departure.at_vote(now_s, cost) if now_s >= prepared_s else departure
        if now_s >= prepared_s and departure.may_commit(now_s, cost):
            factor = data.draw(late)
            now_s += factor * (max(cost.step_s, cost.copy_s) + cost.pause_s)
            handed_over = True
            break
        if now_s > 40 * cost.step_s:
            now_s = max(now_s, window_s - 3 * cost.step_s)  # nothing new until the end is near
    assert now_s <= window_s
    assert handed_over or departure.ends(now_s, cost)


def test_the_worst_of_the_last_measurements_counts() -> None:
    meter = HandOverMeter()
    unmeasured = meter.cost(10**9)
    assert (unmeasured.copy_s, unmeasured.step_s) == (10.0, 0.0)
    assert unmeasured.prepare_s > 0
    for seconds in (9.0, 1.0, 2.0, 1.0, 1.0, 1.0):
        meter.step(seconds)
        meter.prepared(2 * seconds)
        meter.changed(10**9, seconds, seconds / 10)
    meter.changed(0, 0.0, 0.05)  # this rank received nothing
    cost = meter.cost(10**9)
    assert cost == HandOverCost(prepare_s=4.0, step_s=2.0, copy_s=2.0, pause_s=2.0)
