"""Costs fitted to measured steps: predictions are those steps, and follow the plan from there."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.contracts import Job, LayerCost, Layout, Links, ModelShape, Schedule
from scheduler import make_plan, model_preset, simulate
from scheduler.calibration import calibrated, compute_ms
from scheduler.cost_model import all_reduce_ms, layer_cost


def a_job(**given_):
    given_.setdefault("cost", LayerCost(forward_ms=1.0, backward_ms=2.0, head_ms=0.5))
    layout = Layout.grid(dp=2, pp=2, tp=2, layers=8, units=8)
    return Job(name="test", layout=layout, microbatches=12, **given_)


@settings(deadline=None, max_examples=60)
@given(
    schedule=st.sampled_from(list(Schedule)),
    forward=st.floats(0.2, 5.0),
    backward=st.floats(0.2, 5.0),
    step_ms=st.floats(1.0, 2000.0),
)
def test_the_first_layout_takes_what_was_measured(schedule, forward, backward, step_ms):
    job = calibrated(a_job(schedule=schedule), forward=forward, backward=backward, step_ms=step_ms)
    assert simulate(job, job.layout, job.quotas).step_ms == pytest.approx(step_ms)
    plan = make_plan(job, {3: 0.5})
    assert plan.bound_ms <= plan.step_ms * (1 + 1e-9)
    assert plan.step_ms >= step_ms * (1 - 1e-9) or schedule is Schedule.INTERLEAVED


def test_what_ranks_compute_is_their_part_of_the_layers_and_ends():
    expected = compute_ms(a_job())
    assert expected[0] == pytest.approx((6 * 4 * 0.5, 6 * 4 * 1.0))
    last = a_job().layout.replicas[0].stages[-1].ranks[0]
    assert expected[last] == pytest.approx((6 * (2.0 + 0.25), 6 * (4.0 + 0.5)))


def test_what_is_left_is_latency_where_groups_reduce():
    shape = ModelShape(layers=8, hidden=64, heads=8, kv_heads=8, ffn=128, vocab=100)
    job = a_job(model=shape, tokens_per_microbatch=128)
    healthy_ms = simulate(job, job.layout, job.quotas).step_ms
    measured = {"forward": 1.1, "backward": 0.9, "step_ms": 2.0 * healthy_ms, "besides_ms": 3.0}
    fitted = calibrated(job, **measured)
    step_ms = simulate(fitted, job.layout, job.quotas).step_ms
    assert step_ms == pytest.approx(measured["step_ms"])
    assert fitted.cost.step_ms == pytest.approx(3.0, abs=1e-3 * step_ms)
    assert fitted.links.latency_ms > job.links.latency_ms
    alone = Layout.grid(dp=4, pp=2, tp=1, layers=8, units=8)
    lone_ms = simulate(fitted, alone, (3,) * 4).step_ms
    assert lone_ms < simulate(job, alone, (3,) * 4).step_ms + 0.3 * step_ms


def test_collectives_get_no_more_than_they_were_seen_to_take():
    shape = ModelShape(layers=8, hidden=64, heads=8, kv_heads=8, ffn=128, vocab=100)
    job = a_job(model=shape, tokens_per_microbatch=128)
    healthy_ms = simulate(job, job.layout, job.quotas).step_ms
    measured = {"forward": 1.0, "backward": 1.0, "step_ms": 2.0 * healthy_ms}
    fitted = calibrated(job, **measured, collective_ms=0.1)
    assert all_reduce_ms(fitted, 2) == pytest.approx(0.1)
    assert simulate(fitted, job.layout, job.quotas).step_ms == pytest.approx(2.0 * healthy_ms)
    assert fitted.cost.step_ms > 0.5 * healthy_ms
    ample = calibrated(job, **measured, collective_ms=1e6)
    free = calibrated(job, **measured)
    assert ample.links.latency_ms == pytest.approx(free.links.latency_ms)


def test_a_fixed_cost_that_is_the_rest_of_the_step_leaves_no_latency():
    """Also where the parts of a step are rounded to more than it."""
    shape = ModelShape(layers=8, hidden=64, heads=8, kv_heads=8, ffn=128, vocab=100)
    job = a_job(model=shape, tokens_per_microbatch=128, links=Links(latency_ms=0.0))
    step_ms = 120.22597649302581
    ratios = {"forward": 0.5578277590060701, "backward": 1.544336483955579}
    fitted = calibrated(job, **ratios, step_ms=step_ms, besides_ms=1e3)
    assert fitted.links.latency_ms == 0.0
    assert step_of(fitted) == pytest.approx(step_ms)


def step_of(job):
    return simulate(job, job.layout, job.quotas).step_ms


def with_slow_links(**links):
    return Job(
        name="test",
        layout=Layout.grid(dp=2, pp=2, tp=4, layers=32, units=8),
        microbatches=8,
        model=model_preset("llama-3-8b"),
        tokens_per_microbatch=8192,
        device="H100",
        links=Links(ranks_per_node=1, **links),
    )


@pytest.mark.parametrize("collective_ms", [None, 1.0, 100.0])
def test_links_that_are_modelled_too_slow_leave_measured_compute_as_it_is(collective_ms):
    step_ms = step_of(with_slow_links(inter_gbytes_per_s=100.0))
    job = with_slow_links()
    measured = {"forward": 1.0, "backward": 1.0, "step_ms": step_ms, "besides_ms": 3.0}
    fitted = calibrated(job, **measured, collective_ms=collective_ms)
    assert step_of(fitted) == pytest.approx(step_ms)
    assert replace(fitted.cost, step_ms=0.0) == layer_cost(job)
    if collective_ms == 1.0:
        assert all_reduce_ms(fitted, 4) == pytest.approx(1.0)
    else:
        assert fitted.links.inter_gbytes_per_s == pytest.approx(100.0, rel=0.02)


@pytest.mark.parametrize("part", [0.8, 0.3])
def test_compute_above_the_step_is_scaled_down_to_it(part):
    job = with_slow_links()
    computing_ms = step_of(replace(job, cost=layer_cost(job), model=None))
    step_ms = part * computing_ms
    fitted = calibrated(job, forward=1.0, backward=1.0, step_ms=step_ms, besides_ms=3.0)
    assert step_of(fitted) == pytest.approx(step_ms)
    assert fitted.cost.step_ms == 0.0
    kept = fitted.cost.forward_ms / layer_cost(job).forward_ms
    assert 0.8 * part < kept < part


def test_the_fixed_cost_of_a_step_is_reduced_before_compute():
    job = a_job()
    computing_ms = step_of(job)
    measured = {"step_ms": 1.02 * computing_ms, "besides_ms": 0.1 * computing_ms}
    fitted = calibrated(job, forward=1.0, backward=1.0, **measured)
    assert step_of(fitted) == pytest.approx(1.02 * computing_ms)
    assert fitted.cost == replace(job.cost, step_ms=fitted.cost.step_ms)


def test_a_cost_of_every_step_stays_when_devices_slow_down():
    job = a_job()
    healthy_ms = simulate(job, job.layout, job.quotas).step_ms
    fitted = calibrated(job, forward=1.0, backward=1.0, step_ms=healthy_ms + 30.0)
    slow = {3: 0.5}
    assert make_plan(fitted, slow).step_ms == pytest.approx(make_plan(job, slow).step_ms + 30.0)
