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
from service.store.embedded_redis import socket_path
from service.store.schema import GROUP, JobKeys
from service.worker import loop
from service.worker.loop import Worker
from tests.service.conftest import batch_of, eventually, job_of, running

STEPS = 12


@contextlib.contextmanager
def working(settings: Settings) -> Iterator[None]:
    """A worker in a thread, ended at the end of the block."""
    stop = threading.Event()
    worker = Worker(f"unix://{socket_path(settings.data)}", settings, fake_adapters(), "one")
    thread = threading.Thread(target=worker.run, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()


def test_messages_that_are_too_costly_to_save_stay_for_the_next_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Saves once a minute: after the commit of the failure nothing more.
    settings = Settings(data=tmp_path, redis_url=None, worker=False, commit_every_s=60.0)
    monkeypatch.setattr(loop, "_LEAVE_S", -1.0)
    messages = JobKeys("j").messages
    with (
        running(settings) as http,
        redis.Redis(unix_socket_path=str(socket_path(tmp_path))) as store,
    ):
        http.register(job_of())

        def unsaved() -> int:
            """Messages that a worker has read and not saved."""
            return int(store.xpending(messages, GROUP)["pending"])

        with working(settings):
            assert http("POST", "/v1/jobs/j/failures", {"ranks": [7]}).status == 202
            eventually(lambda: http.statuses("j") == {7: "fail_stop"})
            for step in range(STEPS):
                assert http.send("j", batch_of(step)).status == 202
            eventually(lambda: unsaved() == STEPS)
        assert http.get("/v1/jobs/j")["backlog"] == STEPS
        monkeypatch.setattr(loop, "_LEAVE_S", 60.0)
        with working(settings.model_copy(update={"commit_every_s": 0.05})):
            eventually(lambda: http.records("j") == 32 * STEPS)  # perhaps before they are saved
            eventually(lambda: (http.get("/v1/jobs/j")["backlog"], unsaved()) == (0, 0))
        summaries = http.get("/v1/jobs/j/steps")["steps"]
        assert [summary["step"] for summary in summaries] == list(range(STEPS - 1))
