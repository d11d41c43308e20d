"""Plans use only what the job can take on; what it cannot do by itself becomes advice."""

from dataclasses import replace
from itertools import combinations, product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from resihp.contracts import (
    Action,
    FaultRate,
    InfeasibleError,
    Job,
    LayerCost,
    Layout,
    Links,
    LinkVerdict,
    Memory,
    ModelShape,
    Plan,
    Protection,
    Schedule,
    Status,
)
from scheduler import (
    SkiRental,
    make_plan,
    migration_ms,
    plan_front,
    policy_outcome,
    replan,
    simulate,
)
from scheduler.policies.base import Transition
from scheduler.switching_rule import RESTART_PAUSE_MS

SHAPE = ModelShape(layers=4, hidden=64, heads=4, kv_heads=4, ffn=128, vocab=100)
COST = LayerCost(forward_ms=10.0, backward_ms=20.0, step_ms=5.0)
SETS = [
    frozenset(chosen) for count in range(1, 5) for chosen in combinations(Action, count)
]  # every set of actions
SPEEDS = st.sampled_from([1.0, 1.0, 1.0, 0.9, 0.66, 0.5, 0.2, 0.02])
MAYBE_DEAD = st.one_of(SPEEDS, st.just(0.0))


def job(dp=4, pp=1, microbatches=16, actions=("quotas",), **more):
    return Job(
        name="job",
        layout=Layout.grid(dp=dp, pp=pp, tp=1, layers=4),
        microbatches=microbatches,
        cost=COST,
        actions=tuple(actions),
        **more,
    )


def first(job_):
    return Plan(version=0, layout=job_.layout, quotas=job_.quotas, schedule=job_.schedule)


def with_speeds(job_, speeds):
    return dict(zip(job_.layout.ranks, speeds, strict=False))


def shared_out(microbatches, replicas):
    """All quotas of one microbatch or more."""
    counts = product(range(1, microbatches + 1), repeat=replicas)
    return [quotas for quotas in counts if sum(quotas) == microbatches]


@pytest.mark.parametrize(
    ("dp", "pp", "microbatches", "slow", "speed"),
    [(16, 16, 1024, 4, 1 / 12), (2, 8, 256, 1, 1 / 60)],
)
def test_quotas_of_slow_replicas_fall_to_one_however_many_they_had(
    dp, pp, microbatches, slow, speed
):
    layout = Layout.grid(dp=dp, pp=pp, tp=1, layers=pp)
    one = Job(name="job", layout=layout, microbatches=microbatches, cost=COST, actions=("quotas",))
    speeds = {rank: speed for replica in layout.replicas[:slow] for rank in replica.ranks}
    share = (microbatches - slow) // (dp - slow)
    quotas = (1,) * slow + (share,) * (dp - slow)
    assert sum(quotas) == microbatches
    assert make_plan(one, speeds).step_ms <= simulate(one, layout, quotas, speeds).step_ms


@settings(deadline=None, max_examples=60)
@given(
    dp=st.integers(1, 3),
    pp=st.integers(1, 2),
    more=st.integers(0, 5),
    speeds=st.lists(SPEEDS, min_size=6, max_size=6),
    actions=st.sampled_from([("quotas",), ("notify", "quotas")]),
)
def test_quotas_alone_keep_the_layout_and_are_the_best_there_are(dp, pp, more, speeds, actions):
    one = job(dp, pp, dp + more, actions)
    known = with_speeds(one, speeds)
    decision = replan(one, first(one), known, step=7)
    times = [simulate(one, one.layout, q, known).step_ms for q in shared_out(dp + more, dp)]
    now_ms = simulate(one, one.layout, one.quotas, known).step_ms
    plan = decision.plan
    assert (plan is None) == (min(times) >= now_ms * 0.995)
    assert make_plan(one, known).step_ms == pytest.approx(min(times))
    if plan is not None:
        assert (plan.layout, plan.schedule) == (one.layout, one.schedule)
        assert (plan.version, plan.from_step, plan.action) == (1, 8, Action.QUOTAS)
        assert (sum(plan.quotas), min(plan.quotas) >= 1) == (one.microbatches, True)
        assert plan.step_ms == pytest.approx(min(times))
        assert plan.bound_ms <= plan.step_ms < now_ms


