"""Launchers that agree in Redis: the loss of no node ends the job."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from resihp._preemption import PreemptionNotice
from resihp.contracts import JobStoppedError
from resihp.elastic.rendezvous.store import host_store
from resihp.launch.attempts import Attempt, AttemptEnd, EndKind, JobEnd, NodeOffer, place
from resihp.launch.heartbeats import LauncherHeartbeats
from resihp.launch.launcher_store import LauncherStore
from resihp.launch.nodes import Nodes
from resihp.launch.options import Command, Options
from resihp.launch.redis_store import RedisStore, open_redis
from service.store.embedded_redis import EmbeddedRedis
from tests.launch.launchers import launchers

MINUTE = timedelta(minutes=1)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(tmp_path / "redis")
    server.start()
    yield server
    server.stop()


@pytest.fixture(params=["torch", "redis"])
def store(request: pytest.FixtureRequest, redis: EmbeddedRedis) -> dist.Store:
    if request.param == "torch":
        return host_store("127.0.0.1", 0, MINUTE)
    return open_redis(redis.url, "job", MINUTE)


def test_both_stores_answer_alike(store: dist.Store) -> None:
    assert not store.check(["a"])
    store.set("a", "1")
    assert (store.get("a"), store.check(["a"]), store.check(["a", "b"])) == (b"1", True, False)
    assert [store.add("n", amount) for amount in (2, 0, -1)] == [2, 2, 1]
    store.append("lines", "x\n")  # type: ignore[attr-defined]
    store.append("lines", "y\n")  # type: ignore[attr-defined]
    assert store.get("lines") == b"x\ny\n"
    assert store.compare_set("c", "", "first") == b"first"
    assert store.compare_set("c", "", "second") == b"first"
    assert store.compare_set("c", "first", "third") == b"third"


def test_jobs_are_apart_and_a_finished_one_is_forgotten(redis: EmbeddedRedis) -> None:
    one, other = (RedisStore(redis.url, name, MINUTE) for name in ("one", "other"))
    one.set("a", "1")
    assert not other.check(["a"])
    assert 0 < one._redis.ttl("resihp:run:one") <= 600


def nodes_of(redis: EmbeddedRedis, run: str = "job") -> Nodes:
    """A launcher's place in a job of up to two nodes."""
    command = Command("t.py", "script")
    options = Options(
        command, nodes=2, store_url=redis.url, port=1, run=run, heartbeat=timedelta(seconds=2)
    )
    return Nodes(options, PreemptionNotice())


def stop_heartbeats(launcher: Nodes) -> None:
    """Stop them as by SIGKILL: none is on its way any more."""
    assert launcher._heartbeats is not None
    launcher._heartbeats.close()
    for thread in threading.enumerate():
        if thread.name == "resihp-heartbeat":
            thread.join(60.0)
            assert not thread.is_alive()


def test_a_job_that_failed_begins_anew_and_one_that_completed_does_not(
    redis: EmbeddedRedis,
) -> None:
    """Whether its launchers said that they leave, or were killed."""
    for says_so in (True, False):
        failed = nodes_of(redis)
        assert failed.is_coordinator
        store = LauncherStore(RedisStore(redis.url, "job", MINUTE))
        store.announce(NodeOffer(failed.id, 0, (0,)))
        assert store.publish(0, JobEnd(3, "a bug"))
        if says_so:
            failed.close()
        else:
            stop_heartbeats(failed)
        following = nodes_of(redis)
        assert following.is_coordinator
        assert store.attempt(0) is None
        assert LauncherStore(RedisStore(redis.url, "job", MINUTE)).announced() == []
        following.close()
        assert store.publish(0, JobEnd(3, "for the next turn"))
    assert store.forget_failed()
    assert store.publish(0, JobEnd(0))
    late = nodes_of(redis)
    assert late.begin(NodeOffer(late.id, 0, (0,)), bool) == JobEnd(0)
    late.close()


