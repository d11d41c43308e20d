"""Launchers that agree in Redis: the loss of no node ends the job."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from redis import Redis

from resihp._preemption import PreemptionNotice
from resihp.elastic.rendezvous.store import host_store
from resihp.launch.attempts import Attempt, AttemptEnd, EndKind, JobEnd, NodeOffer, place
from resihp.launch.heartbeats import LauncherHeartbeats
from resihp.launch.launcher_store import LauncherStore
from resihp.launch.nodes import Nodes
from resihp.launch.options import Command, Options
from resihp.launch.replicated_store import open_replicated_store
from service.store.embedded_redis import EmbeddedRedis
from tests.launch.launchers import launchers
from tests.launch.store_servers import SentinelRedis

MINUTE = timedelta(minutes=1)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(tmp_path / "redis")
    server.start()
    yield server
    server.stop()


def opened(redis: EmbeddedRedis) -> LauncherStore:
    return LauncherStore(open_replicated_store(redis.url, "job", MINUTE))


def delete_all(redis: EmbeddedRedis) -> None:
    with Redis.from_url(redis.url) as client:
        client.flushall()


def nodes_at(url: str) -> Nodes:
    """A launcher's place in a job of up to two nodes."""
    command = Command("t.py", "script")
    options = Options(
        command, nodes=2, store_url=url, port=1, run="job", heartbeat=timedelta(seconds=2)
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
        failed = nodes_at(redis.url)
        assert failed.is_coordinator
        store = opened(redis)
        store.announce(NodeOffer(failed.id, 0, (0,)))
        assert store.publish(0, JobEnd(3, "a bug"))
        if says_so:
            failed.close()
        else:
            stop_heartbeats(failed)
        following = nodes_at(redis.url)
        assert following.is_coordinator
        assert store.attempt(0) is None
        assert opened(redis).announced() == []
        following.close()
        assert store.publish(0, JobEnd(3, "for the next turn"))
    assert store.forget_failed()
    assert store.publish(0, JobEnd(0))
    late = nodes_at(redis.url)
    assert late.begin(NodeOffer(late.id, 0, (0,)), bool) == JobEnd(0)
    late.close()


def test_a_server_whose_name_is_gone_keeps_no_launcher_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_up(host: str, *arguments: Any, **named: Any) -> list[Any]:
        if host == "gone":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return known(host, *arguments, **named)

    known = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with SentinelRedis(tmp_path) as servers:
        launcher = nodes_at(servers.url.replace("@", "@gone,"))
        assert launcher.own_address == "127.0.0.1"
        launcher.close()


def test_a_launcher_that_was_replaced_while_it_decided_follows(redis: EmbeddedRedis) -> None:
    """It slept a little longer than the time-out, and woke before it was given up."""
    slept = nodes_at(redis.url)
    ranks = host_store("127.0.0.1", 0, MINUTE)
    try:
        store = opened(redis)
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
    one, other = (opened(redis) for _ in range(2))
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
        delete_all(redis)
        first.restore("one")
        second.restore("one")
        late = opened(redis)
        assert late.coordinator() == "one"
        assert sorted(offer.id for offer in late.announced()) == ["one", "other"]
        assert late.attempt(late.newest()) == attempt
        assert late.end_of(0) == AttemptEnd(EndKind.NOTICE, "maintenance")
        assert late.reported(0, "other") == offers[1]
    delete_all(redis)
    assert opened(redis).coordinate("third")
    one.restore("one")
    assert opened(redis).announced() == []


def test_the_job_goes_on_after_redis_has_lost_its_data(
    tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """In the middle of an attempt, before a restart and before the end."""
    with launchers(tmp_path, store=redis.url) as job:
        job.start(0, nodes="2")
        job.start(1, nodes="2")
        pids = job.runs(0, 2)
        delete_all(redis)
        os.kill(pids[1], signal.SIGKILL)
        job.runs(1, 2)
        delete_all(redis)
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
    heartbeat = timedelta(seconds=2)
    store = open_replicated_store(redis.url, "job", heartbeat, lambda: waits.append(1))
    frozen()
    with pytest.raises(dist.DistNetworkError):
        store.check(["a"])
    assert 1 <= len(waits) <= 6 / 0.5


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
    with launchers(tmp_path, *command, store=redis.url) as job:
        job.start(0, nodes="1")
        job.until((tmp_path / "running").exists)
        frozen()
        job.stop(0, signal.SIGTERM)
        assert job.status(0) == 128 + signal.SIGTERM, job.logs()
        assert (tmp_path / "saved").exists(), job.logs()


def test_the_loss_of_the_node_that_decides_is_one_like_any_other(
    tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """Node 0 is killed while Redis is away for a moment; the next one to decide is told to go."""
    with launchers(tmp_path, store=redis.url) as job:
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
    with launchers(tmp_path, store=redis.url) as job:
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
    with launchers(tmp_path, store=redis.url) as job:
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