@pytest.mark.parametrize("actions", [("quotas",), ("layout", "quotas")])
@pytest.mark.parametrize("quotas", [(3, 0, 0, 0), (2, 1, 0, 0)])
def test_microbatches_stay_as_many_where_there_are_more_replicas(actions, quotas):
    one = job(4, 1, 3, actions, quotas=quotas)
    plan = make_plan(one, {})
    assert plan.quotas == (1, 1, 1, 0)
    assert replan(one, first(one), {}, step=0).plan.quotas == plan.quotas


def test_a_rank_that_is_better_left_out_keeps_a_microbatch():
    one = job(microbatches=64)
    decision = replan(one, first(one), {2: 0.02}, step=0)
    assert decision.plan.quotas == (21, 21, 1, 21)
    assert decision.advice.ranks == (2,)
    assert decision.advice.step_ms == decision.plan.step_ms
    left = make_plan(replace(one, actions=("layout",)), {2: 0.02})
    assert decision.advice.without_ms == left.step_ms
    assert "leave rank 2 out" in decision.explanation


@pytest.mark.parametrize(("pp", "microbatches", "changes"), [(1, 4, True), (3, 4, False)])
def test_a_job_estimated_above_its_memory_gets_quotas_that_need_no_more(pp, microbatches, changes):
    """With three stages the first one would hold three microbatches in flight, not two."""
    given = {"model": SHAPE, "tokens_per_microbatch": 512}
    roomy = job(2, pp, microbatches, **given)
    over = replace(roomy, memory=Memory(budget_bytes=1))
    speeds = {0: 0.25}
    assert make_plan(roomy, speeds).quotas == (1, 3)
    plan = make_plan(over, speeds)
    assert plan.quotas == ((1, 3) if changes else (2, 2))
    assert (replan(over, first(over), speeds, step=0).plan is not None) == changes
    held, now = (max(simulate(over, one).peak_bytes.values()) for one in (plan, first(over)))
    assert held <= now


@pytest.mark.parametrize(
    ("actions", "applied"),
    [
        (("layout", "quotas"), Action.QUOTAS),
        (("quotas", "restart"), Action.QUOTAS),
        (("layout",), Action.LAYOUT),
    ],
)
def test_a_job_estimated_above_its_memory_changes_in_place_where_no_layout_fits(actions, applied):
    memory = Memory(budget_bytes=1)
    over = job(2, 1, 4, actions, model=SHAPE, tokens_per_microbatch=512, memory=memory)
    decision = replan(over, first(over), {0: 0.25}, step=6)
    assert (decision.plan.quotas, decision.plan.layout) == ((1, 3), over.layout)
    assert (decision.plan.from_step, decision.action) == (7, applied)
    assert decision.explanation in decision.plan.reason
    assert "no new layout is feasible" in decision.explanation
    with pytest.raises(InfeasibleError):  # nothing is left to gain
        replan(over, decision.plan, {0: 0.25}, step=7)
    with pytest.raises(InfeasibleError):
        replan(over, first(over), {0: 0.0}, step=6)


def test_a_dead_rank_leaves_no_plan_where_only_quotas_can_change():
    one = job()
    decision = replan(one, first(one), {2: 0.0}, step=0)
    assert decision.plan is None
    assert "takes on other quotas only, and cannot go on without rank 2" in decision.explanation
    assert (decision.advice.stopped, decision.advice.step_ms) == ((2,), None)
    assert (
        decision.advice.without_ms == make_plan(replace(one, actions=("layout",)), {2: 0}).step_ms
    )
    for plan in (make_plan, plan_front):
        with pytest.raises(InfeasibleError, match="cannot go on without rank 2") as caught:
            plan(one, {2: 0.0})
        assert caught.value.constraint == "actions"


