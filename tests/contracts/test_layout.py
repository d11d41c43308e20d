"""The regular layout, and what a layout says of its ranks."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.contracts import (
    Cause,
    ContractError,
    Diagnosis,
    Job,
    Layout,
    LinkVerdict,
    Place,
    Plan,
    Replica,
    Schedule,
    Stage,
    Status,
    Verdict,
    even_quotas,
    from_json,
    to_json,
)


@settings(deadline=None, max_examples=100)
@given(
    dp=st.integers(1, 5),
    pp=st.integers(1, 5),
    tp=st.integers(1, 5),
    layers=st.integers(0, 40),
    spare=st.integers(0, 9),
)
def test_a_grid_places_every_rank_once_and_spreads_evenly(dp, pp, tp, layers, spare):
    layout = Layout.grid(dp=dp, pp=pp, tp=tp, layers=layers, units=tp + spare)
    assert sorted(layout.ranks) == list(range(dp * pp * tp))
    assert (layout.dp, layout.pp, layout.tp, layout.layers) == (dp, pp, tp, layers)
    for place in layout.places():
        assert place.rank == place.tp + tp * (place.dp + dp * place.pp)
        assert layout.place_of(place.rank) == place
        stage = layout.stage_at(place)
        assert stage.ranks[place.tp] == place.rank
        assert sum(stage.shares) == tp + spare
        assert max(stage.shares) - min(stage.shares) <= 1
        assert abs(stage.layers[1] - stage.layers[0] - layers / pp) < 1
    assert layout.place_of(dp * pp * tp) is None


def test_a_layout_that_was_asked_for_its_degrees_is_the_same():
    asked, fresh = (Layout.grid(dp=2, pp=3, tp=2, layers=6) for _ in range(2))
    assert (asked.pp, asked.tp) == (3, 2)
    for seen in (hash, repr, to_json):
        assert seen(asked) == seen(fresh)
    assert pickle.loads(pickle.dumps(asked)) == fresh
    narrow = replace(asked, replicas=Layout.grid(dp=1, pp=2, tp=1, layers=6).replicas)
    assert (narrow.pp, narrow.tp) == (2, 1)


def test_whole_numbers_of_numpy_become_plain_ones():
    stage = Stage(tuple(np.arange(2)), (0, 4), tuple(np.array([3, 1])))
    layout = Layout((Replica((stage,)),))
    assert {type(number) for number in (*stage.ranks, *stage.shares)} == {int}
    assert json.loads(json.dumps(to_json(layout))) == to_json(layout)
    plain = Layout((Replica((Stage((0, 1), (0, 4), (3, 1)),)),))
    digests = {Plan(version=0, layout=one, quotas=(4,)).digest for one in (layout, plain)}
    assert len(digests) == 1


def test_megatron_numbers_tp_fastest_and_pp_slowest():
    layout = Layout.grid(dp=2, pp=2, tp=2, layers=3)
    assert layout.place_of(6) == Place(rank=6, dp=1, pp=1, tp=0)
    assert [stage.layers for stage in layout.replicas[0].stages] == [(0, 2), (2, 3)]


def test_chunks_follow_one_another_stage_by_stage():
    layout = Layout.grid(dp=1, pp=2, tp=1, layers=5, chunks=2)
    assert [stage.chunks for stage in layout.replicas[0].stages] == [
        ((0, 2), (3, 4)),
        ((2, 3), (4, 5)),
    ]
    assert [stage.layer_count for stage in layout.replicas[0].stages] == [3, 2]
    assert (layout.layers, layout.replicas[0].chunks) == (5, 2)
    assert from_json(Layout, to_json(layout)) == layout
    flat = to_json(Layout.grid(dp=1, pp=2, tp=1, layers=5))
    assert set(flat["replicas"][0]["stages"][0]) == {"ranks", "layers", "shares"}


@pytest.mark.parametrize(
    ("stages", "field"),
    [
        ([Stage((0,), (0, 1), (), ((2, 3),)), Stage((1,), (1, 2))], "stages"),
        ([Stage((0,), (0, 1), (), ((1, 3),))], "stages"),
        (
            [Stage((0,), (0, 1), (), ((1, 3),)), Stage((1,), (1, 2), (), ((3, 4),))],
            "stages[0].more_layers[0]",
        ),
    ],
)
def test_chunks_that_cannot_be(stages, field):
    with pytest.raises(ContractError) as caught:
        Replica(tuple(stages))
    assert caught.value.field == field


def test_a_job_and_its_layout_agree_on_chunks():
    layout = Layout.grid(dp=1, pp=2, tp=1, layers=4, chunks=2)
    with pytest.raises(ContractError, match="chunks"):
        Job(name="job", layout=layout, microbatches=4)


@pytest.mark.parametrize(
    ("given", "field"), [({"dp": 0}, "dp, pp, tp"), ({"tp": 3, "units": 2}, "tp")]
)
def test_a_grid_that_cannot_be(given, field):
    with pytest.raises(ContractError) as caught:
        Layout.grid(**{"dp": 1, "pp": 1, "tp": 1, "layers": 2, **given})
    assert caught.value.field == field


@given(microbatches=st.integers(0, 999), replicas=st.integers(1, 40))
def test_even_quotas(microbatches, replicas):
    quotas = even_quotas(microbatches, replicas)
    assert sum(quotas) == microbatches
    assert len(quotas) == replicas
    assert max(quotas) - min(quotas) <= 1
    assert list(quotas) == sorted(quotas, reverse=True)


def test_plans_check_themselves_and_know_their_gap():
    layout = Layout.grid(dp=2, pp=1, tp=1, layers=2)
    plan = Plan(version=1, layout=layout, quotas=(3, 1), step_ms=11, bound_ms=10)
    assert plan.gap == pytest.approx(0.1)
    assert plan.microbatches == 4
    for wrong, field in (
        ({"version": -1}, "version"),
        ({"quotas": (4,)}, "quotas"),
        ({"from_step": -1}, "from_step"),
        ({"step_ms": float("nan")}, "step_ms"),
        ({"bound_ms": float("inf")}, "bound_ms"),
        ({"step_ms": 1e308, "bound_ms": 1e-300}, "bound_ms"),  # whose gap is no number
    ):
        with pytest.raises(ContractError) as caught:
            Plan(**{"version": 0, "layout": layout, "quotas": (2, 2), **wrong})
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("given", "field"), [({"ranks": (0.5,)}, "ranks"), ({"shares": (1.5,)}, "shares")]
)
def test_ranks_and_shares_are_whole_numbers(given, field):
    with pytest.raises(ContractError, match=field):
        Stage(**{"ranks": (0,), "layers": (0, 1), **given})


def test_ranks_that_stand_in_two_places_are_named():
    replicas = [Replica((Stage((rank, rank + 1), (0, 1)),)) for rank in (0, 1, 2)]
    with pytest.raises(ContractError, match=r"ranks \[1, 2\] stand in two places"):
        Layout(tuple(replicas))


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"layout": Layout.grid(dp=1, pp=1, tp=1, layers=0)}, "layout"),
        ({"max_in_flight": 0}, "max_in_flight"),
        ({"chunks": 2}, "chunks"),
        ({"chunks": 2, "schedule": Schedule.EAGER_1F1B}, "chunks"),
        ({"tokens_per_microbatch": -5}, "tokens_per_microbatch"),
    ],
)
def test_a_job_that_cannot_be(given, field):
    layout = Layout.grid(dp=1, pp=1, tp=1, layers=1)
    with pytest.raises(ContractError) as caught:
        Job(**{"name": "j", "layout": layout, "microbatches": 1, **given})
    assert caught.value.field == field


def test_a_slow_link_has_a_finite_factor():
    with pytest.raises(ContractError, match="slowdown"):
        LinkVerdict(rank=0, peer=1, status=Status.FAIL_SLOW, slowdown=float("inf"))


def test_a_status_and_a_cause_may_be_given_by_name():
    link = LinkVerdict(rank=0, peer=1, status="fail_slow", slowdown=2.0)
    assert link.status is Verdict(rank=0, status="fail_slow").status is Status.FAIL_SLOW
    assert Diagnosis(slowdown=1.0, root_cause="host").root_cause is Cause.HOST
    with pytest.raises(ContractError, match="status: must be one of healthy, suspect"):
        Verdict(rank=0, status="slow")


def test_a_job_without_quotas_spreads_its_microbatches():
    job = Job(name="j", layout=Layout.grid(dp=3, pp=1, tp=1, layers=1), microbatches=7)
    assert job.quotas == (3, 2, 2)
    with pytest.raises(ContractError, match="replicas"):
        even_quotas(5, 0)


@pytest.mark.parametrize("quotas", [(2.5, 1.5), (5, -1), (4,)])
def test_quotas_are_whole_numbers_one_for_each_replica(quotas):
    layout = Layout.grid(dp=2, pp=1, tp=1, layers=2)
    with pytest.raises(ContractError, match="quotas"):
        Job(name="j", layout=layout, microbatches=4, quotas=quotas)


def test_a_replica_holds_no_more_in_flight_than_the_stages_before_it():
    stages = Layout.grid(dp=1, pp=3, tp=1, layers=3).replicas[0].stages
    replica = Replica(stages, in_flight=(5, 2, 1))
    assert from_json(Replica, to_json(replica)) == replica
    assert "in_flight" not in to_json(Replica(stages))
    for counts in ((1, 2, 1), (3, 2), (2, 1, 0)):
        with pytest.raises(ContractError, match="in_flight"):
            Replica(stages, in_flight=counts)


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"microbatches": 2**24 + 1}, "microbatches"),
        ({"schedule": "zero_bubble", "chunks": 257}, "chunks"),
        ({"layout": Layout.grid(dp=1, pp=1, tp=1, layers=100_001)}, "layout"),
    ],
)
def test_a_job_is_of_a_size_that_can_be_planned_for(more, field):
    """Of one of 10^9 microbatches a few hundred bytes tell."""
    known = {"name": "j", "layout": Layout.grid(dp=1, pp=1, tp=1, layers=100_000)}
    Job(**known, microbatches=2**24)
    with pytest.raises(ContractError) as caught:
        Job(**{**known, "microbatches": 1, **more})
    assert caught.value.field == field
