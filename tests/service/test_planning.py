"""What a session makes of verdicts: plans at once, once they pay, or again after a failure."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import NoReturn

import numpy as np
import pytest
from fakes import fake_adapters

from detector.step_time import StepExpectation
from resihp.contracts import (
    Action,
    FaultRate,
    InfeasibleError,
    Layout,
    Op,
    Plan,
    Protection,
    Status,
    TelemetryBatch,
    Verdict,
    from_json,
    to_json,
)
from resihp.contracts.codec import WireFormat, encode
from scheduler import make_plan, replan, simulate
from service import Settings
from service.store.documents import JobMessage, MessageKind, PendingChanges
from service.worker import forecast as forecast_module
from service.worker.adapters import load_adapters
from service.worker.forecast import Forecast, ForecastState
from service.worker.planning import (
    Planner,
    PlanningRetry,
    PlanningState,
    speeds_changed,
    speeds_of,
)
from service.worker.session import JobSession
from service.worker.step_times import StepTime, StepTimes
from tests.service.conftest import batch_of, job_of

RANKS = range(8)


@pytest.fixture
def sessions() -> Iterator[object]:
    planners = []

    def start(adapters=None, **fields):
        adapters = adapters or fake_adapters()
        planners.append(Planner(adapters, time_limit_s=5.0))
        job = job_of(**fields)
        plan = Plan(version=0, layout=job.layout, quotas=job.quotas)
        return JobSession(job, plan, adapters, planners[-1])

    yield start
    for planner in planners:
        planner.close()


def tell(session, *steps, slow=(), version=0):
    for step in steps:
        batch = batch_of(step, slow=slow, plan_version=version)
        session.apply(
            JobMessage(f"{step}-0", MessageKind.TELEMETRY, encode(batch, WireFormat.MSGPACK))
        )


def test_a_plan_that_moves_little_is_published_at_once(sessions):
    session = sessions()
    tell(session, 0, 1, 2, slow=(3,))
    assert [plan.version for plan in session.changes.plans] == [1]


def test_a_device_that_recovers_before_the_plan_without_it_is_applied_is_healthy(sessions):
    session = sessions()
    tell(session, 0, 1, 2, slow=(3,))
    assert 3 not in session.planning.newest.layout.ranks
    assert 3 in session.planning.active.layout.ranks
    tell(session, 3, 4)
    assert session.planning.speeds == {}
    assert session.planning.outcome["state"] == "kept"


def test_a_message_costs_no_verdict_on_healthy_ranks(sessions, monkeypatch):
    session = sessions()

    def verdicts(_):
        raise AssertionError("a verdict on every rank of the job was asked for")

    monkeypatch.setattr(type(session._detector), "verdicts", verdicts)
    tell(session, 0, 1, 2)
    tell(session, 3, 4, slow=(3,))
    assert "error" not in {kind for kind, _ in session.changes.events}
    assert [plan.version for plan in session.changes.plans] == [1]


def test_a_dear_plan_is_published_once_staying_has_cost_as_much(sessions):
    session = sessions(device="dear")
    tell(session, 0, slow=(3,))
    assert session.planning.outcome["state"] == "kept"
    assert "if these speeds last 5 more steps" in session.planning.outcome["detail"]
    tell(session, 1, 2, 3, 4, slow=(3,))
    assert not session.changes.plans  # four steps are complete
    tell(session, 5, slow=(3,))
    (plan,) = session.changes.plans
    assert (plan.version, plan.from_step) == (1, 6)
    assert 3 not in plan.layout.ranks


def test_a_dear_plan_is_published_at_once_where_the_next_fault_is_far_enough(sessions):
    long, soon = (Protection(faults=FaultRate(mtbf_s)) for mtbf_s in (3600.0, 1e-3))
    session = sessions(device="dear", protection=long)
    tell(session, 0, 1)
    tell(session, 2, slow=(3,))
    assert [plan.version for plan in session.changes.plans] == [1]
    session = sessions(device="dear", protection=soon)
    tell(session, 0, 1)
    tell(session, 2, slow=(3,))
    assert session.planning.outcome["state"] == "kept"


def test_each_device_that_stops_brings_the_horizon_nearer(sessions):
    asked = []

    def noting(*given, **more):
        asked.append(more["horizon_steps"])
        return fake_adapters().replan(*given, **more)

    known = Protection(faults=FaultRate(3600.0))
    session = sessions(replace(fake_adapters(), replan=noting), protection=known)
    tell(session, 0, 1)
    for rank in (3, 5):
        body = json.dumps({"ranks": [rank], "step": 1, "detail": "lost"}).encode()
        session.apply(JobMessage(f"9{rank}-0", MessageKind.FAILURE, body))
    assert asked[1] == pytest.approx(asked[0] * 2 / 3, rel=1e-3)
    other = sessions(replace(fake_adapters(), replan=noting), protection=known)
    other.resume(session.save())
    tell(other, 2, slow=(1,))
    assert asked[-1] == asked[-2]


def test_a_protected_job_loses_a_rank_before_all_of_its_first_second_is_heard(sessions):
    """The fault rate counted less than no time, and the failure brought an error in place of a
    plan."""
    session = sessions(protection=Protection(faults=FaultRate(3600.0)))
    session.tick(0.25, 1.0)
    tell(session, 0, 1)
    body = json.dumps({"ranks": [6], "step": 1, "detail": "lost"}).encode()
    session.apply(JobMessage("90-0", MessageKind.FAILURE, body))
    assert [plan.version for plan in session.changes.plans] == [1]
    assert "error" not in [kind for kind, _ in session.changes.events]


def test_an_account_survives_a_restart(sessions):
    session = sessions(device="dear")
    tell(session, 0, 1, 2, 3, 4, slow=(3,))
    other = sessions(device="dear")
    other.resume(session.save())
    tell(other, 5, slow=(3,))
    assert len(other.changes.plans) == 1


@pytest.mark.parametrize("part", ["detector", "steps"])
def test_plans_survive_a_detector_whose_state_cannot_be_read(sessions, part):
    """As that of another version of the service."""
    session = sessions()
    tell(session, 0, 1, 2, slow=(3,))
    tell(session, 3, version=1)
    other = sessions()
    other.resume(session.save() | {part: b"of another format"})
    assert [kind for kind, _ in other.changes.events] == ["error"]
    assert other.planning.active == session.planning.active
    tell(other, 4, version=1)
    assert other.last_step == 4
    tell(other, 5, slow=(5,), version=1)
    (plan,) = other.changes.plans
    assert (plan.version, plan.from_step) == (2, 6)
    assert not {3, 5} & set(plan.layout.ranks)


def test_a_rank_that_stopped_stays_so_for_a_detector_whose_state_cannot_be_read(sessions):
    """Before the ranks have taken on the plan without it: it was planned with again."""
    session, other = sessions(), sessions()
    tell(session, 0, 1)
    body = json.dumps({"ranks": [6], "step": 1, "detail": "lost"}).encode()
    session.apply(JobMessage("90-0", MessageKind.FAILURE, body))
    assert session.planning.speeds == {6: 0.0}
    other.resume(session.save() | {"detector": b"of another format"})
    tell(other, 2)
    assert other.planning.speeds == {6: 0.0}
    assert other.planning.newest.version == 1
    (verdict,) = (v for v in other.status()["verdicts"] if v["rank"] == 6)
    assert verdict["status"] == Status.FAIL_STOP.value


def test_what_recovers_in_time_is_not_acted_on(sessions):
    session = sessions(device="dear")
    tell(session, 0, 1, 2, slow=(3,))
    tell(session, *range(3, 20))
    assert not session.changes.plans


def test_planning_that_failed_is_tried_again_after_a_while(sessions):
    tries = []

    def fails_twice(*given, **more):
        tries.append(more["step"])
        if len(tries) <= 2:
            raise InfeasibleError("time", "planning took longer than 5 s")
        return fake_adapters().replan(*given, **more)

    session = sessions(replace(fake_adapters(), replan=fails_twice))
    tell(session, 0, slow=(3,))
    assert session.planning.outcome["constraint"] == "time"
    for _ in range(4):
        session.tick(1.0, 0.0)
    assert len(tries) == 1
    session.tick(1.0, 0.0)
    assert len(tries) == 2
    for _ in range(9):
        session.tick(1.0, 0.0)
    assert len(tries) == 2
    session.tick(1.0, 0.0)
    assert len(tries) == 3
    assert [plan.version for plan in session.changes.plans] == [1]
    told = [event for kind, event in session.changes.events if kind == "planning"]
    assert len(told) == 1


def test_the_wait_before_another_try_doubles_up_to_ten_minutes():
    retry, waits = PlanningRetry(), []
    for _ in range(9):
        retry = retry.after_failure(100.0)
        waits.append(retry.due_s - 100.0)
    assert waits[:3] == [5.0, 10.0, 20.0]
    assert waits[-1] == 600.0


def healthy_steps(job, per_layer, besides_ms):
    """Records of a fleet that computes 1.1 times what the model says, and the steps' times."""
    for step in range(20):
        place = [job.layout.place_of(rank) for rank in RANKS]
        layers = np.array([np.diff(job.layout.stage_at(p).layers)[0] for p in place])
        forward = np.repeat(1.1 * per_layer * layers / 2.0, 4)
        yield (
            step,
            TelemetryBatch(
                rank=np.tile(np.repeat(RANKS, 4), 2),
                step=np.full(64, step),
                microbatch=np.tile(np.arange(4), 16),
                op=np.repeat([Op.FORWARD, Op.BACKWARD], 32),
                compute_ms=np.concatenate([forward, 2.0 * forward]),
            ),
            1.1 * simulate(job, job.layout, job.quotas).step_ms + besides_ms,
        )


