"""Peers' policies: anchors from their papers, and what every one of them must keep."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.contracts import Job, LayerCost, Layout, Memory, Schedule
from scheduler.policies import POLICIES, policy_outcome
from scheduler.policies.base import counts_by_rate
from scheduler.policies.malleus import least_largest
from scheduler.policies.resihp_rule import resihp_rule

PEERS = sorted(name for name in POLICIES if not name.startswith("joint"))


def a_job(*, dp=4, pp=4, tp=4, layers=16, microbatches=32, **more):
    layout = Layout.grid(dp=dp, pp=pp, tp=tp, layers=layers, units=32)
    cost = LayerCost(forward_ms=1.0, backward_ms=2.0)
    return Job(name="j", layout=layout, microbatches=microbatches, cost=cost, **more)


def faults(seed, ranks=64, slow=4, dead=2):
    random = np.random.default_rng(seed)
    picked = random.permutation(ranks)[: slow + dead].tolist()
    speeds = (1.0 / random.uniform(1.2, 4.0, slow)).tolist() + [0.0] * dead
    return dict(zip(picked, speeds, strict=True))


@pytest.mark.parametrize("name", PEERS)
def test_without_faults_nothing_changes(name):
    job = a_job()
    outcome = policy_outcome(name, job, {})
    assert outcome.quotas == job.quotas
    best = (8 + 4 - 1) * 3.0 if name != "recycle" else 8 * 3.0 + 3 * 1.0  # one layer per rank
    assert outcome.step_ms == pytest.approx(best)


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("seed", range(6))
def test_no_dead_rank_works_and_no_microbatch_is_lost(name, seed):
    job, speeds = a_job(), faults(seed)
    outcome = policy_outcome(name, job, speeds)
    if outcome.layout is None:
        assert math.isinf(outcome.step_ms) or name in ("recycle", "resihp-rule")
        return
    assert sum(outcome.quotas) == job.microbatches
    assert all(speeds.get(rank, 1.0) > 0.0 for rank in outcome.layout.ranks)
    assert outcome.layout.layers == job.layout.layers
    assert math.isfinite(outcome.step_ms)


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("speeds", [{}, {0: 0.5}])
def test_a_pipeline_may_have_more_stages_than_layers(name, speeds):
    outcome = policy_outcome(name, a_job(pp=4, tp=1, layers=2), speeds)
    assert math.isfinite(outcome.step_ms)
    assert sum(outcome.quotas) == 32


def test_malleus_gives_the_layers_that_its_own_planner_gives():
    """One straggler of 2.57x among 64 GPUs, 70B: [[3, 7, 14, 28, 28], [16] * 5]."""
    layout = Layout.grid(dp=2, pp=4, tp=8, layers=80, units=64)
    cost = LayerCost(forward_ms=1.0, backward_ms=2.0)
    job = Job(name="j", layout=layout, microbatches=64, cost=cost)
    outcome = policy_outcome("malleus", job, {0: 1 / 2.57})
    rows = sorted([s.layers[1] - s.layers[0] for s in r.stages] for r in outcome.layout.replicas)
    assert rows == [[3, 7, 14, 28, 28], [16] * 5]
    assert 0 not in outcome.layout.ranks


@settings(deadline=None, max_examples=100)
@given(
    rates=st.lists(st.sampled_from([0.3, 1.0, 2.0, 3.5, 4.0]), min_size=1, max_size=6),
    total=st.integers(6, 80),
)
def test_the_least_largest_part_is_that_of_the_exact_greedy_rule(rates, total):
    counts = counts_by_rate(rates, total)
    exact = max(count / rate for count, rate in zip(counts, rates, strict=True))
    assert least_largest(rates, total) == pytest.approx(exact)


def test_the_resihp_rule_moves_layers_off_a_halved_stage():
    """(4, 4, 4) becomes (5, 2, 5) when the middle stage keeps half of its ranks."""
    job = a_job(dp=1, pp=3, tp=2, layers=12, microbatches=8)
    outcome = policy_outcome("resihp-rule", job, {job.layout.replicas[0].stages[1].ranks[0]: 0.0})
    stages = outcome.layout.replicas[0].stages
    assert [s.layers[1] - s.layers[0] for s in stages] == [5, 2, 5]


@pytest.mark.parametrize("seed", range(6))
def test_each_step_of_the_resihp_rule_makes_no_job_slower(seed):
    job, speeds = a_job(), faults(seed, slow=6, dead=0)
    one, two, three = (resihp_rule(job, speeds, steps).step_ms for steps in (1, 2, 3))
    assert three <= two <= one * (1 + 1e-9)
    assert three < one


CROSSED = {"dp": 2, "pp": 2, "tp": 1, "layers": 2, "microbatches": 16}  # one layer a stage


def crossed(job):
    """Speeds at which each replica is slow in another stage, so that no quotas help."""
    stages = [replica.stages for replica in job.layout.replicas]
    return {stages[0][0].ranks[0]: 0.5, stages[1][1].ranks[0]: 0.5}


def test_the_resihp_rule_sends_microbatches_of_a_slow_stage_to_its_peers():
    job = a_job(**CROSSED)
    outcome = policy_outcome("resihp-rule", job, crossed(job))
    assert outcome.layout is None
    assert policy_outcome("greyhound", job, crossed(job)).step_ms >= 8 * 6.0
    # two peers have 1.5 of the speed of one: 16 microbatches of 3 ms take them 32 ms
    assert 32.0 <= outcome.step_ms <= 40.0


def test_the_resihp_rule_sends_microbatches_only_where_they_fit_into_memory():
    roomy = a_job(**CROSSED, schedules=(Schedule.ONE_F_ONE_B,))
    memory = Memory(budget_bytes=100, activation_bytes_per_layer=50)  # two in flight
    full = replace(roomy, memory=memory)
    free, limited = (policy_outcome("resihp-rule", job, crossed(job)) for job in (roomy, full))
    assert free.step_ms < limited.step_ms


def test_the_resihp_rule_times_a_replica_that_gives_all_of_its_microbatches_away():
    job = a_job(dp=3, pp=1, tp=1, layers=5, microbatches=3)
    assert policy_outcome("resihp-rule", job, {0: 0.8, 2: 0.1}).step_ms == pytest.approx(30.0)


def test_recycle_shares_a_dead_stage_among_its_peers():
    job = a_job(dp=2, pp=1, tp=1, layers=1, microbatches=8)
    assert policy_outcome("recycle", job, {0: 0.0}).step_ms == pytest.approx(2 * 4 * 3.0)


def test_recycle_shares_the_work_of_a_straggler_by_speed():
    """Six microbatches at full speed and three at half take 18 ms; five each would take 30."""
    job = a_job(dp=2, pp=1, tp=1, layers=1, microbatches=9)
    assert policy_outcome("recycle", job, {0: 0.5}).step_ms == pytest.approx(6 * 3.0)


def test_oobleck_gives_a_straggler_fewer_layers_where_that_is_faster():
    job = a_job(dp=1, pp=2, tp=1, layers=12, microbatches=8)
    outcome = policy_outcome("oobleck", job, {0: 0.5})
    counts = [stage.layer_count for stage in outcome.layout.replicas[0].stages]
    assert counts == [4, 8]


def test_doing_nothing_stops_at_the_first_death():
    assert math.isinf(policy_outcome("nothing", a_job(), {5: 0.0}).step_ms)