@settings(deadline=None, max_examples=60)
@given(
    dp=st.integers(1, 4),
    pp=st.integers(1, 2),
    each=st.integers(1, 4),
    speeds=st.lists(MAYBE_DEAD, min_size=8, max_size=8),
)
def test_notify_alone_never_yields_a_plan_and_advises_what_pays_most(dp, pp, each, speeds):
    one = job(dp, pp, dp * each, ("notify",))
    known = with_speeds(one, speeds)
    decision = replan(one, first(one), known, step=0)
    assert decision.plan is None
    assert decision.rental == SkiRental()
    with pytest.raises(InfeasibleError, match="takes on no plan"):
        make_plan(one, known)
    advice = decision.advice
    unhealthy = {rank for rank in one.layout.ranks if known[rank] < 1.0}
    dead = {rank for rank in unhealthy if known[rank] == 0.0}
    if advice is None:
        assert not dead
        replaced = simulate(one, one.layout).step_ms
        assert simulate(one, one.layout, speeds=known).step_ms <= replaced * 1.02
        return
    assert decision.action is Action.NOTIFY
    assert advice.summary in decision.explanation
    assert set(advice.ranks) <= unhealthy
    assert (advice.step_ms is None) == bool(dead)
    assert {*advice.stopped} == dead
    times = list(times_without(one, known, dead))
    if advice.without_ms is None:
        now_ms = [] if dead else [simulate(one, one.layout, speeds=known).step_ms]
        assert all(ms >= now / 1.02 - 1e-9 for ms in times for now in now_ms)
        assert not (dead and times)
    else:
        assert advice.without_ms == pytest.approx(min(times))
        kept = [r for r in one.layout.replicas if not {*advice.ranks, *advice.others} & {*r.ranks}]
        assert advice.without_ms == pytest.approx(work_ms(one, kept, known))
    healed = {**known, **dict.fromkeys(advice.ranks, 1.0)}
    assert advice.replaced_ms == pytest.approx(simulate(one, one.layout, speeds=healed).step_ms)


def work_ms(job_, kept, speeds):
    """Time of the work of a step in these replicas, which have equal quotas."""
    quotas = [job_.quotas[0]] * len(kept)
    step_ms = simulate(job_, Layout(tuple(kept)), quotas, speeds).step_ms
    return step_ms * job_.layout.dp / len(kept)


def times_without(job_, speeds, dead):
    """Times for all sets of one replica or more left."""
    alive = [r for r in job_.layout.replicas if not dead & set(r.ranks)]
    for count in range(1, len(alive) + 1):
        for kept in combinations(alive, count):
            yield work_ms(job_, kept, speeds)


@pytest.mark.parametrize(
    ("speeds", "per_node", "said"),
    [
        ({5: 0.5}, 4, "leave rank 5 out: steps 1.87x faster for the same work; replace it: 1.99x"),
        (dict.fromkeys(range(4, 8), 0.5), 4, "leave node 1 out (ranks 4, 5, 6 and 7): steps 1.49x"),
        (dict.fromkeys(range(4, 8), 0.5), 16, "leave ranks 4, 5, 6 and 7 out: steps 1.49x"),
        ({5: 0.0}, 4, "rank 5 has stopped: leave rank 5 out (steps take 1.07x as long"),
    ],
)
def test_advice_names_ranks_or_their_node(speeds, per_node, said):
    one = job(16, 1, 64, ("notify",), links=Links(ranks_per_node=per_node))
    decision = replan(one, first(one), speeds, step=0)
    assert decision.advice.summary.startswith(said)


def test_advice_names_the_ranks_that_go_with_their_replica():
    one = job(3, 2, 12, ("notify",))
    advice = replan(one, first(one), {1: 0.1}, step=0).advice
    assert (advice.ranks, advice.others) == ((1,), (4,))
    assert "leave rank 1 out, with rank 4 of its replica: " in advice.summary


def test_advice_for_a_single_replica_is_to_replace():
    one = job(1, 2, 4, ("notify",))
    advice = replan(one, first(one), {1: 0.5}, step=0).advice
    assert advice.without_ms is advice.gain is None
    assert advice.summary.startswith("replace rank 1: steps")
    stopped = replan(one, first(one), {1: 0.0}, step=0).advice
    assert stopped.summary == "rank 1 has stopped: replace it"


