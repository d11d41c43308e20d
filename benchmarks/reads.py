"""Cost of what the API is asked for: processor time and bytes of each read, by a job's size.

    python -m benchmarks.reads [--ranks 64,16384] [--json PATH]

A sidecar without a worker has one job, whose state is that of a worker's session after a few steps:
verdicts on all ranks, 5,000 step summaries, and a plan that all ranks but one have applied. Each
read is repeated for half a second of processor time. One that is conditional knows the answer
already (`If-None-Match`), as pollers do.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import urllib3

from detector import Detector
from resihp.client import Client
from resihp.contracts import Job, Layout, Plan
from resihp.contracts.codec import encode
from resihp.testing.scenarios import steps_of
from scheduler import replan
from service import Sidecar
from service.store.documents import JobMessage, MessageKind, dumps
from service.store.embedded_redis import socket_path
from service.store.worker_store import WorkerStore
from service.worker.adapters import Adapters
from service.worker.owned_job import OwnedJob
from service.worker.planning import Planner
from service.worker.session import JobSession

from ._ingest_watch import parts_of_service, spent_s
from ._report import machine, print_table, write_json

_STEPS, _SUMMARIES = 3, 5_000
_ENOUGH_S, _MOST_READS = 0.5, 300
_READS = {
    "jobs": "",
    "job": "/bench",
    "verdicts": "/bench/verdicts",
    "a page of 100": "/bench/verdicts?limit=100",
    "diagnosis": "/bench/diagnosis",
    "1,000 steps": "/bench/steps",
    "newest step": f"/bench/steps?after={_SUMMARIES - 2}",
    "plan": "/bench/plan",
    "metrics": None,
}
_COLUMNS = ("ranks", "read", "KB", "API ms", "Redis ms", "conditional: bytes", "API ms", "Redis ms")


def _job(ranks: int) -> Job:
    layout = Layout.grid(dp=max(1, ranks // 32), pp=4, tp=8, layers=32)
    return Job(name="bench", layout=layout, microbatches=8 * layout.dp)


def _session(job: Job) -> JobSession:
    plan = Plan(version=0, layout=job.layout, quotas=job.quotas)
    adapters = Adapters(lambda job, _: Detector(job), Detector.restore, replan)
    planner = Planner(adapters, time_limit_s=5.0)
    session = JobSession(job, plan, adapters, planner)
    planner.close()
    session.planning.publish(replace(plan, version=1))
    session.changes.plans.append(replace(plan, version=1))
    for message in _messages(job):
        session.apply(message)
    steps = [{"step": step, "observed_ms": 51.2, "predicted_ms": 50.9, "plan_version": 1,
              "ranks": len(job.layout.ranks)} for step in range(_SUMMARIES)]  # fmt: skip
    session.changes.steps = steps
    return session


def _messages(job: Job) -> Iterator[JobMessage]:
    for step in steps_of(job, (300, 700, 2000), steps=_STEPS, seed=0):
        yield JobMessage("1-0", MessageKind.TELEMETRY, encode(step))
    for rank in job.layout.ranks[:-1]:
        ack = {"version": 1, "rank": rank, "state": "applied", "pause_ms": 3.0}
        yield JobMessage("1-0", MessageKind.ACK, dumps(ack).encode())


def _fill(folder: Path, job: Job) -> None:
    """Save the state of a worker that had the job."""
    store = WorkerStore(
        f"unix://{socket_path(folder)}", "bench", keep_events=2_000, keep_steps=20_000
    )
    lease = store.acquire(job.name, ttl_s=600)
    assert lease is not None
    owned = OwnedJob(lease, _session(job))
    diagnosis = owned.diagnose()
    commit = owned.commit()
    store.commit(lease, replace(commit, status={**commit.status, "diagnosis": diagnosis}))
    store.close()


class _Reader:
    """Reads of one sidecar, and what they cost its processes."""

    def __init__(self, url: str, supervisor: int) -> None:
        self._url = url
        self._parts = parts_of_service(supervisor)
        self._pool = urllib3.PoolManager()

    def measure(self, path: str | None) -> list[float | None]:
        """Bytes and milliseconds of API and Redis, then those of the conditional read."""
        url = f"{self._url}/metrics" if path is None else f"{self._url}/v1/jobs{path}"
        first = self._pool.request("GET", url)
        assert first.status == 200, first.data
        figures: list[float | None] = [*self._repeated(url, {})]
        tag = first.headers.get("ETag")
        return figures + (
            [None] * 3 if tag is None else [*self._repeated(url, {"If-None-Match": tag})]
        )

    def _repeated(self, url: str, headers: Mapping[str, str]) -> tuple[float, float, float]:
        begun, reads, size = self._spent_s(), 0, 0
        while reads < _MOST_READS and sum(self._since_s(begun)) < _ENOUGH_S:
            size = len(self._pool.request("GET", url, headers=headers).data)
            reads += 1
        api_s, redis_s = self._since_s(begun)
        return size, api_s / reads * 1e3, redis_s / reads * 1e3

    def _spent_s(self) -> tuple[float, float]:
        api, redis = (sum(map(spent_s, self._parts[part])) for part in ("api", "redis"))
        return api, redis

    def _since_s(self, begun: tuple[float, float]) -> tuple[float, float]:
        now = self._spent_s()
        return now[0] - begun[0], now[1] - begun[1]


def measure(ranks: int) -> dict[str, list[float | None]]:
    """Figures of each read of a job of so many ranks."""
    job = _job(ranks)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Sidecar(folder, options=("--no-worker",)) as sidecar:
            assert sidecar.pid is not None
            Client(sidecar.url, timeout=60).register(job)
            _fill(folder, job)
            reader = _Reader(sidecar.url, sidecar.pid)
            return {name: reader.measure(path) for name, path in _READS.items()}


def main() -> None:
    """Measure, print, and write JSON on request."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", default="64,16384", help="sizes, multiples of 32")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    results = {int(ranks): measure(int(ranks)) for ranks in given.ranks.split(",")}
    rows = [
        [f"{ranks:,}", name, *_row(figures)]
        for ranks, reads in results.items()
        for name, figures in reads.items()
    ]
    print(machine())
    print_table("Processor time and bytes of reads", _COLUMNS, rows)
    if given.json is not None:
        write_json(given.json, {str(ranks): reads for ranks, reads in results.items()})


def _row(figures: list[Any]) -> list[str]:
    size, *times = figures[:3]
    known = ["–"] * 3 if figures[3] is None else [f"{figures[3]:.0f}", *_ms(figures[4:])]
    return [f"{size / 1e3:,.1f}", *_ms(times), *known]


def _ms(times: list[float]) -> list[str]:
    return [f"{time:.2f}" for time in times]


if __name__ == "__main__":
    main()
