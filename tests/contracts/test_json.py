"""Documents to dataclasses and back; whoever wrote one by hand finds the place of the mistake."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.contracts import (
    Action,
    Advice,
    Cause,
    ContractError,
    Diagnosis,
    Job,
    LayerCost,
    Layout,
    ModelShape,
    Plan,
    Status,
    Verdict,
    from_json,
    to_json,
)

SHAPE = ModelShape(layers=8, hidden=64, heads=8, kv_heads=4, ffn=128, vocab=256)
COST = LayerCost(forward_ms=1.0, backward_ms=2.0)
JOB = Job(
    name="j", layout=Layout.grid(dp=2, pp=2, tp=2, layers=8), microbatches=6, model=SHAPE, cost=COST
)

degrees = st.integers(1, 4)


@st.composite
def layouts(draw):
    pp = draw(degrees)
    return Layout.grid(
        dp=draw(degrees), pp=pp, tp=draw(degrees), layers=pp + draw(st.integers(0, 9)), units=6
    )


def survives(value):
    return from_json(type(value), json.loads(json.dumps(to_json(value)))) == value


@settings(deadline=None, max_examples=50)
@given(layout=layouts(), microbatches=st.integers(1, 50), version=st.integers(0, 9))
def test_jobs_and_plans_survive(layout, microbatches, version):
    job = Job(name="j", layout=layout, microbatches=microbatches)
    assert survives(job)
    assert survives(Plan(version=version, layout=layout, quotas=job.quotas, reason=("why",)))


@settings(deadline=None, max_examples=50)
@given(
    rank=st.integers(0, 10**6),
    status=st.sampled_from(Status),
    slowdown=st.floats(0, 1e6),
    since=st.none() | st.integers(0, 2**63 - 1),
    interval=st.none() | st.tuples(st.floats(0, 9), st.floats(0, 9)),
    shares=st.dictionaries(st.sampled_from(Cause), st.floats(0, 1)),
)
def test_verdicts_and_diagnoses_survive(rank, status, slowdown, since, interval, shares):
    assert survives(
        Verdict(rank=rank, status=status, slowdown=slowdown, since_step=since, interval=interval)
    )
    assert survives(Diagnosis(slowdown=slowdown, root_cause=Cause.NONE, attribution=shares))


STAGE = ("layout", "replicas", 1, "stages")
MISTAKES = [
    (("nam",), "x", "nam"),
    (("name",), "", "name"),
    (("name",), "a/b", "name"),
    (("name",), 3, "name"),
    (("microbatches",), 0, "microbatches"),
    (("microbatches",), True, "microbatches"),
    (("microbatches",), 1.0, "microbatches"),
    (("quotas",), [6], "quotas"),
    (("quotas",), [7, -1], "quotas"),
    (("quotas",), [3, 4], "quotas"),
    (("quotas",), "33", "quotas"),
    (("quotas",), [3, "3"], "quotas[1]"),
    (("schedule",), "2f2b", "schedule"),
    (("schedule",), [], "schedule"),
    (("model", "kv_heads"), 3, "model.kv_heads"),
    (("model", "head_dim"), -1, "model.head_dim"),
    (("model", "hidden"), None, "model.hidden"),
    (("model", "layers"), 9, "layout"),
    (("model",), [], "model"),
    (("cost", "forward_ms"), 0, "cost.forward_ms"),
    (("cost", "fixed_ms"), -1, "cost.fixed_ms"),
    (("cost", "head_ms"), float("nan"), "cost.head_ms"),
    (("cost", "head_ms"), 10**400, "cost.head_ms"),
    (("microbatches",), 2**63, "microbatches"),
    (("links", "ranks_per_node"), 0, "links.ranks_per_node"),
    (("layout", "replicas"), [], "layout.replicas"),
    ((*STAGE, 0, "ranks"), [], "layout.replicas[1].stages[0].ranks"),
    ((*STAGE, 0, "ranks"), [0, 0], "layout.replicas[1].stages[0].ranks"),
    ((*STAGE, 0, "ranks"), [0, 2**31], "layout.replicas[1].stages[0].ranks"),
    ((*STAGE, 0, "ranks"), [0, 1], "layout.replicas"),
    ((*STAGE, 0, "shares"), [1], "layout.replicas[1].stages[0].shares"),
    ((*STAGE, 0, "shares"), [1, 0], "layout.replicas[1].stages[0].shares"),
    ((*STAGE, 0, "layers"), [0], "layout.replicas[1].stages[0].layers"),
    ((*STAGE, 0, "layers"), [4, 0], "layout.replicas[1].stages[0].layers"),
    ((*STAGE, 1, "layers"), [5, 8], "layout.replicas[1].stages[1].layers"),
    ((*STAGE, 1, "layers"), [4, 7], "layout.replicas"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "field"), MISTAKES)
def test_a_mistake_is_named_by_its_path(path, value, field):
    document = copy.deepcopy(to_json(JOB))
    place = document
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    with pytest.raises(ContractError) as caught:
        from_json(Job, document)
    assert caught.value.field == field
    assert str(caught.value).startswith(field)


@pytest.mark.parametrize("name", ["name", "layout", "microbatches"])
def test_what_is_missing_is_named(name):
    document = to_json(JOB)
    del document[name]
    with pytest.raises(ContractError, match="is missing") as caught:
        from_json(Job, document)
    assert caught.value.field == name


@pytest.mark.parametrize("value", [None, [], "x", 3])
def test_what_is_no_object(value):
    with pytest.raises(ContractError, match="must be an object"):
        from_json(Job, value)


@pytest.mark.parametrize("slowdown", [-0.1, float("nan"), float("-inf"), float("inf")])
def test_a_slowdown_is_a_factor(slowdown):
    for make in (
        lambda: Verdict(rank=0, status=Status.FAIL_SLOW, slowdown=slowdown),
        lambda: Diagnosis(slowdown=slowdown, root_cause=Cause.NONE),
    ):
        with pytest.raises(ContractError, match="slowdown: must be a factor"):
            make()


def test_a_job_says_what_it_can_take_on_in_any_order():
    document = to_json(JOB)
    assert document.pop("actions") == ["layout", "quotas"]
    assert from_json(Job, document) == JOB  # written before jobs had actions
    document["actions"] = ["notify", "restart", "quotas", "restart"]
    job = from_json(Job, document)
    assert job.actions == (Action.QUOTAS, Action.RESTART, Action.NOTIFY)
    assert replace(job, actions={"restart", Action.NOTIFY, "quotas"}) == job
    assert survives(job)
    assert from_json(Job, {**document, "actions": []}).actions == (Action.NOTIFY,)


@pytest.mark.parametrize(
    ("actions", "field"),
    [
        (["quota"], "actions[0]"),
        (["layout", 3], "actions[1]"),
        ("quotas", "actions"),
        (1, "actions"),
    ],
)
def test_an_action_that_there_is_not_is_named(actions, field):
    with pytest.raises(ContractError) as caught:
        from_json(Job, {**to_json(JOB), "actions": actions})
    assert caught.value.field == field


@pytest.mark.parametrize("actions", [("quota",), "quotas", (None,)])
def test_an_action_that_there_is_not_is_refused_in_python_too(actions):
    with pytest.raises(ContractError, match="actions: must be of layout, quotas"):
        replace(JOB, actions=actions)


def test_a_plan_says_by_which_action_it_is_applied_where_there_is_one():
    plan = Plan(version=0, layout=JOB.layout, quotas=JOB.quotas)
    assert "action" not in to_json(plan)
    restart = replace(plan, action=Action.RESTART)
    assert to_json(restart)["action"] == "restart"
    assert survives(plan)
    assert survives(restart)
    assert restart.digest == plan.digest


def test_advice_survives_and_says_what_is_gained():
    advice = Advice(ranks=(5,), others=(4,), step_ms=150.0, without_ms=120.0, replaced_ms=100.0)
    assert survives(advice)
    assert (advice.gain, advice.replaced_gain) == (pytest.approx(0.25), pytest.approx(0.5))
    stopped = Advice(ranks=(5,), stopped=(5,), step_ms=None, without_ms=120.0, replaced_ms=100.0)
    assert survives(stopped)
    assert stopped.gain is stopped.replaced_gain is None
    assert "steps take 1.20x as long" in stopped.summary