@pytest.mark.parametrize(("action", "speed"), [("notify", 0.08), ("quotas", 0.02)])
def test_advice_counts_slow_links_like_the_plan_beside_it(action, speed):
    """The replica without a slow device has a slow link."""
    model = replace(SHAPE, hidden=1024)
    links = Links(ranks_per_node=1, inter_gbytes_per_s=1.0)
    one = job(2, 2, 16, (action,), model=model, tokens_per_microbatch=4096, links=links)
    slow = [LinkVerdict(rank=1, peer=3, status=Status.FAIL_SLOW, slowdown=50.0)]
    assert replan(one, first(one), {0: speed}, step=0).advice.without_ms is not None
    decision = replan(one, first(one), {0: speed}, step=0, links=slow)
    current = decision.plan or first(one)
    step_ms = simulate(one, current, speeds={0: speed}, links=slow).step_ms
    assert decision.advice.step_ms == pytest.approx(step_ms)
    assert decision.advice.without_ms is None


def moving(actions, **more):
    """Job whose migrations take about a second."""
    links = Links(inter_gbytes_per_s=1e-3)
    return job(2, 2, 8, actions, model=SHAPE, links=links, **more)


def outcome_ms(job_, speeds, horizon, restart_ms):
    """Cost of the decision and of all steps within the horizon."""
    current = first(job_)
    decision = replan(job_, current, speeds, step=0, horizon_steps=horizon, restart_ms=restart_ms)
    plan = decision.plan
    if plan is None:
        if 0.0 in speeds.values():
            return float("inf")
        return horizon * simulate(job_, current, speeds=speeds).step_ms
    assert plan.action in job_.actions
    if plan.action is Action.RESTART:
        cost_ms = restart_ms + plan.step_ms
    else:
        cost_ms = migration_ms(job_, current.layout, plan.layout)
    return cost_ms + horizon * simulate(job_, plan, speeds=speeds).step_ms


@settings(deadline=None, max_examples=60)
@given(
    fewer=st.sampled_from(SETS),
    more=st.sampled_from(SETS),
    speeds=st.lists(SPEEDS, min_size=4, max_size=4),
    dead=st.one_of(st.none(), st.integers(0, 3)),
    horizon=st.sampled_from([1, 10, 100, 10_000]),
    restart_ms=st.sampled_from([1.0, 100.0, 10_000.0]),
)
def test_another_action_never_makes_the_outcome_worse(
    fewer, more, speeds, dead, horizon, restart_ms
):
    """Beyond the gains that are too small for a change: 2% of a step, and 0.5% in place."""
    known = dict(enumerate(speeds)) | ({} if dead is None else {dead: 0.0})
    one, other = moving(fewer), moving(fewer | more)
    before, after = (outcome_ms(each, known, horizon, restart_ms) for each in (one, other))
    assert after <= before / (0.98 * 0.995) * (1 + 1e-9)


@settings(deadline=None, max_examples=40)
@given(
    actions=st.sampled_from(SETS),
    speeds=st.lists(MAYBE_DEAD, min_size=4, max_size=4),
    horizon=st.sampled_from([None, 1, 10_000]),
)
@example(actions=frozenset({Action.RESTART}), speeds=[1.0] * 4, horizon=None)
def test_every_plan_is_one_of_the_jobs_actions(actions, speeds, horizon):
    one = moving(actions)
    if not any(speeds):
        return
    decision = replan(one, first(one), dict(enumerate(speeds)), step=0, horizon_steps=horizon)
    plans = [p for p in (decision.plan, decision.best and decision.best.plan) if p is not None]
    if one.takes_layouts:
        plans.append(make_plan(one, dict(enumerate(speeds))))
    for plan in plans:
        assert plan.action in actions
        assert plan.action is not Action.NOTIFY
        assert plan.layout == one.layout or plan.action is not Action.QUOTAS


@pytest.mark.parametrize(
    ("restart_ms", "action"), [(1.0, Action.RESTART), (None, Action.LAYOUT), (1e6, Action.LAYOUT)]
)
def test_the_cheaper_way_to_a_layout_is_taken(restart_ms, action):
    one = moving(("layout", "restart"))
    for speeds in ({1: 0.0}, {1: 0.02}):
        decision = replan(
            one, first(one), speeds, step=0, horizon_steps=10**6, restart_ms=restart_ms
        )
        assert decision.action is action
        assert 1 not in decision.plan.layout.ranks
        said = "applied by a restart, for" if action is Action.RESTART else "a restart would cost"
        assert said in decision.plan.reason[-1]


