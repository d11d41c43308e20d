"""A sidecar inside the test process, one as a process of its own, and small helpers."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
import urllib3
import uvicorn
from fastapi import FastAPI

sys.path.insert(0, str(Path(__file__).parent))

from fakes import fake_adapters

from resihp.contracts import Job, Layout, TelemetryBatch, to_json
from resihp.contracts.codec import WireFormat, encode
from service import Settings, Sidecar, create_app
from service.connections import TimedConnection
from service.store.embedded_redis import socket_path
from service.store.schema import JobKeys
from service.worker.adapters import AdapterFactory
from tests.service.forked_sidecar import ForkedSidecar

FAKES = (str(Path(__file__).parent / "serve_with_fakes.py"),)


def job_of(name: str = "j", **more: Any) -> Job:
    return Job(name=name, layout=Layout.grid(dp=2, pp=2, tp=2, layers=4), microbatches=8, **more)


def batch_of(step: int, *, slow: tuple[int, ...] = (), **more: Any) -> TelemetryBatch:
    """Four forward records of 10 ms of each of 8 ranks; 25 ms on the slow ones."""
    rank = np.repeat(np.arange(8), 4)
    return TelemetryBatch(
        rank=rank,
        step=np.full(32, step),
        microbatch=np.tile(np.arange(4), 8),
        op=np.zeros(32, int),
        compute_ms=np.where(np.isin(rank, slow), 25.0, 10.0),
        tokens=np.full(32, 100),
        **more,
    )


def eventually(check: Callable[[], Any], *, timeout_s: float = 300.0) -> Any:
    """The first true value of `check`; fails after the time-out."""
    deadline = time.monotonic() + timeout_s
    while not (value := check()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s; last value {value!r}"
        time.sleep(0.03)
    return value


def children(pid: int | None) -> dict[str, int]:
    """Process ids of the API and worker processes of a sidecar by name."""
    found = {}
    for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        with contextlib.suppress(OSError):  # it has ended
            found[Path(f"/proc/{child}/comm").read_text().strip()] = child
    return {name: child for name, child in found.items() if name.startswith("resihp-")}


def redis_pids(data: Path) -> list[int]:
    """Processes that serve the embedded Redis of a data folder."""
    needle = str(socket_path(data)).encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if b"redis-server" in command.split(b"\0")[0] and needle in command:
            found.append(int(entry.name))
    return found


def stored_steps(data: Path, job: str = "j") -> list[int]:
    """Steps of all summaries in the order in which they were stored: one that was stored twice is
    there twice, while the API returns each step once."""
    with redis.Redis(unix_socket_path=str(socket_path(data))) as store:
        items = store.xrange(JobKeys(job).steps)
    return [json.loads(fields[b"body"])["step"] for _, fields in items]


class Http:
    """Requests to one sidecar; `app` if it runs in this process."""

    def __init__(self, url: str, app: FastAPI | None = None) -> None:
        self.url = url
        self.app = app
        self.pool = urllib3.PoolManager(maxsize=16)

    def __call__(self, method: str, path: str, document: Any = None, **more: Any) -> Any:
        headers = dict(more.pop("headers", {}))
        if document is not None:
            more["body"] = json.dumps(document)
            headers.setdefault("Content-Type", "application/json")
        more.setdefault("timeout", 120.0)
        more.setdefault("retries", False)
        return self.pool.request(method, self.url + path, headers=headers, **more)

    def get(self, path: str) -> Any:
        answer = self("GET", path)
        assert answer.status == 200, answer.data
        return answer.json()

    def register(self, job: Job) -> None:
        answer = self("PUT", f"/v1/jobs/{job.name}", to_json(job))
        assert answer.status in {200, 201}, answer.data

    def send(
        self, job: str, batch: TelemetryBatch, form: WireFormat = WireFormat.MSGPACK, **headers: str
    ) -> Any:
        headers = {"Content-Type": form.value, **headers}
        return self("POST", f"/v1/jobs/{job}/telemetry", body=encode(batch, form), headers=headers)

    def statuses(self, job: str) -> dict[int, str]:
        return {v["rank"]: v["status"] for v in self.get(f"/v1/jobs/{job}/verdicts")["verdicts"]}

    def records(self, job: str) -> int:
        """How many records the (stand-in) detector has counted."""
        verdicts = self.get(f"/v1/jobs/{job}/verdicts")["verdicts"]
        return int(verdicts[0]["evidence"][0].removeprefix("records=")) if verdicts else 0

    def close(self) -> None:
        self.pool.clear()


@contextlib.contextmanager
def running(settings: Settings, adapters: AdapterFactory = fake_adapters) -> Iterator[Http]:
    """A sidecar in a thread of this process, with the stand-ins if nothing else is given.

    Its Redis may be held up by whatever else this machine runs.
    """
    app = create_app(settings, adapters)
    config = uvicorn.Config(
        app, http=TimedConnection, port=0, log_config=None, lifespan="on",
        timeout_graceful_shutdown=3,
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("service.app._REDIS_ANSWER_S", 60.0)
            thread.start()
            eventually(lambda: server.started or not thread.is_alive())
        assert server.started
        port = server.servers[0].sockets[0].getsockname()[1]
        http = Http(f"http://127.0.0.1:{port}", app)
        yield http
        http.close()
    finally:
        server.should_exit = True
        thread.join(300)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Http]:
    """One sidecar for the tests of a module; each test registers a job of its own."""
    settings = Settings(redis_url=None, data=tmp_path_factory.mktemp("data"), commit_every_s=0.05)
    with running(settings) as http:
        yield http


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    """A sidecar process with the stand-ins, started."""
    with ForkedSidecar(tmp_path, command=FAKES) as sidecar:
        yield sidecar