def learn(forecast, plan, step, batch, observed_ms, *, healthy=True):
    times = StepTimes(plan.layout.ranks)
    times.add(batch)
    (whole,) = times.move(plan.layout.ranks)
    forecast.add(batch)
    forecast.learn(plan, StepTime(step, observed_ms, whole.ranks), healthy=healthy)


def test_predictions_are_fitted_to_the_first_healthy_steps():
    job = job_of()  # without a cost: a layer is taken to need 1 ms forward
    forecast = Forecast(job)
    first = Plan(version=0, layout=job.layout, quotas=job.quotas)
    assert forecast.predict(first) is None
    assert forecast.basis() is None
    for step, batch, observed_ms in healthy_steps(job, 1.0, 7.0):
        learn(forecast, first, step, batch, observed_ms)
    assert simulate(forecast.job, job.layout, job.quotas).step_ms == pytest.approx(observed_ms)
    assert "12 healthy steps" in forecast.basis()
    slow = {3: 0.5}
    plan = replan(forecast.job, first, slow, step=20).plan
    truth = 1.1 * simulate(job, plan.layout, plan.quotas, slow).step_ms + 7.0
    assert forecast.for_new_plan(plan) == pytest.approx(truth)
    again = Forecast(job, from_json(ForecastState, json.loads(json.dumps(to_json(forecast.state)))))
    assert again.predict(plan) == forecast.predict(plan)
    assert again.basis() == forecast.basis()