@pytest.mark.parametrize(
    ("protection", "again_ms"),
    [
        (None, None),
        (Protection(faults=FaultRate(1e6), interval_s=60.0, cost_s=1.0), 30_000.0),
        (Protection(faults=FaultRate(1e6)), 0.0),
    ],
)
def test_a_restart_costs_its_pause_and_the_work_done_again(protection, again_ms):
    one = job(2, 2, 8, ("restart",), protection=protection)
    for measured in (None, 2_000.0):
        best = replan(one, first(one), {1: 0.5}, step=0, restart_ms=measured).best
        again = best.plan.step_ms if again_ms is None else again_ms
        assert best.cost_ms == pytest.approx((measured or RESTART_PAUSE_MS) + again)


def test_a_restart_is_due_once_staying_has_cost_as_much():
    one = job(2, 2, 8, ("restart",))
    decision = replan(one, first(one), {1: 0.5}, step=0, restart_ms=1_000.0)
    assert decision.plan is None
    assert "for a restart of" in decision.explanation
    rental, steps = decision.rental, 0
    while not rental.due:
        rental, steps = rental.after_step(), steps + 1
    assert steps == decision.rental.steps_until_due > 0
    after = replan(one, first(one), {1: 0.5}, step=steps, rental=rental, restart_ms=1_000.0)
    assert after.action is Action.RESTART


def test_a_restart_may_keep_the_layout_and_change_the_quotas():
    one = job(4, 1, 16, ("restart",))
    plan = replan(one, first(one), {1: 0.5}, step=0, horizon_steps=10**6).plan
    assert (plan.layout, plan.action) == (one.layout, Action.RESTART)
    assert plan.quotas != one.quotas


def test_a_simulated_job_restarts_where_it_can_do_nothing_else():
    speeds = {1: 0.0}
    assert (
        policy_outcome("joint", job(actions=("restart",)), speeds).transition is Transition.RESTART
    )
    assert policy_outcome("joint", job(actions=("layout",)), speeds).transition is Transition.LIVE
    assert policy_outcome("joint", job(actions=("quotas",)), speeds).step_ms == float("inf")


@pytest.mark.parametrize(
    ("own", "others"),
    [
        (Schedule.EAGER_1F1B, (Schedule.ZERO_BUBBLE,)),
        (Schedule.ZERO_BUBBLE, (Schedule.ONE_F_ONE_B,)),
    ],
)
@pytest.mark.parametrize("actions", [(Action.QUOTAS,), (Action.QUOTAS, Action.RESTART)])
def test_quotas_are_timed_under_the_schedule_that_the_job_keeps(
    own: Schedule, others: tuple[Schedule, ...], actions: tuple[Action, ...]
) -> None:
    job = Job(
        name="job",
        layout=Layout.grid(dp=2, pp=3, tp=1, layers=6),
        microbatches=5,
        schedule=own,
        schedules=others,
        actions=actions,
    )
    current = Plan(version=0, layout=job.layout, quotas=(4, 1), schedule=own)
    live = replan(job, current, {0: 0.5}, step=0).plan
    for plan, speeds in ((make_plan(job, {}), {}), (live, {0: 0.5})):
        assert plan.step_ms == pytest.approx(simulate(job, plan, speeds=speeds).step_ms)
        assert plan.bound_ms <= plan.step_ms
        assert plan.action in actions
    assert live.schedule is own


@pytest.mark.parametrize("action", [Action.LAYOUT, Action.RESTART])
def test_no_plan_is_slower_than_the_layout_that_is_there(action: Action) -> None:
    """A small model in as much memory as its layout needs."""
    job = Job(
        name="job",
        layout=Layout.grid(dp=3, pp=3, tp=4, layers=6, units=4),
        microbatches=6,
        model=ModelShape(layers=6, hidden=256, heads=4, kv_heads=4, ffn=1024, vocab=1000),
        tokens_per_microbatch=1,
        actions=(action,),
    )
    peak = max(simulate(job, job.layout).peak_bytes.values())
    job = replace(job, memory=Memory(budget_bytes=int(peak) + 1))
    now = simulate(job, job.layout, speeds={0: 0.5}).step_ms
    assert make_plan(job, {0: 0.5}).step_ms <= now * (1 + 1e-9)