def test_a_launcher_that_was_replaced_while_it_decided_follows(redis: EmbeddedRedis) -> None:
    """It slept a little longer than the time-out, and woke before it was given up."""
    slept = nodes_of(redis)
    ranks = host_store("127.0.0.1", 0, MINUTE)
    try:
        store = LauncherStore(RedisStore(redis.url, "job", MINUTE))
        other = NodeOffer("other", 1, (0,))
        store.announce(other)
        assert store.coordinate(other.id, after=slept.id)
        own = NodeOffer(slept.id, 0, (0,))
        attempt = Attempt(0, ranks.port, place([own, other], most=2), host="127.0.0.1")
        assert store.publish(0, attempt)
        assert slept.begin(own, bool) == attempt
        assert not slept.is_coordinator
    finally:
        slept.close()


def test_heartbeats_tell_a_launcher_that_another_decides() -> None:
    store = dist.HashStore()
    beats = LauncherHeartbeats(lambda: store, "slept", timedelta(seconds=0.1), bool)
    try:
        LauncherStore(store).coordinate("slept")
        beats.coordinates = True
        LauncherStore(store).coordinate("other", after="slept")
        deadline = time.monotonic() + 60
        while not beats.is_replaced:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        beats.close()


def test_launchers_write_again_what_a_store_without_its_data_had(redis: EmbeddedRedis) -> None:
    """All of it but what a later run has begun in its place."""
    one, other = (LauncherStore(RedisStore(redis.url, "job", MINUTE)) for _ in range(2))
    offers = [NodeOffer("one", 0, (0,)), NodeOffer("other", 1, (0,))]
    attempt = Attempt(0, 1, place(offers, most=2))
    assert one.coordinate("one")
    one.announce(offers[0])
    one.publish(0, attempt)
    other.announce(offers[1])
    assert other.attempt(0) == attempt
    other.end(0, AttemptEnd(EndKind.NOTICE, "maintenance"))
    other.report(0, offers[1])
    for first, second in ((one, other), (other, one)):
        redis_of_test = RedisStore(redis.url, "job", MINUTE)
        redis_of_test._redis.flushall()
        first.restore("one")
        second.restore("one")
        late = LauncherStore(redis_of_test)
        assert late.coordinator() == "one"
        assert sorted(offer.id for offer in late.announced()) == ["one", "other"]
        assert late.attempt(late.newest()) == attempt
        assert late.end_of(0) == AttemptEnd(EndKind.NOTICE, "maintenance")
        assert late.reported(0, "other") == offers[1]
    redis_of_test._redis.flushall()
    assert LauncherStore(redis_of_test).coordinate("third")
    one.restore("one")
    assert LauncherStore(redis_of_test).announced() == []