def test_a_loop_that_times_one_kind_of_pass_is_fitted_too():
    job = job_of()
    forecast = Forecast(job)
    first = Plan(version=0, layout=job.layout, quotas=job.quotas)
    for step, batch, _ in healthy_steps(job, 1.0, 7.0):
        learn(forecast, first, step, batch.select(batch.op == Op.FORWARD), 50.0)
    assert forecast.predict(first) == 50.0
    assert simulate(forecast.job, job.layout, job.quotas).step_ms == pytest.approx(50.0)


def test_steps_that_take_next_to_no_time_leave_a_state_that_can_be_read():
    job = job_of()
    forecast = Forecast(job)
    first = Plan(version=0, layout=job.layout, quotas=job.quotas)
    for step, batch, observed_ms in healthy_steps(job, 1.0, 7.0):
        tiny = replace(batch, compute_ms=batch.compute_ms * 1e-300)
        learn(forecast, first, step, tiny, observed_ms * 1e-300)
    for step, measured_ms in enumerate((0.0, 5e-324, 10.0)):
        forecast.note_error(StepExpectation(step, measured_ms, expected_ms=20.0))
    assert forecast.state.errors == (1.0,)
    again = Forecast(job, from_json(ForecastState, json.loads(json.dumps(to_json(forecast.state)))))
    assert again.predict(first) is None, "no layer takes so little"


def test_costs_of_a_job_of_too_many_microbatches_are_not_fitted(monkeypatch: pytest.MonkeyPatch):
    """It would hold up the worker of other jobs, for minutes with millions of them."""

    def too_long(*_: object, **__: object) -> NoReturn:
        raise AssertionError

    monkeypatch.setattr(forecast_module, "calibrated", too_long)
    for job in (
        replace(job_of(), quotas=(), microbatches=2**24),
        replace(job_of(), quotas=(), microbatches=2**16, schedule="interleaved", chunks=2),
    ):
        forecast = Forecast(job)
        first = Plan(version=0, layout=job.layout, quotas=job.quotas)
        for step, batch, observed_ms in healthy_steps(job_of(), 1.0, 7.0):
            learn(forecast, first, step, batch, observed_ms)
        assert forecast.predict(first) is None
        assert len(forecast.state.steps) >= 8


