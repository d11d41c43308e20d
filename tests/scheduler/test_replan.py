"""When a plan replaces another one: at once, once it pays, or never."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.contracts import (
    ContractError,
    Job,
    LayerCost,
    Layout,
    Links,
    ModelShape,
    Plan,
    Schedule,
)
from scheduler import (
    PlanOption,
    ReplanDecision,
    SkiRental,
    SwitchCandidate,
    make_plan,
    migration_ms,
    plan_front,
    replan,
    simulate,
)
from scheduler.switching_rule import decide, least_cost

PLANNED = (Schedule.ONE_F_ONE_B, Schedule.EAGER_1F1B, Schedule.ZERO_BUBBLE)
SHAPE = ModelShape(layers=8, hidden=512, heads=8, kv_heads=8, ffn=1024, vocab=1000)


def job(dp=2, pp=2, tp=2, microbatches=8, **given_):
    return Job(
        name="test",
        layout=Layout.grid(dp=dp, pp=pp, tp=tp, layers=8, units=8),
        microbatches=microbatches,
        cost=LayerCost(forward_ms=1.0, backward_ms=2.0),
        **given_,
    )


def slow_links(gbytes_per_s):
    """A job whose moves take their time."""
    links = Links(inter_gbytes_per_s=gbytes_per_s)
    return job(tp=1, microbatches=16, model=SHAPE, links=links)


@pytest.mark.parametrize(
    ("quotas", "given_", "field"),
    [
        ((4, 2), {}, "quotas"),
        ((4, 4), {"horizon_steps": -5}, "horizon_steps"),
        ((4, 4), {"horizon_steps": float("nan")}, "horizon_steps"),
        ((4, 4), {"time_limit_s": float("nan")}, "time_limit_s"),
        ((4, 4), {"restart_ms": -1.0}, "restart_ms"),
        ((4, 4), {"restart_ms": float("nan")}, "restart_ms"),
        ((4, 4), {"restart_ms": float("inf")}, "restart_ms"),
    ],
)
def test_what_a_change_cannot_be_made_for_is_refused(quotas, given_, field):
    one = job()
    with pytest.raises(ContractError) as caught:
        replan(one, Plan(version=0, layout=one.layout, quotas=quotas), {0: 0.5}, step=1, **given_)
    assert caught.value.field == field


@pytest.mark.parametrize("action", ["layout", "quotas", "restart", "notify"])
@pytest.mark.parametrize("layers", [4, 16])
def test_a_current_layout_of_other_layers_is_refused_whatever_the_job_takes_on(action, layers):
    one = job(actions=(action,))
    other = Layout.grid(dp=2, pp=2, tp=2, layers=layers, units=8)
    current = Plan(version=0, layout=other, quotas=one.quotas)
    with pytest.raises(ContractError, match=f"layout: holds {layers} layers, not 8"):
        replan(one, current, {0: 0.5}, step=1)


@pytest.mark.parametrize(
    ("actions", "speed"),
    [
        (("layout",), 0.5),
        (("quotas",), 0.5),
        (("restart",), 0.5),
        (("notify",), 0.5),
        (("notify",), 0.0),
        (("quotas",), 0.0),
    ],
)
def test_a_layout_that_cannot_run_is_refused_by_what_forbids_it(actions, speed):
    interleaved = {"schedule": Schedule.INTERLEAVED, "chunks": 2, "max_in_flight": 1}
    layout = Layout.grid(dp=2, pp=2, tp=1, layers=8, chunks=2)
    one = Job(name="test", layout=layout, microbatches=8, actions=actions, **interleaved)
    current = Plan(version=0, layout=layout, quotas=one.quotas, schedule=one.schedule)
    with pytest.raises(ContractError, match="max_in_flight"):
        replan(one, current, {0: speed}, step=1)


def test_quotas_in_place_stay_once_the_time_is_up():
    one = job(dp=4, pp=1, tp=1, actions=("quotas",))
    late = iter([0.0])
    plan = make_plan(one, {0: 0.5}, time_limit_s=1.0, clock=lambda: next(late, 2.0))
    assert plan.quotas == one.quotas != make_plan(one, {0: 0.5}).quotas


def test_a_good_plan_is_left_alone():
    one = job(microbatches=16)
    first = make_plan(one, {})
    assert replan(one, first, {}, step=5).plan is None
    assert replan(one, first, {3: 0.99}, step=5).plan is None
    second = replan(one, first, {3: 0.5}, step=5).plan
    assert second is not None
    assert (second.version, second.from_step) == (2, 6)
    assert replan(one, second, {3: 0.5}, step=9).plan is None


def test_another_schedule_moves_nothing_and_so_is_taken_at_once():
    one = job(dp=2, pp=4, tp=1)
    current = make_plan(one, {})
    change = replan(replace(one, schedules=PLANNED), current, {}, step=3).plan
    assert change.schedule is Schedule.ZERO_BUBBLE
    assert change.layout == current.layout
    assert "split backward" in " ".join(change.reason)


def test_where_moving_is_too_dear_only_quotas_change():
    one = slow_links(0.05)
    first = make_plan(one, {})
    free = replan(one, first, {2: 0.4}, step=1, horizon_steps=10**6).plan
    assert free.layout != first.layout
    decision = replan(one, first, {2: 0.4}, step=1)
    dear = decision.plan
    assert dear.layout == first.layout
    assert dear.quotas != first.quotas
    assert sum(dear.quotas) == 16
    assert dear.step_ms == pytest.approx(simulate(one, dear.layout, dear.quotas, {2: 0.4}).step_ms)
    assert free.step_ms < dear.step_ms
    assert decision.rental.candidate.saved_ms == pytest.approx(dear.step_ms - free.step_ms)
    again = replan(one, dear, {2: 0.4}, step=2, rental=decision.rental)
    assert again.plan is None
    assert again.rental.candidate.saved_ms == decision.rental.candidate.saved_ms


def test_a_change_that_is_not_made_is_told_with_when_it_would_pay():
    one = slow_links(0.05)
    current = make_plan(one, {})
    best = replan(one, current, {2: 0.4}, step=0).best
    assert best.cost_ms == pytest.approx(migration_ms(one, current.layout, best.plan.layout))
    steps = best.break_even_steps
    assert (steps - 1) * best.saved_ms < best.cost_ms <= steps * best.saved_ms
    for more, layout in ((1, best.plan.layout), (-2, current.layout)):
        horizon = steps + more
        plan = replan(one, current, {2: 0.4}, step=0, horizon_steps=horizon).plan
        assert plan.layout == layout


def test_a_gain_too_small_to_be_offered_is_told_all_the_same():
    one = slow_links(0.05)
    current = make_plan(one, {})
    moved = replan(one, current, {2: 0.4}, step=0, horizon_steps=10**6).plan
    little = replace(moved, step_ms=current.step_ms * 0.99)
    option = PlanOption.of(one, current.layout, little)
    decision = decide(one, current, [option], {}, SkiRental(), horizon_steps=None)
    assert decision.plan is decision.rental.candidate is None
    assert decision.best.plan == little
    option = PlanOption.of(one, current.layout, replace(moved, step_ms=current.step_ms))
    none = decide(one, current, [option], {}, SkiRental(), horizon_steps=None)
    assert none.best is None


def test_a_kept_layout_is_explained_with_when_a_migration_would_pay():
    best = SwitchCandidate(plan=ANY, saved_ms=3.0, cost_ms=100.0)
    small = ReplanDecision(plan=None, best=best, least_gain_ms=8.0)
    saves = "would save 3 ms per step for a migration of 100 ms and break even after 34 steps"
    assert saves in small.explanation
    assert "from a gain of 2% of the step (8 ms per step)" in small.explanation
    assert "with which it would break even after 13 steps" in small.explanation
    rental = SkiRental(lost_ms=40.0, candidate=best)
    waiting = ReplanDecision(plan=None, best=best, rental=rental)
    assert saves in waiting.explanation
    assert "applied if these speeds last 20 more steps" in waiting.explanation
    assert "expected to last 12 steps" in replace(waiting, horizon_steps=12).explanation
    assert "no new layout is faster" in ReplanDecision(plan=None).explanation


def test_a_new_layout_is_explained_with_what_it_gains_or_with_the_dead_rank():
    one = slow_links(0.05)
    current = make_plan(one, {})
    moved = replan(one, current, {2: 0.4}, step=0, horizon_steps=10**6)
    assert moved.plan.layout != current.layout
    assert moved.best.plan == moved.plan
    assert moved.explanation.endswith(" steps; it is applied now")
    dead = replan(one, current, {2: 0.0}, step=0)
    assert dead.explanation == "the layout cannot go on without rank 2"


def test_the_explanation_of_a_decision_comes_true():
    one = slow_links(0.05)
    current = make_plan(one, {})
    dear = replan(one, current, {2: 0.4}, step=0, horizon_steps=1)
    assert dear.plan.layout == current.layout
    assert dear.plan.reason[-1] == dear.explanation
    assert f"break even after {dear.best.break_even_steps} steps" in dear.explanation
    assert "expected to last 1 step" in dear.explanation
    small = replan(one, current, {2: 0.99}, step=0)
    if small.best is not None:
        least = small.least_gain_ms
        assert least == pytest.approx(0.02 * current.step_ms, rel=0.05) > small.best.saved_ms
        assert "from a gain of 2% of the step" in small.explanation
    slow = small.least_gain_ms / current.step_ms
    assert slow == pytest.approx(0.02, rel=0.05)


def test_what_goes_on_is_acted_on_once_it_has_cost_as_much_as_the_moves():
    one = slow_links(0.05)
    current = make_plan(one, {})
    decision = replan(one, current, {2: 0.4}, step=0)
    rental, steps = decision.rental, 0
    while not rental.due:
        rental, steps = rental.after_step(), steps + 1
    assert steps == decision.rental.steps_until_due > 0
    after = replan(one, decision.plan, {2: 0.4}, step=steps, rental=rental)
    assert after.plan.layout == rental.candidate.plan.layout
    assert after.rental == SkiRental()


def test_a_death_is_always_answered():
    one = job()
    plan = replan(one, make_plan(one, {}), {3: 0.0}, step=5).plan
    assert plan is not None
    assert 3 not in plan.layout.ranks


SITUATIONS = st.lists(
    st.tuples(
        st.integers(1, 30),  # steps that it lasts
        st.sampled_from([0.0, 0.01, 0.3, 1.0, 4.0]),  # lost in each by staying
        st.sampled_from([0.0, 0.5, 3.0, 20.0]),  # what the change costs
    ),
    min_size=1,
    max_size=12,
)
ANY = Plan(version=1, layout=Layout.grid(dp=1, pp=1, tp=1, layers=1), quotas=(1,))


def rented(situations, *, for_good=False):
    """What the rule loses: steps in a worse layout, and moves; `for_good`: one change is enough."""
    rental, lost = SkiRental(), 0.0
    for steps, saved, cost in situations:
        offer = SwitchCandidate(plan=ANY, saved_ms=saved, cost_ms=cost) if saved else None
        rental = rental.with_candidate(offer)
        for _ in range(steps):
            if rental.due:
                rental, lost = SkiRental(), lost + cost
                if for_good:
                    return lost
            elif rental.candidate:
                rental, lost = rental.after_step(), lost + saved
    return lost


@settings(max_examples=500, deadline=None)
@given(situations=SITUATIONS)
def test_at_most_twice_what_a_clairvoyant_loses(situations):
    """Who knows how long each situation lasts, and decides at its start whether to change."""
    clairvoyant = sum(min(steps * saved, cost) for steps, saved, cost in situations if saved)
    assert rented(situations) <= 2.0 * clairvoyant + 1e-9


@settings(max_examples=300)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=60),
    saved=st.sampled_from([0.1, 1.0, 3.0]),
    cost=st.sampled_from([1.0, 10.0, 50.0]),
)
def test_a_fault_that_comes_and_goes_costs_twice_one_change_at_most(lengths, saved, cost):
    """In a layout that serves as well without the fault, the clairvoyant changes once, or never."""
    situations = [(steps, saved if slow else 0.0, cost) for steps, slow in lengths]
    clairvoyant = min(sum(steps * lost for steps, lost, _ in situations), cost)
    assert rented(situations, for_good=True) <= 2.0 * clairvoyant + 1e-9


@pytest.mark.parametrize("dead", range(8))
def test_a_standby_takes_the_place_of_a_rank_that_dies_at_that_moment(dead):
    """The dead one still stands in the layout when the plan is made."""
    one = job()
    plan = make_plan(one, {dead: 0.0, 8: 1.0})
    assert set(plan.layout.ranks) == {*range(9)} - {dead}
    assert plan.step_ms == make_plan(one, {}).step_ms
    assert "rank 8 takes part" in plan.reason


def option(step_ms, migration_ms):
    plan = replace(ANY, layout=Layout.grid(dp=1, pp=1, tp=2, layers=1), step_ms=step_ms)
    return PlanOption(
        plan=plan, most_bytes=migration_ms, total_bytes=migration_ms, migration_ms=migration_ms
    )


@pytest.mark.parametrize(
    ("horizon_steps", "taken"), [(None, 2), (1, 2), (9, 2), (11, 1), (49, 1), (51, 0)]
)
def test_the_horizon_decides_what_a_job_moves_that_cannot_go_on(horizon_steps, taken):
    front = [option(100.0, 1000.0), option(101.0, 950.0), option(102.0, 940.0)]
    assert least_cost(front, horizon_steps) is front[taken]


def test_a_migration_that_takes_no_longer_is_worth_a_shorter_step():
    front = [option(100.0, 40.0), option(101.0, 40.0)]
    assert least_cost(front, None) is front[0]


@pytest.mark.parametrize(("horizon_steps", "taken"), [(None, 1), (3, 1), (10**6, 0)])
def test_of_several_layouts_one_that_pays_first_or_gains_most_is_the_candidate(
    horizon_steps, taken
):
    current = replace(ANY, quotas=(16,), layout=Layout.grid(dp=1, pp=1, tp=1, layers=8))
    one = Job(
        name="test",
        layout=current.layout,
        microbatches=16,
        cost=LayerCost(forward_ms=1.0, backward_ms=2.0),
    )
    now_ms = simulate(one, one.layout, (16,), {0: 0.5}).step_ms
    front = [option(now_ms / 2.0, 1000.0), option(now_ms / 1.98, 100.0)]
    decision = decide(one, current, front, {0: 0.5}, SkiRental(), horizon_steps=horizon_steps)
    assert decision.plan is front[taken].plan


@pytest.mark.parametrize("dead", range(0, 8, 3))
def test_after_a_loss_the_links_decide_what_is_moved(dead):
    """Over slow links and a short horizon a job takes the plan that moves least."""
    one = slow_links(0.001)
    current = make_plan(one, {})
    speeds = {dead % 4: 0.0}
    front = plan_front(one, speeds, current.layout)
    short = replan(one, current, speeds, step=1, horizon_steps=1).plan
    assert short.layout == min(front, key=lambda o: o.migration_ms).plan.layout
    long = replan(one, current, speeds, step=1, horizon_steps=10**9).plan
    assert long.step_ms == min(o.plan.step_ms for o in front)