def test_the_job_goes_on_after_redis_has_lost_its_data(
    tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """In the middle of an attempt, before a restart and before the end."""
    with launchers(tmp_path, redis=redis.url) as job:
        data = RedisStore(redis.url, "all", MINUTE)._redis
        job.start(0, nodes="2")
        job.start(1, nodes="2")
        pids = job.runs(0, 2)
        data.flushall()
        os.kill(pids[1], signal.SIGKILL)
        job.runs(1, 2)
        data.flushall()
        job.until(lambda: all("lost its data" in job.log(node) for node in (0, 1)))
        (tmp_path / "finish").touch()
        assert [job.status(node) for node in (0, 1)] == [0, 0], job.logs()


@pytest.fixture
def frozen(redis: EmbeddedRedis) -> Iterator[Callable[[], object]]:
    """Lets Redis hang from the call to the end of the test."""
    assert redis.pid is not None
    yield partial(os.kill, redis.pid, signal.SIGSTOP)
    os.kill(redis.pid, signal.SIGCONT)


def test_requests_wait_three_timeouts_for_a_redis_that_hangs(
    redis: EmbeddedRedis, frozen: Callable[[], object]
) -> None:
    waits: list[int] = []
    store = open_redis(redis.url, "job", timedelta(seconds=2), lambda: waits.append(1))
    frozen()
    with pytest.raises(dist.DistNetworkError):
        store.check(["a"])
    assert 1 <= len(waits) <= 6 / 0.5
    waits.clear()
    store.set_timeout(timedelta(0))
    with pytest.raises(dist.DistNetworkError):
        store.check(["a"])
    assert not waits


def test_a_request_is_answered_once_redis_goes_on(
    redis: EmbeddedRedis, frozen: Callable[[], object]
) -> None:
    assert redis.pid is not None
    goes_on = partial(os.kill, redis.pid, signal.SIGCONT)
    store = open_redis(redis.url, "job", MINUTE, goes_on)
    for request in (
        lambda: store.add("n", 1) >= 1,
        lambda: store.compare_set("c", "", "first") == b"first",
        lambda: store.get("c") == b"first",
    ):
        frozen()
        assert request()


SAVING = """
import signal, sys, threading
from pathlib import Path

def save(number, frame):
    Path(sys.argv[1], "saved").touch()
    sys.exit(128 + number)

signal.signal(signal.SIGTERM, save)
Path(sys.argv[1], "running").touch()
while True:
    threading.Event().wait(0.1)
"""


def test_ranks_learn_of_a_notice_while_redis_hangs(
    tmp_path: Path, redis: EmbeddedRedis, frozen: Callable[[], object]
) -> None:
    (tmp_path / "saving.py").write_text(SAVING)
    command = str(tmp_path / "saving.py"), str(tmp_path)
    with launchers(tmp_path, *command, redis=redis.url) as job:
        job.start(0, nodes="1")
        job.until((tmp_path / "running").exists)
        frozen()
        job.stop(0, signal.SIGTERM)
        assert job.status(0) == 128 + signal.SIGTERM, job.logs()
        assert (tmp_path / "saved").exists(), job.logs()


def test_without_redis_it_says_so(tmp_path: Path) -> None:
    for url in (f"unix://{tmp_path}/none", "redis://127.0.0.1:x"):
        with pytest.raises(JobStoppedError, match="no Redis answers"):
            open_redis(url, "job", timedelta(seconds=0.1))


def test_the_loss_of_the_node_that_decides_is_one_like_any_other(
    tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """Node 0 is killed while Redis is away for a moment; the next one to decide is told to go."""
    with launchers(tmp_path, redis=redis.url) as job:
        job.start(0, nodes="1:3")
        job.until(lambda: "store at" in job.log(0))
        job.start(1, nodes="1:3")
        job.start(2, nodes="1:3")
        job.runs(0, 3)
        job.kill(0)
        redis.stop()
        redis.start()
        job.runs(1, 2)
        (decides,) = [node for node in (1, 2) if "decides from now on" in job.log(node)]
        assert "node 0 was lost: restart" in job.log(decides)
        job.stop(decides, signal.SIGUSR1)
        job.runs(2, 1)
        assert job.status(decides) == 128 + signal.SIGUSR1, job.logs()
        (tmp_path / "finish").touch()
        assert job.status(3 - decides) == 0, job.logs()


def test_a_launcher_that_slept_while_another_took_its_place_ends(
    tmp_path: Path, redis: EmbeddedRedis
) -> None:
    with launchers(tmp_path, redis=redis.url) as job:
        job.start(0)
        job.until(lambda: "store at" in job.log(0))
        job.start(1)
        job.runs(0, 2)
        job.stop(0, signal.SIGSTOP)
        job.runs(1, 1)
        job.stop(0, signal.SIGCONT)
        assert job.status(0) != 0, job.logs()
        assert "the others go on without this node" in job.log(0)
        (tmp_path / "finish").touch()
        assert job.status(1) == 0, job.logs()


def test_a_standby_decides_where_no_other_node_is_left(
    tmp_path: Path, redis: EmbeddedRedis
) -> None:
    with launchers(tmp_path, redis=redis.url) as job:
        job.start(0)
        job.until(lambda: "store at" in job.log(0))
        job.start(1)
        job.runs(0, 2)
        job.start(2)
        job.until(lambda: "waits as a standby" in job.log(2))
        job.kill(0)
        job.kill(1)
        job.runs(1, 1)
        (tmp_path / "finish").touch()
        assert job.status(2) == 0, job.logs()
