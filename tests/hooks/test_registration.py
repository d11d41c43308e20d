"""A job that the sidecar does not know is made known to it, by few ranks and once."""

from __future__ import annotations

import logging
import os
import threading

import pytest

from resihp.contracts import Job, Layout, Op, ServiceError

JOB = Job(name="j", layout=Layout.grid(dp=2, pp=1, tp=1, layers=4), microbatches=4)
FIRST, OTHER = 0, 1


class Forgetful:
    """A sidecar that knows the jobs that are registered, until `forget`."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.registered: list[Job] = []
        self.refuses: list[int | None] = []
        self.asked = self.taken = 0
        self.holds_second = False  # until the job is registered
        self.is_known = threading.Event()

    def forget(self) -> None:
        self.jobs = []

    def register(self, job: Job) -> None:
        if self.refuses:
            raise ServiceError("scripted", status=self.refuses.pop(0))
        self.registered.append(job)
        self.jobs = [job]
        self.is_known.set()

    def send_telemetry(self, job, message, form, key=None):
        self.asked += 1
        if self.holds_second and self.asked > 1:
            assert self.is_known.wait(300)
        if job not in [known.name for known in self.jobs]:
            raise ServiceError("no such job", status=404)
        self.taken += 1
        return {}

    def send_heartbeat(self, job, heartbeat):
        if job not in [known.name for known in self.jobs]:
            raise ServiceError("no such job", status=404)


@pytest.fixture
def forgetful() -> Forgetful:
    return Forgetful()


@pytest.fixture
def start(make_monitor, forgetful):
    def make(rank: int, job: Job | str = JOB):
        return make_monitor(job=job, rank=rank, client=forgetful)

    return make


def send(monitor, wait_until) -> None:
    """One record more arrives."""
    sent = monitor.stats.sent
    monitor.record(op=Op.FORWARD, compute_ms=1, step=sent)
    wait_until(lambda: monitor.stats.sent == sent + 1)


def test_the_first_rank_registers_before_its_first_message_and_once(start, forgetful, wait_until):
    monitor = start(FIRST)
    for _ in range(3):
        send(monitor, wait_until)
    assert forgetful.registered == [JOB]
    assert forgetful.asked == forgetful.taken == 3


def test_the_first_rank_registers_a_job_that_is_known_in_another_shape(
    start, forgetful, wait_until
):
    forgetful.jobs = [Job(name="j", layout=Layout.grid(dp=1, pp=2, tp=1, layers=4), microbatches=4)]
    send(start(FIRST), wait_until)
    assert forgetful.jobs == [JOB]


def test_another_rank_leaves_it_to_the_first_as_long_as_it_can(
    start, forgetful, wait_until, caplog
):
    forgetful.holds_second = True  # which would have the other one register, were it not known
    other = start(OTHER)
    other.record(op=Op.FORWARD, compute_ms=1, step=0)
    wait_until(lambda: forgetful.asked == 2)
    assert not forgetful.registered
    send(start(FIRST), wait_until)
    wait_until(lambda: other.stats.sent == 1)
    assert forgetful.registered == [JOB]
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("rank", [FIRST, OTHER])
def test_any_rank_registers_where_the_sidecar_has_lost_the_job(start, forgetful, wait_until, rank):
    monitor = start(rank)
    for _ in range(2):
        forgetful.forget()
        send(monitor, wait_until)
    assert forgetful.registered == [JOB, JOB]
    assert (monitor.stats.refused, monitor.stats.dropped) == (0, 0)


@pytest.mark.parametrize("status", [None, 503, 429])
def test_a_sidecar_that_cannot_register_yet_is_asked_again(start, forgetful, wait_until, status):
    forgetful.refuses = [status, status]
    monitor = start(FIRST)
    send(monitor, wait_until)
    assert forgetful.registered == [JOB]
    assert monitor.stats.retries == 2


def test_a_job_that_is_refused_costs_its_messages_and_is_said_once(
    start, forgetful, wait_until, caplog
):
    forgetful.refuses = [422, 422]
    monitor = start(FIRST)
    for step in range(2):
        monitor.record(op=Op.FORWARD, compute_ms=1, step=step)
        wait_until(lambda step=step: monitor.stats.refused == step + 1)
    wait_until(lambda: monitor.stats.dropped == 2)  # after the refusal is counted
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


def test_where_only_the_name_is_given_records_wait_until_the_job_is_registered(
    start, forgetful, wait_until, caplog
):
    monitor = start(FIRST, "j")
    monitor.record(op=Op.FORWARD, compute_ms=1, step=0)
    wait_until(lambda: forgetful.asked >= 2)
    assert not forgetful.registered
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    forgetful.register(JOB)
    wait_until(lambda: monitor.stats.sent == 1)
    assert (monitor.stats.refused, monitor.stats.dropped) == (0, 0)
    monitor.close()
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("patience_s", [0.0, 30.0], ids=["too long", "to the end"])
def test_a_name_that_stays_unregistered_is_warned_of_once(
    start, forgetful, wait_until, caplog, monkeypatch, patience_s
):
    monkeypatch.setattr("resihp.hooks._registration._PATIENCE_S", patience_s)
    monitor = start(FIRST, "j")
    monitor.record(op=Op.FORWARD, compute_ms=1, step=0)
    wait_until(lambda: forgetful.asked >= 2)
    monitor.close(timeout_s=0.3)
    wait_until(lambda: not monitor._sender._thread.is_alive())  # which warns after the last try
    assert monitor.stats.dropped == 1
    (warning,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "no job named 'j'" in warning.message
    assert "Client.register" in warning.message


def test_a_first_rank_that_is_late_makes_no_other_warn(start, forgetful, wait_until, caplog):
    other = start(OTHER)
    for _ in range(2):
        forgetful.forget()
        send(other, wait_until)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_forked_child_registers_anew(start, forgetful, wait_until):
    monitor = start(FIRST)
    send(monitor, wait_until)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            forgetful.registered.clear()
            send(monitor, wait_until)
            code = 0 if forgetful.registered == [JOB] else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(("rank", "joins", "warnings"), [(1, "0", 0), (5, "0", 1), (5, "1", 0)])
def test_a_rank_outside_of_the_layout_is_warned_of_unless_it_joins(
    make_monitor, monkeypatch, caplog, rank, joins, warnings
):
    monkeypatch.setenv("RESIHP_JOIN", joins)
    monkeypatch.setenv("RANK", str(rank))
    make_monitor(job=JOB, rank=None)
    make_monitor(job=JOB.name, rank=None)
    assert caplog.text.count(f"rank {rank} has no place in the layout of job 'j'") == warnings
    assert caplog.text.count("whose ranks are 0 to 1") == warnings
