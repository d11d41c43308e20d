"""Simulated steps: formulas, work per microbatch, memory, and the exported timeline."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.contracts import ContractError, Job, LayerCost, Layout, Memory, ModelShape, Schedule
from scheduler import make_plan, simulate

SHAPE = ModelShape(layers=8, hidden=64, heads=8, kv_heads=4, ffn=128, vocab=100)


def a_job(**more):
    return Job(
        name="j",
        layout=Layout.grid(dp=2, pp=4, tp=2, layers=8, units=4),
        microbatches=24,
        cost=LayerCost(forward_ms=1.0, backward_ms=2.0),
        **more,
    )


def step_ms(job, **more):
    return simulate(job, job.layout, job.quotas, **more).step_ms


def test_schedules_take_what_their_formulas_say():
    job = a_job()  # a stage: 2 layers on 2 ranks, so F = 1, B = 2
    assert step_ms(job) == pytest.approx((12 + 3) * 3)
    assert step_ms(replace(job, schedule=Schedule.ZERO_BUBBLE)) == pytest.approx(12 * 3 + 3 * 1)
    interleaved = replace(job, schedule=Schedule.INTERLEAVED, chunks=2)
    assert step_ms(interleaved) == pytest.approx(12 * 3 + 3 * 3 / 2)


def test_a_slow_rank_slows_its_stage_and_what_every_step_costs_is_added():
    job = replace(a_job(), cost=LayerCost(forward_ms=1.0, backward_ms=2.0, step_ms=5.0))
    trip, ahead = 3 * 3, 3 * 2  # what the first stage waits for, and runs meanwhile
    assert step_ms(job, speeds={0: 0.5}) == pytest.approx(12 * 6 + (trip - ahead) + 5)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_single_stage_takes_the_sum_of_its_work(seed):
    layout = Layout.grid(dp=1, pp=1, tp=1, layers=4)
    cost = LayerCost(forward_ms=1.0, backward_ms=2.0)
    job = Job(name="j", layout=layout, microbatches=6, cost=cost)
    work = np.random.default_rng(seed).uniform(0.2, 4.0, 6)
    taken = simulate(job, layout, job.quotas, work=[work.tolist()]).step_ms
    assert taken == pytest.approx(4 * 3 * work.sum())


def test_memory_follows_the_microbatches_in_flight():
    memory = Memory(
        bytes_per_param=0.0, optimizer_bytes_per_param=0.0, activation_bytes_per_layer=8
    )
    job = a_job(model=SHAPE, memory=memory)
    peak = simulate(job, job.layout, job.quotas).peak_bytes
    first = [peak[stage.ranks[0]] for stage in job.layout.replicas[0].stages]
    assert first == [2 * 8 * k / 2 for k in (4, 3, 2, 1)]
    split = simulate(replace(job, schedule=Schedule.ZERO_BUBBLE), job.layout, job.quotas)
    assert set(split.peak_bytes.values()) == {4 * 8.0}


def test_weights_and_both_ends_weigh_on_their_ranks():
    memory = Memory(bytes_per_param=1.0, optimizer_bytes_per_param=1.0, sharded_optimizer=True)
    job = a_job(model=SHAPE, memory=memory)
    peak = simulate(job, job.layout, job.quotas).peak_bytes
    middle, first = peak[job.layout.replicas[0].stages[1].ranks[0]], peak[0]
    assert middle == pytest.approx(2 * SHAPE.layer_params * 1.5 / 2)
    assert first - middle == pytest.approx(SHAPE.embedding_params * 1.5 / 2)


def test_the_timeline_is_json_with_a_row_per_stage():
    job = a_job()
    trace = json.loads(json.dumps(simulate(job, job.layout, job.quotas).perfetto()))
    passes = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(passes) == 2 * 4 * 12 * 2
    assert max(e["ts"] + e["dur"] for e in passes) == pytest.approx(1e3 * step_ms(job))
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert names == {f"stage {k}" for k in range(4)}


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"quotas": (24,)}, "quotas"),
        ({"quotas": (12, 12), "work": [[1.0], [1.0]]}, "work"),
        ({"quotas": (12, 12), "speeds": {0: 0.0}}, "speeds"),
    ],
)
def test_a_wrong_argument_is_named(arguments, field):
    job = a_job()
    with pytest.raises(ContractError) as caught:
        simulate(job, job.layout, **arguments)
    assert caught.value.field == field


def small_job():
    return Job(name="j", layout=Layout.grid(dp=2, pp=2, tp=1, layers=4), microbatches=4)


def test_work_may_be_one_list_for_all_replicas():
    job = small_job()
    rows = [[1.0, 3.0, 1.0], [0.5]]
    by_replica = simulate(job, job.layout, (3, 1), work=rows)
    assert simulate(job, job.layout, (3, 1), work=[1.0, 3.0, 1.0, 0.5]) == by_replica


@pytest.mark.parametrize("work", [[1.0], [[1.0, 1.0], [1.0]], [[1.0, -1.0], [1.0, 1.0]]])
def test_work_that_does_not_fit_is_refused(work):
    job = small_job()
    with pytest.raises(ContractError, match="work"):
        simulate(job, job.layout, (2, 2), work=work)


@pytest.mark.parametrize("speed", [-0.1, float("nan"), float("inf")])
def test_a_speed_that_is_none_is_refused(speed):
    job = small_job()
    with pytest.raises(ContractError, match="rank 1"):
        make_plan(job, {1: speed})


@pytest.mark.parametrize("speeds", [{1: "fast"}, {1: None}, {-1: 0.5}, {"1": 0.5}, {0.5: 1.0}])
def test_speeds_that_are_no_numbers_of_ranks_are_refused(speeds):
    with pytest.raises(ContractError, match="speeds"):
        make_plan(small_job(), speeds)


@pytest.mark.parametrize("quotas", [(2,), (3, -1), (), (2.0, 2.0), (True, 1), 5])
def test_quotas_that_are_none_are_refused(quotas):
    job = small_job()
    with pytest.raises(ContractError, match="quotas"):
        simulate(job, job.layout, quotas)


def test_a_layout_of_another_model_is_refused():
    job = small_job()
    other = Layout.grid(dp=job.layout.dp, pp=2, tp=1, layers=job.layout.layers + 1)
    with pytest.raises(ContractError, match="layout: holds"):
        make_plan(job, {}, other)
