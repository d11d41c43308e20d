"""Plans are computed in processes of their own, which end with their limit and their worker."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import fake_adapters

from resihp._process_limits import allow_open_files
from resihp.contracts import InfeasibleError, Plan
from resihp.contracts.codec import encode
from scheduler import replan
from service.store.documents import JobMessage, MessageKind
from service.worker.plan_processes import ProcessExecutor
from service.worker.planning import Planner
from service.worker.session import JobSession
from tests.service.conftest import batch_of, eventually, job_of

LONG_S = 600.0
WAIT_S = 120.0


@pytest.fixture
def executor() -> Iterator[ProcessExecutor]:
    executor = ProcessExecutor(time_limit_s=WAIT_S)
    yield executor
    executor.close()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_plan_is_the_one_that_is_made_here(executor: ProcessExecutor) -> None:
    job = job_of()
    first = Plan(version=0, layout=job.layout, quotas=job.quotas)
    there = executor.submit(replan, job, first, {3: 0.5}, step=4).result(WAIT_S)
    assert there == replan(job, first, {3: 0.5}, step=4)
    with pytest.raises(InfeasibleError) as error:
        executor.submit(replan, job, first, dict.fromkeys(range(8), 0.0), step=4).result(WAIT_S)
    assert error.value.constraint == "ranks"


def test_a_process_is_started_among_many_open_files() -> None:
    """As where one process holds the worker and the connections of thousands of watchers."""
    assert allow_open_files(2_048) >= 2_048
    with contextlib.ExitStack() as stack:
        for _ in range(1_100):
            stack.callback(os.close, os.dup(0))
        executor = ProcessExecutor(time_limit_s=WAIT_S)
        stack.callback(executor.close)
        assert executor.submit(abs, -1).result(WAIT_S) == 1


def test_a_process_serves_one_call_after_the_other(executor: ProcessExecutor) -> None:
    first = executor.submit(os.getpid).result(WAIT_S)
    assert first != os.getpid()
    assert executor.submit(os.getpid).result(WAIT_S) == first


def test_a_long_call_delays_no_other_and_ends_with_the_executor() -> None:
    executor = ProcessExecutor(time_limit_s=LONG_S)
    pid = executor.submit(os.getpid).result(WAIT_S)
    long = executor.submit(time.sleep, LONG_S)
    eventually(executor._idle.empty)  # it has taken that process
    assert executor.submit(os.getpid).result(WAIT_S) != pid
    executor.close()
    assert not is_running(pid)
    with pytest.raises(InfeasibleError, match="the planning process ended"):
        long.result(WAIT_S)


def test_a_call_beyond_the_limit_is_ended_with_its_process() -> None:
    executor = ProcessExecutor(time_limit_s=WAIT_S)
    pid = executor.submit(os.getpid).result(WAIT_S)
    executor._time_limit_s = 1.0
    with pytest.raises(TimeoutError):
        executor.submit(time.sleep, LONG_S).result(WAIT_S)
    assert not is_running(pid)
    executor.close()


def test_a_process_that_dies_is_replaced(executor: ProcessExecutor) -> None:
    with pytest.raises(InfeasibleError, match="the planning process ended"):
        executor.submit(os._exit, 1).result(WAIT_S)
    assert executor.submit(len, "abc").result(WAIT_S) == 3
    with pytest.raises(RuntimeError, match="TypeError"):
        executor.submit(len, 3).result(WAIT_S)
    assert executor.submit(print, "not an answer").result(WAIT_S) is None


def test_an_idle_process_that_has_died_costs_no_plan(executor: ProcessExecutor) -> None:
    pid = executor.submit(os.getpid).result(WAIT_S)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT))
    assert executor.submit(len, "abc").result(WAIT_S) == 3


class _Later:
    """Calls wait until the test lets them go on."""

    def __init__(self, _: float) -> None:
        self.calls: list[tuple[Future[Any], Any]] = []

    def submit(self, plan: Any, *args: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.calls.append((future, lambda: plan(*args, **named)))
        return future

    def go_on(self) -> None:
        future, call = self.calls.pop(0)
        future.set_result(call())

    def close(self) -> None:
        pass


@pytest.fixture
def later() -> tuple[_Later, Any]:
    executor = _Later(0.0)
    adapters = replace(fake_adapters(), executor=lambda _: executor)
    job = job_of()
    plan = Plan(version=0, layout=job.layout, quotas=job.quotas)
    return executor, lambda: JobSession(job, plan, adapters, Planner(adapters, time_limit_s=5.0))


def tell(session: JobSession, *steps: int, slow: tuple[int, ...] = ()) -> None:
    for step in steps:
        body = encode(batch_of(step, slow=slow))
        session.apply(JobMessage(f"{step}-0", MessageKind.TELEMETRY, body))


def test_messages_are_applied_while_a_plan_is_computed(later: Any) -> None:
    executor, start = later
    session = start()
    tell(session, 0, 1, 2, 3, slow=(3,))
    assert session.is_planning
    assert session.last_step == 3
    assert (len(executor.calls), session.changes.plans) == (1, [])
    executor.go_on()
    session.take_plan()
    (plan,) = session.changes.plans
    assert (plan.version, plan.from_step) == (1, 4)
    assert not session.is_planning
    tell(session, 4, slow=(3,))
    assert not executor.calls


def test_a_plan_for_speeds_of_before_is_dropped_and_asked_for_again(later: Any) -> None:
    executor, start = later
    session = start()
    tell(session, 0, slow=(3,))
    tell(session, 1, slow=(3, 5))
    executor.go_on()
    session.take_plan()
    assert session.changes.plans == []
    executor.go_on()
    session.take_plan()
    (plan,) = session.changes.plans
    assert not {3, 5} & set(plan.layout.ranks)


def test_a_plan_asked_for_before_the_worker_died_is_asked_for_again(later: Any) -> None:
    executor, start = later
    session, other = start(), start()
    tell(session, 0, slow=(3,))
    saved = session.save()
    executor.calls.clear()
    other.resume(saved)
    tell(other, 1, slow=(3,))
    executor.go_on()
    other.take_plan()
    assert [plan.version for plan in other.changes.plans] == [1]


def test_planning_that_fails_elsewhere_is_an_outcome(later: Any) -> None:
    executor, start = later
    session = start()
    tell(session, 0, slow=(3,))
    executor.calls.pop()[0].set_exception(TimeoutError())
    session.take_plan()
    assert session.planning.outcome["detail"] == "planning took longer than 5 s"
    assert not session.is_planning


def test_an_error_of_the_scheduler_is_reported_and_planning_tried_again(later: Any) -> None:
    executor, start = later
    session = start()
    tell(session, 0, slow=(3,))
    executor.calls.pop()[0].set_exception(RuntimeError("broken"))
    session.take_plan()
    assert ("error", {"during": "planning", "detail": "RuntimeError: broken"}) in (
        session.changes.events
    )
    assert not executor.calls
    for _ in range(5):
        session.tick(1.0, 0.0)
    executor.go_on()
    session.take_plan()
    assert [plan.version for plan in session.changes.plans] == [1]


_WORKER = """
import os, sys, time
from service.worker.plan_processes import ProcessExecutor
executor = ProcessExecutor(time_limit_s=600.0)
pid = executor.submit(os.getpid).result(120.0)
executor.submit(exec, "while True: pass")
print(pid, flush=True)
time.sleep(600.0)
"""


def test_a_process_ends_when_its_worker_is_killed() -> None:
    """Also while it computes: nothing is left that keeps a core busy."""
    worker = subprocess.Popen([sys.executable, "-c", _WORKER], stdout=subprocess.PIPE)
    assert worker.stdout is not None
    with worker.stdout as out:
        pid = int(out.readline())
    assert is_running(pid)
    worker.kill()
    worker.wait(WAIT_S)
    eventually(lambda: not is_running(pid), timeout_s=WAIT_S)
