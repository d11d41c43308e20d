"""A worker that is behind: senders are told, the lag is shown, and it ends with a worker."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from service import Settings
from service.api.lag import JobLags, next_interval_s, sending_interval_s
from tests.service.conftest import Http, batch_of, eventually, job_of, running

LAGS = st.floats(0, 1e6)


@given(LAGS, LAGS, st.floats(0.1, 100))
def test_the_interval_grows_with_the_lag_within_bounds(a: float, b: float, limit: float):
    shorter, longer = (sending_interval_s(lag, limit) for lag in sorted((a, b)))
    assert (shorter is None) == (min(a, b) < limit)
    assert (shorter or 0) <= (longer or 0)
    assert longer is None or 1 <= longer <= 30


@given(st.floats(0, 100_000))
def test_senders_are_asked_for_so_few_messages_as_a_process_takes(senders: float):
    """Each sends a message every 0.5 s, or as seldom as it is asked; each takes 1.5 ms."""
    interval_s = None
    for _ in range(50):
        busy = min(1.0, 0.0015 * senders / (interval_s or 0.5))
        interval_s = next_interval_s(interval_s, busy, 0.65)
    busy = min(1.0, 0.0015 * senders / (interval_s or 0.5))
    assert busy <= 0.65 or interval_s == 30
    assert busy >= 0.3 or interval_s is None
    for _ in range(50):
        interval_s = next_interval_s(interval_s, 0.0, 0.65)
    assert interval_s is None


@given(st.none() | st.floats(0.5, 30), st.floats(0, 1))
def test_the_interval_for_the_sake_of_the_process_is_within_bounds(interval_s, busy):
    asked_s = next_interval_s(interval_s, busy, 0.65)
    assert asked_s is None or 0.5 <= asked_s <= 30
    assert (asked_s or 0) <= (interval_s or 0) or busy > 0.65
    assert (asked_s or 0) >= (interval_s or 0) or busy < 0.434


class HangingStore:
    """A store whose Redis answers nothing until the time-out."""

    def __init__(self) -> None:
        self.asked = 0

    async def lags_s(self, jobs):
        self.asked += 1
        await asyncio.sleep(0.01)
        raise redis.TimeoutError("no answer")


def test_requests_that_wait_for_a_redis_that_hangs_fail_together():
    store = HangingStore()

    async def ask():
        lags = JobLags(store, Settings())
        return await asyncio.gather(*(lags.of("j") for _ in range(50)), return_exceptions=True)

    answers = asyncio.run(ask())
    assert all(isinstance(answer, redis.TimeoutError) for answer in answers)
    assert store.asked == 1


def test_a_message_that_is_stored_is_not_refused_because_its_lag_is_not_told(tmp_path: Path):
    with running(Settings(redis_url=None, data=tmp_path, commit_every_s=0.05)) as http:
        http.register(job_of())
        http.app.state.context.lags._store = HangingStore()
        assert http.send("j", batch_of(0)).status == 202
        eventually(lambda: http.records("j") == 32)


class SlowStore:
    """A store that notes which lags were asked for together."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    async def lags_s(self, jobs):
        self.asked.append(list(jobs))
        await asyncio.sleep(0.01)
        return 0.0, [float(job) for job in jobs]


def test_lags_of_jobs_that_were_not_asked_for_before_are_measured_together():
    store = SlowStore()

    async def ask():
        lags = JobLags(store, Settings())
        return await asyncio.gather(*(lags.of(str(number)) for number in range(50)))

    assert asyncio.run(ask()) == [[float(number)] for number in range(50)]
    first, rest = store.asked
    assert sorted([*first, *rest]) == sorted(map(str, range(50)))


def settings_of(data: Path, *, worker: bool) -> Settings:
    return Settings(
        redis_url=None, data=data, worker=worker, commit_every_s=0.05, lease_s=2.0,
        slow_down_lag_s=3.0, slow_down_busy=2.0, max_backlog=40,
    )  # fmt: skip


def interval_s(http: Http, step: int) -> float | None:
    """The interval asked for in an answer to a repeated message."""
    answer = http.send("j", batch_of(step), **{"Idempotency-Key": f"step-{step}"})
    assert answer.status == 202, answer.data
    return answer.json().get("interval_s")


def test_senders_are_asked_for_a_longer_interval_until_a_worker_catches_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Whatever the delay of the API on a busy machine.
    monkeypatch.setattr("service.api.lag._SLOW_DOWN_DELAY_S", 1e6)
    with running(settings_of(tmp_path, worker=False)) as http:
        http.register(job_of())
        assert interval_s(http, 0) is None
        assert eventually(lambda: interval_s(http, 0)) >= 1
        lag_s = http.get("/v1/jobs/j")["lag_s"]
        assert lag_s >= 3
        eventually(lambda: http.get("/healthz")["lag_s"] >= lag_s)  # a delay may have ended
        assert eventually(lambda: lag_in_metrics(http) > lag_s)
        while http.send("j", batch_of(1)).status == 202:
            pass
        assert http.get("/v1/jobs/j")["refused"] == 1
    with running(settings_of(tmp_path, worker=True)) as http:
        eventually(lambda: interval_s(http, 0) is None)
        eventually(lambda: http.get("/v1/jobs/j")["backlog"] == 0)
        assert eventually(lambda: http.get("/healthz")["lag_s"] == 0.0)


def lag_in_metrics(http: Http) -> float:
    (line,) = (
        line
        for line in http("GET", "/metrics").data.decode().splitlines()
        if line.startswith('resihp_lag_seconds{job="j"}')
    )
    return float(line.split()[1])
