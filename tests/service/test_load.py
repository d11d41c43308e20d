"""Jobs spread over workers by load: each has one owner, and none goes to and fro."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from fakes import fake_adapters
from hypothesis import given
from hypothesis import strategies as st

from resihp.contracts import Plan
from service import Settings
from service.store.documents import PendingChanges
from service.store.embedded_redis import socket_path
from service.store.schema import JobKeys
from service.store.worker_store import Lease
from service.worker.load import MOST_LOAD, LoadMeter, TimeShare, WorkerLoads
from service.worker.loop import Worker, unique_name
from service.worker.owned_job import OwnedJob
from service.worker.planning import Planner
from service.worker.session import JobSession
from tests.service.conftest import Http, batch_of, eventually, job_of, running

LOADS = st.lists(st.floats(0, 1.2), max_size=40)


@given(st.lists(st.floats(0.001, 0.3), min_size=50, max_size=50))
def test_work_keeps_within_its_share_of_the_time_and_uses_it(costs_s: list[float]):
    """Rounds of 0.1 s, in each of which as many pieces of work are done as there is time for."""
    share, now_s, spent_s, left = TimeShare(0.1), 0.0, 0.0, list(costs_s)
    while left:
        while left and share.has_time(now_s):
            spent_s += left[0]
            now_s += left[0]
            share.spend(left.pop(0), now_s)
        assert spent_s <= 0.1 * (now_s + 1.0) + max(costs_s)
        now_s += 0.1
    assert spent_s >= 0.1 * (now_s - 0.1) - max(costs_s)


def test_states_that_must_be_saved_at_any_cost_keep_no_other_from_being_saved(
    monkeypatch: pytest.MonkeyPatch,
):
    """A job that catches up fills its backlog again and again; each save takes a second."""
    now_s, saved = 0.0, list[str]()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    adapters = fake_adapters()
    worker = Worker("unix:///none", Settings(max_backlog=10_000), adapters, "one")
    for name, cost_s in (("large", 1.0), ("small", 0.01)):
        job, planner = job_of(name), Planner(adapters, time_limit_s=1.0)
        first = Plan(version=0, layout=job.layout, quotas=job.quotas)
        session = JobSession(job, first, adapters, planner)
        owned = OwnedJob(Lease(name, b"", b""), session, committed_s=now_s, save_cost_s=cost_s)
        worker._owned[name] = owned

    def commit(job: str, **_: bool) -> None:
        nonlocal now_s
        owned = worker._owned[job]
        owned.session.changes = PendingChanges()
        now_s += owned.save_cost_s
        owned.committed_s = now_s
        saved.append(job)

    monkeypatch.setattr(worker, "_commit", commit)
    for _ in range(200):
        worker._owned["large"].session.changes.applied += ["1-0"] * 2_501
        worker._owned["small"].session.changes.applied.append("1-0")
        worker._commit_due()
    assert saved.count("large") == 200
    assert saved.count("small") >= 6


def table(
    workers: list[str], owners: dict[str, str | None], loads: dict[str, float]
) -> WorkerLoads:
    return WorkerLoads(workers=workers, owners=owners, loads=loads)


def load_of(owners: dict[str, str | None], loads: dict[str, float], worker: str) -> float:
    return sum(loads[job] for job, owner in owners.items() if owner == worker)


def balance(workers: list[str], owners: dict[str, str | None], loads: dict[str, float]) -> bool:
    """One round, in which all workers see the same table; True if any job has moved."""
    seen = table(workers, dict(owners), loads)
    taken = {worker: seen.jobs_to_take(worker) for worker in workers}
    given = {worker: seen.jobs_to_give(worker) for worker in workers}
    jobs = [job for part in (*taken.values(), *given.values()) for job in part]
    assert len(jobs) == len(set(jobs))
    for worker in workers:
        assert all(owners[job] is None for job in taken[worker])
        assert all(owners[job] == worker for job in given[worker])
        owners.update(dict.fromkeys(taken[worker], worker))
        owners.update(dict.fromkeys(given[worker]))
    return bool(jobs)


def settle(
    workers: list[str],
    owners: dict[str, str | None],
    loads: dict[str, float],
    moved: Callable[[str, str, str], None] = lambda job, giver, receiver: None,
) -> None:
    """Rounds until nothing moves; `moved` is told of each job that one worker gave to another."""
    givers = dict[str, str]()
    for _ in range(4 * len(owners) + 4):
        before = dict(owners)
        if not balance(workers, owners, loads):
            return
        for job, owner in owners.items():
            last = before[job]
            if owner is None and last is not None:
                givers[job] = last
            elif owner is not None and last is None and job in givers:
                moved(job, givers.pop(job), owner)
    pytest.fail("jobs still move")


@given(LOADS, st.integers(1, 5), st.randoms())
def test_free_jobs_are_all_taken_and_then_rest(costs, number, random):
    workers = [f"w{index}" for index in range(number)]
    loads = {f"j{index}": cost for index, cost in enumerate(costs)}
    owners: dict[str, str | None] = {job: random.choice([None, *workers]) for job in loads}
    settle(workers, owners, loads)
    assert set(owners.values()) <= set(workers)


@given(LOADS, st.integers(2, 5), st.randoms())
def test_a_job_is_given_away_only_to_one_that_keeps_it(costs, number, random):
    workers = [f"w{index}" for index in range(number)]
    loads = {f"j{index}": cost for index, cost in enumerate(costs)}
    owners: dict[str, str | None] = {job: random.choice(workers) for job in loads}
    before = {worker: load_of(owners, loads, worker) for worker in workers}
    moves = dict[str, str]()

    def moved(job: str, giver: str, receiver: str) -> None:
        assert job not in moves, "moved again"
        moves[job] = receiver
        assert receiver != giver
        assert before[giver] > MOST_LOAD
        assert load_of(owners, loads, receiver) <= MOST_LOAD

    settle(workers, owners, loads, moved)
    after = {worker: load_of(owners, loads, worker) for worker in workers}
    assert max(after.values()) <= max(MOST_LOAD, *before.values()) + 1e-9


def test_a_large_job_stays_and_the_small_ones_go():
    loads = {"large": 0.75, "middle": 0.1, "small": 0.05, "idle": 0.0}
    owners: dict[str, str | None] = dict.fromkeys(loads, "a")
    settle(["a", "b"], owners, loads)
    assert owners == {"large": "a", "middle": "b", "small": "b", "idle": "a"}


def test_a_worker_without_much_load_keeps_its_jobs():
    loads = {f"j{index}": 0.02 for index in range(30)}
    owners: dict[str, str | None] = dict.fromkeys(loads, "a")
    assert not balance(["a", "b"], owners, loads)


def test_a_job_too_large_for_any_worker_stays_where_it_is():
    owners: dict[str, str | None] = {"huge": "a"}
    assert not balance(["a", "b"], owners, {"huge": 1.0})


def test_new_jobs_are_spread_evenly():
    owners: dict[str, str | None] = dict.fromkeys((f"j{index}" for index in range(9)), None)
    seen = table(["a", "b", "c"], owners, {})
    assert [len(seen.jobs_to_take(worker)) for worker in ("a", "b", "c")] == [3, 3, 3]


def test_loads_approach_the_share_of_the_processor_that_each_job_takes():
    meter = LoadMeter()
    assert meter.measure([], 0.0) == {}
    loads = {}
    for second in range(60):
        meter.begin(second * 0.5, float(second))
        meter.add("a", second * 0.5 + 0.3)
        meter.add("b", second * 0.5 + 0.4)
        meter.add(None, second * 0.5 + 0.5)  # a fifth for both
        loads = meter.measure(["a", "b", "new"], second + 1.0)
    assert loads == pytest.approx({"a": 0.375, "b": 0.125, "new": 0.0}, abs=1e-4)


def test_a_job_starts_with_its_load_at_the_worker_before():
    meter = LoadMeter()
    meter.begin(0.0, 0.0)
    meter.take("a", 0.4)
    assert meter.measure(["a"], 1e-3)["a"] == pytest.approx(0.4, abs=1e-3)


@contextlib.contextmanager
def worker_at(settings: Settings) -> Iterator[Worker]:
    """A worker in a thread, whose jobs all have the load 0.45."""
    stop = threading.Event()
    worker = Worker(redis_url(settings), settings, fake_adapters(), unique_name())
    worker._meter.measure = lambda jobs, now_s: dict.fromkeys(jobs, 0.45)
    thread = threading.Thread(target=worker.run, args=(stop,))
    thread.start()
    try:
        yield worker
    finally:
        stop.set()
        thread.join(60)
        assert not thread.is_alive()


def redis_url(settings: Settings) -> str:
    return f"unix://{socket_path(settings.data)}"


def test_a_busy_worker_gives_a_job_to_one_with_room(tmp_path: Path):
    settings = Settings(redis_url=None, data=tmp_path, worker=False, commit_every_s=0.05)
    with running(settings) as http, redis.Redis.from_url(redis_url(settings)) as client:
        names = ("a", "b")
        for name in names:
            http.register(job_of(name))

        def owners() -> list[str]:
            tokens = client.mget([JobKeys(name).lease for name in names])
            return sorted(token.decode().partition(":")[2] for token in tokens if token)

        with worker_at(settings) as first:
            eventually(lambda: owners() == [first.name] * 2)
            send_all(http, names, range(3))
            with worker_at(settings) as second:
                eventually(lambda: owners() == sorted([first.name, second.name]))
                send_all(http, names, range(3, 6))
                assert owners() == sorted([first.name, second.name])
            eventually(lambda: owners() == [first.name] * 2)
            send_all(http, names, range(6, 9))


def send_all(http: Http, names: tuple[str, ...], steps: range) -> None:
    """Send these steps to each job, and wait until all steps so far have been applied once."""
    for name in names:
        for step in steps:
            assert http.send(name, batch_of(step)).status == 202
        eventually(lambda name=name: http.records(name) == 32 * steps.stop)