def test_steps_of_a_slow_fleet_are_no_baseline():
    job = job_of()
    forecast = Forecast(job)
    first = Plan(version=0, layout=job.layout, quotas=job.quotas)
    for step, batch, observed_ms in healthy_steps(job, 1.0, 7.0):
        learn(forecast, first, step, batch, observed_ms, healthy=False)
    assert forecast.predict(first) is None
    early = make_plan(job, {3: 0.5})
    assert forecast.for_new_plan(early) is None
    for step, batch, observed_ms in healthy_steps(job, 1.0, 7.0):
        learn(forecast, first, step, batch, observed_ms)
    assert forecast.predict(early) is None
    assert forecast.for_new_plan(replace(early, version=2)) is not None


def test_a_device_outside_the_layout_keeps_its_speed_until_it_is_found_healthy():
    known, working = {3: 0.5}, [{0, 1}, {0, 2}]
    others = [Verdict(rank=rank, status=Status.HEALTHY) for rank in (0, 1, 2)]
    slow = Verdict(rank=3, status=Status.FAIL_SLOW, slowdown=2.0)
    healthy = Verdict(rank=3, status=Status.HEALTHY)
    for verdicts in (others, [*others, slow]):
        assert speeds_of(verdicts, known, working) == known
    speeds = speeds_of([*others, healthy], known, working)
    assert speeds == {}
    assert speeds_changed(known, speeds)


def test_whether_a_plan_is_needed_is_no_matter_of_the_number_of_ranks():
    """It is asked with every message, also after a device has left the layout."""

    class Ranks(tuple[int, ...]):
        def __iter__(self) -> NoReturn:
            raise AssertionError("all ranks were looked at")

    plan = Plan(version=1, layout=Layout.grid(dp=2, pp=2, tp=2, layers=4), quotas=(4, 4))
    assert 99 not in plan.layout.members
    vars(plan.layout)["ranks"] = Ranks(plan.layout.ranks)
    state = PlanningState({1: plan}, 1, speeds={99: 0.0})
    planner = Planner(fake_adapters(), time_limit_s=5.0)
    assert not planner.is_needed(state, [], 0.0)
    assert state.speeds == {99: 0.0}


def test_a_joiner_is_planned_with_until_it_works_or_fails(sessions):
    asked = []

    def noting(job, current, speeds, **more):
        asked.append(dict(speeds))
        return fake_adapters().replan(job, current, speeds, **more)

    session = sessions(replace(fake_adapters(), replan=noting))
    tell(session, 0)
    session.apply(
        JobMessage("90-0", MessageKind.JOINER, json.dumps({"ranks": [8], "step": 0}).encode())
    )
    assert asked[-1][8] == 1.0
    other = sessions(replace(fake_adapters(), replan=noting))
    other.resume(session.save())
    tell(other, 1, slow=(3,))
    assert asked[-1][8] == 1.0
    gone = {"ranks": [8], "step": 1, "detail": "lost"}
    other.apply(JobMessage("91-0", MessageKind.FAILURE, json.dumps(gone).encode()))
    assert asked[-1].get(8) != 1.0


def test_a_joiner_with_the_number_of_a_lost_rank_may_come_before_the_last_answer(sessions):
    """It is announced once, and was forgotten: the rank was still one of the active plan."""
    session = sessions()
    tell(session, 0)
    lost = {"ranks": [6], "step": 1, "detail": "lost"}
    session.apply(JobMessage("90-0", MessageKind.FAILURE, json.dumps(lost).encode()))
    joiners = json.dumps({"ranks": [0, 6], "step": 1}).encode()
    session.apply(JobMessage("91-0", MessageKind.JOINER, joiners))
    for rank in session.planning.newest.layout.ranks:
        acknowledge(session, 1, rank, 5.0)
    assert session.planning.active_version == 1
    assert session.planning.joiners == (6,)
    assert session.planning.speeds == {6: 1.0}


def test_a_late_report_of_a_failure_counts_for_no_rank_that_has_come_back_since(sessions):
    """A copy of the request, or another survivor's: it named the rank of an older plan."""

    def report(session, version, *ranks):
        lost = {"ranks": ranks, "step": 1, "plan_version": version, "detail": "lost"}
        session.apply(JobMessage("90-0", MessageKind.FAILURE, json.dumps(lost).encode()))

    def stopped(session):
        return {rank for rank, speed in session.planning.speeds.items() if speed == 0.0}

    adapters = load_adapters(Settings())
    session = sessions(replace(adapters, executor=fake_adapters().executor))
    tell(session, 0)
    first = session.planning.active
    report(session, 0, 6)
    assert stopped(session) == {6}
    without = session.planning.newest
    tell(session, 1, version=without.version)
    body = {"plan": to_json(replace(first, version=2)), "lost": [], "step": 2}
    session.apply(JobMessage("91-0", MessageKind.OWN_PLAN, json.dumps(body).encode()))
    tell(session, 2, version=2)
    other = sessions(replace(adapters, executor=fake_adapters().executor))
    other.resume(session.save())
    for late in (session, other):
        late.changes = PendingChanges()
        report(late, 0, 6)
        report(late, 1, 6)
        assert not stopped(late)
        assert not late.changes.events
        report(late, 1, 3, 6)  # rank 3 has worked all the time
        assert stopped(late) == {3}
        assert dict(late.changes.events)["failure"]["ranks"] == [3]
        report(late, 2, 6)
        assert stopped(late) == {3, 6}


