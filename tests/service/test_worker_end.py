"""The end of a worker: quick whatever its states cost, with nothing lost and nothing twice."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from fakes import fake_adapters

from resihp.contracts import Plan, from_json, to_json
from service import Settings
from service.store.documents import JobMessage
from service.store.embedded_redis import socket_path
from service.store.schema import GROUP, JobKeys
from service.worker import loop
from service.worker.loop import Worker
from service.worker.owned_job import OwnedJob
from service.worker.session import JobSession
from tests.service.conftest import batch_of, eventually, job_of, running, stored_steps

STEPS = 12


@contextlib.contextmanager
def working(settings: Settings, stop: threading.Event | None = None) -> Iterator[None]:
    """A worker in a thread, ended by `stop`, at the end of the block in any case."""
    stop = stop or threading.Event()
    worker = Worker(f"unix://{socket_path(settings.data)}", settings, fake_adapters(), "one")
    thread = threading.Thread(target=worker.run, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()


def unsaved(data: Path) -> int:
    """Messages that a worker has read and not saved."""
    with redis.Redis(unix_socket_path=str(socket_path(data))) as store:
        return int(store.xpending(JobKeys("j").messages, GROUP)["pending"])


def test_messages_that_are_too_costly_to_save_stay_for_the_next_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Saves once a minute: after the commit of the failure nothing more.
    settings = Settings(data=tmp_path, redis_url=None, worker=False, commit_every_s=60.0)
    monkeypatch.setattr(loop, "_LEAVE_S", -1.0)
    with running(settings) as http:
        http.register(job_of())
        with working(settings):
            assert http("POST", "/v1/jobs/j/failures", {"ranks": [7]}).status == 202
            eventually(lambda: http.statuses("j") == {7: "fail_stop"})
            for step in range(STEPS):
                assert http.send("j", batch_of(step)).status == 202
            eventually(lambda: unsaved(tmp_path) == STEPS)
        assert http.get("/v1/jobs/j")["backlog"] == STEPS
        monkeypatch.setattr(loop, "_LEAVE_S", 60.0)
        with working(settings.model_copy(update={"commit_every_s": 0.05})):
            eventually(lambda: http.records("j") == 32 * STEPS)  # perhaps before they are saved
            eventually(lambda: (http.get("/v1/jobs/j")["backlog"], unsaved(tmp_path)) == (0, 0))
        assert stored_steps(tmp_path) == list(range(STEPS - 1))


def test_a_worker_that_is_ended_while_it_resumes_a_job_reads_no_later_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(data=tmp_path, redis_url=None, worker=False, commit_every_s=60.0)
    monkeypatch.setattr(loop, "_LEAVE_S", -1.0)
    monkeypatch.setattr(loop, "_READ_BYTES", 1)  # one message at a time
    stop, apply = threading.Event(), JobSession.apply

    def applied_at_the_end(session: JobSession, *messages: JobMessage) -> None:
        stop.set()
        apply(session, *messages)

    with running(settings) as http:
        http.register(job_of())
        with working(settings):
            for step in range(STEPS):
                assert http.send("j", batch_of(step)).status == 202
            eventually(lambda: unsaved(tmp_path) == STEPS)
        for step in range(STEPS, 2 * STEPS):
            assert http.send("j", batch_of(step)).status == 202
        monkeypatch.setattr(loop, "_LEAVE_S", 60.0)
        with monkeypatch.context() as patched, working(settings, stop):
            patched.setattr(JobSession, "apply", applied_at_the_end)
            eventually(stop.is_set)
        with working(settings.model_copy(update={"commit_every_s": 0.05})):
            eventually(lambda: http.get("/v1/jobs/j")["backlog"] == 0)
            assert http.records("j") == 32 * 2 * STEPS
        assert stored_steps(tmp_path) == list(range(2 * STEPS - 1))


def test_a_job_whose_steps_were_shown_before_a_state_was_saved_is_resumed_without_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(data=tmp_path, redis_url=None, worker=False, commit_every_s=60.0)
    monkeypatch.setattr(loop, "_LEAVE_S", -1.0)
    with running(settings) as http:
        http.register(job_of())
        with working(settings):
            assert http.send("j", batch_of(0)).status == 202
            assert http.send("j", batch_of(1)).status == 202
            eventually(lambda: stored_steps(tmp_path) == [0])
        with working(settings.model_copy(update={"commit_every_s": 0.05})):
            eventually(lambda: http.get("/v1/jobs/j")["backlog"] == 0)
        with redis.Redis(unix_socket_path=str(socket_path(tmp_path))) as store:
            assert store.hget(JobKeys("j").counts, "errors") == b"0"
        assert stored_steps(tmp_path) == [0]


@pytest.mark.parametrize("lost", ["session", "state"])
def test_a_job_whose_saved_state_is_lost_goes_on_from_its_newest_plan(
    tmp_path: Path, lost: str
) -> None:
    settings = Settings(data=tmp_path, redis_url=None, worker=False, commit_every_s=0.05)
    keys = JobKeys("j")
    with running(settings) as http:
        http.register(job_of())

        def plan_after(version: int, rank: int) -> Any:
            assert http("POST", "/v1/jobs/j/failures", {"ranks": [rank]}).status == 202
            return http("GET", f"/v1/jobs/j/plan?after={version}&wait=60").json()

        with working(settings):
            plan_after(0, 7)
            http.send("j", batch_of(0, plan_version=1))
            eventually(lambda: http.get("/v1/jobs/j")["rollout"]["active"] == 1)
            assert plan_after(1, 5)["version"] == 2
        with redis.Redis(unix_socket_path=str(socket_path(tmp_path))) as store:
            if lost == "session":
                store.hset(keys.state, "session", b"of another format")
            else:
                store.delete(keys.state)
        with working(settings):
            plan = from_json(Plan, {k: v for k, v in plan_after(2, 3).items() if k != "gap"})
            assert http.get("/v1/jobs/j")["rollout"]["active"] == 1
        assert plan.version == 3
        assert plan.layout.members == {0, 1, 2, 4, 6}
        assert http.get("/v1/jobs/j/plan/0")["layout"] == to_json(job_of().layout)


def test_the_status_says_that_a_job_goes_on_without_its_saved_state(tmp_path: Path) -> None:
    settings = Settings(data=tmp_path, redis_url=None, worker=False, commit_every_s=0.05)
    with running(settings) as http:
        http.register(job_of())
        with working(settings):
            assert http("POST", "/v1/jobs/j/failures", {"ranks": [7]}).status == 202
            eventually(lambda: http.get("/v1/jobs/j")["plan"]["version"] == 1)
        with redis.Redis(unix_socket_path=str(socket_path(tmp_path))) as store:
            store.hset(JobKeys("j").state, "session", b"of another format")
        with working(settings):
            detail = eventually(lambda: http.get("/v1/jobs/j")["planning"].get("detail"))
        assert detail == "the saved state could not be read; the job goes on with plan 1"
        assert http.statuses("j")[7] == "fail_stop"


def test_an_error_of_a_job_is_shown_until_a_worker_works_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_BROKEN_S", 0.0)
    settings = Settings(data=tmp_path, redis_url=None, worker=False, commit_every_s=0.05)
    state = JobKeys("j").state
    with running(settings) as http, redis.Redis(unix_socket_path=str(socket_path(tmp_path))) as raw:
        http.register(job_of())
        raw.rpush(state, "something else")
        with working(settings):
            assert "WRONGTYPE" in eventually(lambda: http.get("/v1/jobs/j")["error"])
            raw.delete(state)
            http.send("j", batch_of(0))
            eventually(lambda: http.records("j") == 32)
            eventually(lambda: http.get("/v1/jobs/j")["error"] is None)


@pytest.mark.parametrize(
    "limit", [{"max_backlog": 4 * STEPS - 1}, {"max_backlog_bytes": 8_000 * STEPS}]
)
def test_what_is_applied_and_not_saved_fills_no_backlog(
    tmp_path: Path, limit: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(
        data=tmp_path, redis_url=None, worker=False, commit_every_s=3_600.0, **limit
    )
    monkeypatch.setattr(OwnedJob, "diagnosis_is_due", lambda *_, **__: False)  # it saves as well
    with running(settings) as http, working(settings):
        http.register(job_of())
        for step in range(STEPS):
            assert http.send("j", batch_of(step)).status == 202
        eventually(lambda: http.get("/v1/jobs/j")["backlog"] < STEPS)


def test_steps_of_a_job_that_went_back_are_shown_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved once, then shown only: a replay tells them by their messages, as numbers come again."""
    settings = Settings(data=tmp_path, redis_url=None, worker=False, commit_every_s=0.05)
    monkeypatch.setattr(loop, "_LEAVE_S", -1.0)
    monkeypatch.setattr(loop, "_SAVE_SHARE", 1e-9)
    monkeypatch.setattr(OwnedJob, "diagnosis_is_due", lambda *_, **__: False)  # it saves as well
    with running(settings) as http:

        def shown_after(steps: range) -> list[int]:
            for step in steps:
                assert http.send("j", batch_of(step)).status == 202
            return eventually(
                lambda: (found := stored_steps(tmp_path))[-1:] == [steps[-2]] and found
            )

        http.register(job_of())
        with working(settings):
            shown_after(range(90, 93))
            shown_after(range(93, 97))
            before = shown_after(range(10, 15))
        with working(settings):
            assert shown_after(range(15, 18)) == [*before, 14, 15, 16]
