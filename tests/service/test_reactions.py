"""Latency from a fault to the plan that accounts for it, and to its application by all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resihp.contracts import Plan, from_json, to_json
from resihp.contracts.codec import WireFormat, encode
from service.store.documents import JobMessage, MessageKind, dumps
from service.worker.planning import Planner
from service.worker.reactions import ReactionLog, latest_seconds
from service.worker.session import JobSession
from tests.service.conftest import batch_of, job_of
from tests.service.fakes import fake_adapters

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(("step", "fault", "recovered", "planned", "applied")), st.integers(0, 3)
    ),
    max_size=60,
)


@given(EVENTS)
def test_moments_are_in_order_and_each_fault_is_answered_once(
    events: list[tuple[str, int]],
) -> None:
    """Each second one event: of rank, or plan, with this number; faults began a step before."""
    log, step, version = ReactionLog(), 0, 0
    for now_s, (kind, number) in enumerate(events):
        if kind == "step":
            step += 1
            log.step(step, now_s)
        elif kind == "fault":
            log.fault(number, "fail_slow", max(step - 1, 0), step, now_s)
        elif kind == "recovered":
            log.recovered(number)
        elif kind == "planned":
            version += 1
            log.planned(version, step, now_s)
        else:
            log.applied(version - number, step, now_s)
        assert from_json(ReactionLog, json.loads(dumps(to_json(log)))) == log
    for reaction in log.done:
        moments = (reaction.onset, reaction.verdict, reaction.plan, reaction.applied)
        times = [one.unix_s for one in moments if one is not None and one.unix_s is not None]
        steps = [one.step for one in moments if one is not None]
        assert times == sorted(times)
        assert steps == sorted(steps)
        assert reaction.ranks
        assert all(part is None or part >= 0 for part in reaction.durations().values())
    versions = [reaction.version for reaction in log.done]
    assert versions == sorted(set(versions))


def test_a_plan_that_replaces_one_not_applied_answers_the_faults_of_both() -> None:
    log = ReactionLog()
    log.step(7, 70.0)
    log.fault(3, "fail_slow", 7, 8, 81.0)
    log.planned(1, 8, 82.0)
    log.fault(5, "fail_stop", 8, 8, 83.0)
    log.planned(2, 9, 90.0)
    assert log.applied(1, 9, 91.0) is None
    reaction = log.applied(2, 11, 95.0)
    assert reaction is not None
    assert reaction.ranks == (3, 5)
    assert reaction.durations() == {"detect": 11.0, "plan": 9.0, "apply": 5.0, "total": 25.0}
    assert latest_seconds(log.documents()) == reaction.durations()


def test_a_verdict_that_is_repeated_is_no_new_fault_until_the_rank_has_recovered() -> None:
    log = ReactionLog()
    for again in (False, False, True):
        if again:
            log.recovered(3)
        log.fault(3, "fail_slow", 7, 8, 81.0)
        log.planned(1, 8, 82.0)
        log.applied(1, 8, 83.0)
    log.fault(3, "fail_stop", 9, 9, 90.0)
    log.planned(2, 9, 91.0)
    assert [len(log.done), log.open is not None] == [2, True]


def test_an_onset_that_is_forgotten_leaves_the_other_parts() -> None:
    log = ReactionLog()
    for step in range(10_000):
        log.step(step, float(step))
    log.fault(3, "fail_slow", 2, 9_999, 10_000.0)
    log.planned(1, 9_999, 10_001.0)
    reaction = log.applied(1, 10_003, 10_004.0)
    assert reaction is not None
    durations = {"detect": None, "plan": 1.0, "apply": 3.0, "total": None}
    assert reaction.durations() == durations
    assert latest_seconds(log.documents()) == {"plan": 1.0, "apply": 3.0}
    assert len(log.steps) < 5_000


def test_an_onset_after_a_job_went_back_is_not_the_time_of_the_step_before() -> None:
    log = ReactionLog()
    for now_s, step in enumerate((*range(100), *range(60, 64)), start=500):
        log.step(step, float(now_s))
    log.fault(3, "fail_slow", 62, 63, 604.0)
    log.fault(4, "fail_slow", 64, 64, 605.0)
    assert [fault.onset.unix_s for fault in log.faults.values()] == [602.0, 605.0]


@pytest.fixture
def start() -> Iterator[Callable[[list[float]], JobSession]]:
    """Sessions whose clock is the last entry of a list."""
    planner = Planner(fake_adapters(), time_limit_s=5.0)
    first = Plan(version=0, layout=job_of().layout, quotas=job_of().quotas)
    yield lambda now: JobSession(job_of(), first, fake_adapters(), planner, unix_s=lambda: now[-1])
    planner.close()


def tell(session: JobSession, step: int, *, slow: tuple[int, ...] = (), version: int = 0) -> None:
    batch = batch_of(step, slow=slow, plan_version=version)
    body = encode(batch, WireFormat.MSGPACK)
    session.apply(JobMessage(f"{step}-0", MessageKind.TELEMETRY, body))


def test_a_session_measures_from_the_first_slow_step_to_the_last_acknowledgement(start) -> None:
    now = [100.0]
    session = start(now)
    for step in range(3):
        now.append(100.0 + step)
        tell(session, step)
    now.append(110.0)
    tell(session, 3, slow=(3,))
    restored = start(now)
    restored.resume(session.save())
    (plan,) = session.changes.plans
    for index, rank in enumerate(plan.layout.ranks):
        now.append(120.0 + index)
        ack = {"version": 1, "rank": rank, "state": "applied", "step": 5}
        restored.apply(JobMessage(f"50-{index}", MessageKind.ACK, dumps(ack).encode()))
    (reaction,) = restored.status()["reactions"]
    assert (reaction["version"], reaction["ranks"], reaction["verdict"]["step"]) == (1, [3], 3)
    assert reaction["plan"] == {"step": 3, "unix_s": 110.0}
    assert reaction["applied"]["unix_s"] == now[-1]
    assert reaction["seconds"]["apply"] == now[-1] - 110.0
    (event,) = [told for kind, told in restored.changes.events if kind == "plan_applied"]
    assert event["reaction"] == reaction


def test_a_plan_of_the_jobs_own_is_applied_when_it_is_told(start) -> None:
    now = [7.0]
    session = start(now)
    first = session.planning.active
    layout = fake_adapters().replan(job_of(), first, {6: 0.0}, step=3).plan.layout
    plan = Plan(version=1, layout=layout, quotas=first.quotas)
    body = dumps({"plan": to_json(plan), "lost": [6], "step": 3}).encode()
    session.apply(JobMessage("50-0", MessageKind.OWN_PLAN, body))
    (reaction,) = session.status()["reactions"]
    assert (reaction["version"], reaction["ranks"]) == (1, [6])
    seconds = {"detect": None, "plan": 0.0, "apply": 0.0, "total": None}
    assert reaction["seconds"] == seconds  # the stand-in's verdicts name no onset