def test_a_job_that_can_only_be_notified_gets_advice_and_no_plan(sessions):
    session = sessions(actions=("notify",))
    tell(session, 0, 1, 2, slow=(3,))
    assert not session.changes.plans
    planning = session.status()["planning"]
    assert planning["state"] == "advised"
    advice = planning["advice"]
    # Half of the replicas are not twice as fast as both of them with rank 3.
    assert (advice["ranks"], advice["without_ms"], advice["gain"]) == ([3], None, None)
    gain = advice["step_ms"] / advice["replaced_ms"] - 1.0
    assert advice["replaced_gain"] == pytest.approx(gain)
    assert advice["summary"] == f"replace rank 3: steps {gain + 1.0:.2f}x faster"
    assert advice["summary"] in planning["detail"]
    told = [event for kind, event in session.changes.events if kind == "planning"]
    assert told == [planning]
    other = sessions(actions=("notify",))
    other.resume(session.save())
    assert other.status()["planning"] == planning
    tell(other, 3, 4)
    assert other.status()["planning"] == {"state": "kept", "detail": "this job takes on no plan"}


def test_a_rank_lost_to_a_job_that_takes_on_no_layout_brings_advice_once(sessions):
    for actions in (("notify",), ("quotas",)):
        session = sessions(actions=actions)
        tell(session, 0)
        for index in range(3):
            body = json.dumps({"ranks": [6], "step": 1, "detail": "lost"}).encode()
            session.apply(JobMessage(f"9{index}-0", MessageKind.FAILURE, body))
            session.tick(60.0, 0.0)
        assert not session.changes.plans
        (told,) = [event for kind, event in session.changes.events if kind == "planning"]
        assert told["advice"]["stopped"] == [6]
        assert "rank 6 has stopped: leave rank 6 out" in told["detail"]


def test_a_job_with_quotas_alone_keeps_its_layout(sessions):
    session = sessions(actions=("quotas",))
    tell(session, 0, 1, slow=(3,))
    (plan,) = session.changes.plans
    assert plan.layout == session.job.layout
    assert plan.quotas[0] > plan.quotas[1]
    planning = session.status()["planning"]
    assert (planning["state"], planning["action"]) == ("planned", "quotas")
    tell(session, 2, 3, slow=(3,), version=1)
    assert session.planning.active.quotas == plan.quotas


def acknowledge(session, version, rank, pause_ms):
    body = {"version": version, "rank": rank, "state": "applied", "step": 5, "detail": ""}
    message = json.dumps({**body, "pause_ms": pause_ms}).encode()
    session.apply(JobMessage(f"{70 + rank}-0", MessageKind.ACK, message))


def test_the_pause_of_a_restart_is_the_cost_of_the_next(sessions):
    asked = []

    def noting(*given, **more):
        asked.append(more["restart_ms"])
        return replan(*given, **more)

    adapters = replace(fake_adapters(), replan=noting)
    session = sessions(adapters, actions=("restart",))
    tell(session, 0)
    body = json.dumps({"ranks": [6], "step": 1, "detail": "lost"}).encode()
    session.apply(JobMessage("60-0", MessageKind.FAILURE, body))
    (plan,) = session.changes.plans
    assert plan.action is Action.RESTART
    assert session.status()["planning"]["action"] == "restart"
    for rank, pause_ms in {0: 900.0, 1: 2500.0, 2: None, 3: 700.0}.items():
        acknowledge(session, 1, rank, pause_ms)
    other = sessions(adapters, actions=("restart",))
    other.resume(session.save())
    tell(other, 2, slow=(1,))
    assert asked == [None, 2500.0]


def test_the_pause_of_a_live_change_is_not_that_of_a_restart(sessions):
    session = sessions(actions=("quotas",))
    tell(session, 0, slow=(3,))
    acknowledge(session, 1, 0, 5.0)
    assert session.planning.acks == {0: "applied"}
    assert session.planning.restart_ms is None
