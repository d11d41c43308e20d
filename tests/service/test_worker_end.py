"""The end of a worker: quick whatever its states cost, with nothing lost and nothing twice."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from fakes import fake_adapters

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
