"""Numbers of microbatches in flight that hide slow links: quicker, within memory, certified."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.contracts import (
    Action,
    Job,
    LayerCost,
    Layout,
    Links,
    LinkVerdict,
    Memory,
    ModelShape,
    Plan,
    Schedule,
    Status,
    from_json,
    to_json,
)
from scheduler import make_plan, plan_front, policy_outcome, replan, simulate
from scheduler.forwards_ahead import with_forwards_ahead
from scheduler.link_costs import LinkSlowdowns
from scheduler.search.plan_bounds import layout_bound

ACTIVATION = 34 * 4096 * 1024  # bytes of a layer for a microbatch


def job(dp=1, pp=4, tp=1, layers=8, microbatches=16, in_flight=40, **given_):
    """A job whose devices have memory for so many microbatches of two layers."""
    model = ModelShape(layers=layers, hidden=1024, heads=8, kv_heads=8, ffn=4096, vocab=1000)
    weights = 2 * 14 * model.layer_params + 14 * model.embedding_params
    room = in_flight * 2 * ACTIVATION
    memory = Memory(budget_bytes=weights + room, activation_bytes_per_layer=ACTIVATION)
    given_.setdefault("memory", memory)
    return Job(
        name="test",
        layout=Layout.grid(dp=dp, pp=pp, tp=tp, layers=layers, units=8),
        microbatches=microbatches,
        model=model,
        tokens_per_microbatch=4096,
        cost=LayerCost(forward_ms=4.0, backward_ms=8.0),
        links=Links(ranks_per_node=2, inter_gbytes_per_s=25.0),
        **given_,
    )


def between_hosts(factor):
    """The links of the hosts of ranks 0, 1 and of ranks 2, 3."""
    return [
        LinkVerdict(rank=one, peer=other, status=Status.FAIL_SLOW, slowdown=factor)
        for one, other in ((0, 2), (1, 3))
    ]


@settings(deadline=None, max_examples=40)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(2, 4)),
    microbatches=st.integers(1, 12),
    factor=st.sampled_from([1.5, 10.0, 60.0, 300.0]),
    in_flight=st.sampled_from([5, 8, 40]),
    cap=st.none() | st.integers(4, 7),
    schedule=st.sampled_from([Schedule.ONE_F_ONE_B, Schedule.EAGER_1F1B]),
    seed=st.integers(0, 10**6),
)
def test_the_order_is_never_slower_and_fits_into_memory(
    shape, microbatches, factor, in_flight, cap, schedule, seed
):
    rng = np.random.default_rng(seed)
    dp, pp = shape
    one = job(dp, pp, 1, 2 * pp, dp * microbatches, in_flight, max_in_flight=cap)
    speeds = {int(r): 0.5 for r in rng.choice(one.layout.ranks, rng.integers(0, 2), replace=False)}
    ends = rng.choice(one.layout.ranks, 2, replace=False).tolist()
    links = [LinkVerdict(rank=ends[0], peer=ends[1], status=Status.FAIL_SLOW, slowdown=factor)]
    slow = LinkSlowdowns.of(one, links)
    found = with_forwards_ahead(one, one.layout, one.quotas, speeds, slow, schedule)
    if found is None:
        return
    layout, quotas, makespan_ms = found
    plain = simulate(one, one.layout, one.quotas, speeds, schedule=schedule, links=links).step_ms
    given_ = {"schedule": Schedule.EAGER_1F1B, "links": links}
    played = simulate(one, layout, quotas, speeds, **given_)
    assert played.step_ms == pytest.approx(makespan_ms)
    assert makespan_ms < plain
    assert sum(quotas) == one.microbatches
    assert max(played.peak_bytes.values()) <= one.memory.budget_bytes
    assert max(max(r.in_flight) for r in layout.replicas) <= (cap or 1000)
    bound = layout_bound(one, layout, quotas, Schedule.EAGER_1F1B, speeds, makespan_ms, slow)
    assert bound <= makespan_ms * (1 + 1e-9)


@settings(deadline=None, max_examples=8)
@given(
    factor=st.sampled_from([3.0, 30.0, 200.0]),
    microbatches=st.sampled_from([4, 16]),
    in_flight=st.sampled_from([5, 9, 40]),
)
def test_plans_between_two_hosts_are_no_slower_than_in_the_plain_order(
    factor, microbatches, in_flight
):
    one, links = job(microbatches=microbatches, in_flight=in_flight), between_hosts(factor)
    plain = make_plan(replace(one, schedules=(Schedule.ONE_F_ONE_B,)), {}, links=links)
    plan = make_plan(one, {}, links=links)
    assert plan.step_ms <= plain.step_ms * (1 + 1e-9)
    assert plan.bound_ms <= plan.step_ms
    played = simulate(one, plan, links=links)
    assert played.step_ms == pytest.approx(plan.step_ms)
    assert max(played.peak_bytes.values()) <= one.memory.budget_bytes
    assert from_json(Plan, to_json(plan)) == plan
    front = plan_front(one, {}, links=links)
    steps, moved = zip(*((o.plan.step_ms, o.total_bytes) for o in front), strict=True)
    assert list(steps) == sorted(steps)
    assert list(moved) == sorted(moved, reverse=True)
    quickest = front[0].plan
    assert plan.step_ms <= quickest.step_ms * (1 + 1e-9)
    assert simulate(one, quickest, links=links).step_ms == pytest.approx(quickest.step_ms)


def test_a_slow_link_that_every_plan_crosses_is_hidden():
    """Eager 1F1B covers one microbatch; the transfers of this link last longer than that."""
    one, links = job(microbatches=32), between_hosts(100.0)
    healthy = make_plan(one, {}).step_ms
    eager = simulate(one, one.layout, schedule=Schedule.EAGER_1F1B, links=links).step_ms
    plan = make_plan(one, {}, links=links)
    (replica,) = plan.layout.replicas
    assert eager > 1.5 * healthy
    assert plan.step_ms < 1.1 * healthy
    assert plan.schedule is Schedule.EAGER_1F1B
    assert replica.in_flight[1] - replica.in_flight[2] > 2
    assert any("microbatches in flight per stage" in sentence for sentence in plan.reason)


def test_a_job_that_permits_only_1f1b_keeps_its_order():
    one = job(schedules=(Schedule.ONE_F_ONE_B,))
    plan = make_plan(one, {}, links=between_hosts(100.0))
    assert not any(replica.in_flight for replica in plan.layout.replicas)


def test_a_running_job_changes_its_order_in_place_and_back():
    one, links = job(microbatches=32, actions=(Action.LAYOUT,)), between_hosts(100.0)
    current = make_plan(one, {}, version=1)
    decision = replan(one, current, {}, step=5, links=links)
    assert decision.plan is not None
    assert decision.plan.layout.replicas[0].in_flight
    assert decision.plan.layout.replicas[0].stages == current.layout.replicas[0].stages
    again = replan(one, decision.plan, {}, step=6, links=links)
    assert again.plan is None


@pytest.mark.parametrize("factor", [100.0, 200.0])
def test_adaptra_hides_the_link_and_this_scheduler_is_no_slower(factor):
    one, links = job(microbatches=32), between_hosts(factor)
    steps = {
        name: policy_outcome(name, one, {}, links).step_ms
        for name in ("nothing", "greyhound", "adaptra", "joint")
    }
    assert steps["adaptra"] < steps["nothing"]
    assert steps["joint"] <= steps["adaptra"] * (1 + 1e-9)
    assert steps["joint"] <= steps["greyhound"] * (1 + 1e-9)
    assert policy_outcome("adaptra", one, {0: 0.0}, links).step_ms == float("inf")


def test_greyhound_moves_a_group_off_a_slow_link_where_there_is_another_way():
    one = job(2, 2, microbatches=16, layers=4)
    link = LinkVerdict(rank=0, peer=2, status=Status.FAIL_SLOW, slowdown=100.0)
    outcome = policy_outcome("greyhound", one, {}, [link])
    assert outcome.step_ms == pytest.approx(policy_outcome("greyhound", one, {}).step_ms)
    assert outcome.layout != one.layout
