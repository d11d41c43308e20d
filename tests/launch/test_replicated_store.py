"""Stores that outlive nodes: one contract for all of them, and the loss of their servers."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import redis
import torch.distributed as dist

from resihp.contracts import JobStoppedError
from resihp.elastic.rendezvous.store import host_store
from resihp.launch.replicated_store import ReplicatedStore, client_type, open_replicated_store
from resihp.launch.store_url import StoreUrl
from tests.launch.launchers import launchers
from tests.launch.store_servers import (
    LIMIT_S,
    PASSWORD,
    ClusterRedis,
    EtcdServers,
    PlainRedis,
    SentinelRedis,
    Servers,
    free_port,
    until,
)

MINUTE = timedelta(minutes=1)
KINDS = {
    "redis": PlainRedis,
    "sentinel": SentinelRedis,
    "cluster": ClusterRedis,
    "etcd": EtcdServers,
}


@pytest.fixture(scope="module", params=KINDS)
def servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    """A store of each kind, in which each test has jobs of its own."""
    with KINDS[request.param](tmp_path_factory.mktemp("store")) as found:
        yield found


@pytest.fixture
def opened(servers: Servers, request: pytest.FixtureRequest) -> Callable[..., ReplicatedStore]:
    """Opens the store of a test's job, of which no request is made twice on a busy machine."""
    url = StoreUrl.parse(servers.url)
    new_client = client_type("etcd" if url.kind == "etcd" else "Redis")

    def opened(job: str = request.node.name, lifetime_s: int = 600) -> ReplicatedStore:
        return ReplicatedStore(new_client(url, job, lifetime_s, LIMIT_S), MINUTE)

    return opened


def answers(store: dist.Store) -> list[object]:
    """What a store without data answers to all requests of launchers."""
    found: list[object] = [store.check(["a"]), store.compare_set("a", "no", "x")]
    store.set("a", "1")
    found += [store.get("a"), store.check(["a"]), store.check(["a", "b"])]
    found += [store.add("n", amount) for amount in (0, 2, 0, -1)]
    store.append("lines", "x\n")  # type: ignore[attr-defined]
    store.append("lines", "ü\n")  # type: ignore[attr-defined]
    found += [store.get("lines")]
    changes = (("", "first"), ("", "second"), ("other", "third"), ("first", "fourth"))
    return found + [store.compare_set("c", expected, value) for expected, value in changes]


def test_all_stores_answer_alike(opened: Callable[..., ReplicatedStore]) -> None:
    torchs, found = answers(host_store("127.0.0.1", 0, MINUTE)), answers(opened())
    assert found[1] == b""  # torch's: the value that was expected
    assert found[:1] + found[2:] == torchs[:1] + torchs[2:]
    assert found[2:9] == [b"1", True, False, 0, 2, 2, 1]
    with pytest.raises(dist.DistStoreError, match="no value of b"):
        opened().get("b")


def test_what_launchers_write_at_a_time_is_done_in_one_step(
    opened: Callable[..., ReplicatedStore],
) -> None:
    stores = [opened() for _ in range(4)]

    def write(number: int) -> bytes:
        for _ in range(10):
            stores[number].add("n", 1)
            stores[number].append("lines", f"{number}\n")
        return stores[number].compare_set("winner", "", str(number))

    with ThreadPoolExecutor(len(stores)) as threads:
        winners = set(threads.map(write, range(len(stores))))
    assert winners == {stores[0].get("winner")}
    assert stores[0].add("n", 0) == 40
    lines = stores[0].get("lines").decode().split()
    assert sorted(lines) == sorted("0123" * 10)


def test_jobs_are_apart_and_a_failed_one_is_forgotten(
    opened: Callable[..., ReplicatedStore],
) -> None:
    one, other = opened(job="team"), opened(job="team/7")
    assert not one.forget("a", b"")
    for store in (one, other):
        store.set("a", "1")
        store.set("b", "2")
    one.set("a", "3")
    assert other.get("a") == b"1"
    assert not one.forget("a", b"1")
    assert one.check(["a", "b"])
    assert one.forget("a", b"3")
    assert not one.forget("a", b"3")
    assert [one.check([key]) for key in "ab"] == [False, False]
    assert other.check(["a", "b"])


def test_values_vanish_after_the_last_write(opened: Callable[..., ReplicatedStore]) -> None:
    store = opened(lifetime_s=1)
    store.set("a", "1")
    store.add("n", 1)
    until(lambda: not store.check(["a"]) and not store.check(["n"]))
    store.set("a", "1")


def test_requests_are_repeated_until_the_servers_go_on_if_they_may(servers: Servers) -> None:
    waits: list[int] = []

    def wait() -> None:
        waits.append(1)
        servers.send_signal(signal.SIGCONT)

    store = open_replicated_store(servers.url, "pause", timedelta(seconds=2), wait)
    waits.clear()
    try:
        servers.send_signal(signal.SIGSTOP)
        store.set_timeout(timedelta(0))
        with pytest.raises(dist.DistNetworkError):
            store.check(["a"])
        assert not waits
        store.set_timeout(MINUTE)
        assert store.add("n", 1) >= 1
        assert waits
    finally:
        servers.send_signal(signal.SIGCONT)


def test_without_servers_it_says_so(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    for url, words in (
        (f"unix://{tmp_path}/none", "no Redis answers as the store of the job"),
        ("redis://127.0.0.1:x", "no Redis answers .*: the store's port"),
        (f"redis://{address}?socket_color=red", "no Redis answers .*socket_color"),
        (f"redis+sentinel://{address}/main", "no Redis answers .*: No master found"),
        (
            f"redis+cluster://{address},{address}",
            "no Redis answers .* reachable node",
        ),
        (f"etcd://{address},{address}", "no etcd answers .*: http://.*; http://"),
        (f"etcd://{address}?color=red", "no etcd answers .* not color"),
    ):
        with pytest.raises(JobStoppedError, match=words):
            open_replicated_store(url, "job", timedelta(seconds=0.1))


@pytest.mark.parametrize("servers", ["redis", "sentinel", "cluster"], indirect=True)
def test_a_redis_that_denies_access_is_not_asked_again(servers: Servers) -> None:
    """For a wrong password, none, and a user that may do nothing; the URL is told without them."""
    waits: list[int] = []
    for server in servers.all:
        client = redis.Redis(port=server.port, password=PASSWORD, protocol=2)
        with client, suppress(redis.RedisError):  # a Sentinel has another password
            client.acl_setuser("nobody", enabled=True, passwords=["+weak"], commands=["+auth"])
    for user in (":wrong", "", "nobody:weak", "no%62ody:wrong"):
        url = servers.url.replace(f":{PASSWORD}@", f"{user}@" if user else "")
        with pytest.raises(JobStoppedError) as refused:
            open_replicated_store(url, "denied", MINUTE, lambda: waits.append(1))
        told = str(refused.value)
        assert f"{StoreUrl.parse(servers.url).shown} denies access: " in told
        assert not {"wrong", "weak", "sentinels"} & set(re.findall("[a-z]+", told))
    assert not waits


def write_first(store: ReplicatedStore) -> None:
    store.set("a", "1")
    assert store.add("n", 3) >= 3


def goes_on(store: ReplicatedStore) -> None:
    """Hold that the store has what was written first, and takes more."""
    assert store.get("a") == b"1"
    assert store.add("n", 1) > 3
    assert store.compare_set("c", "", "first") == b"first"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hangs"])
def test_a_sentinel_lets_the_replica_take_over(tmp_path: Path, number: int) -> None:
    with SentinelRedis(tmp_path) as servers:
        store = open_replicated_store(servers.url, "job", MINUTE)
        write_first(store)
        lost = servers.master
        assert servers.client(lost).wait(1, 60000) == 1
        lost.send_signal(number)
        goes_on(store)
        assert servers.master is not lost


def test_a_redis_that_became_a_replica_is_left(tmp_path: Path) -> None:
    """As behind one address for all; here it becomes the master again."""
    with PlainRedis(tmp_path) as servers:
        (server,) = servers.all

        def replica_of(*master: str | int) -> None:
            servers.client(server).execute_command("REPLICAOF", *master)

        store = open_replicated_store(servers.url, "job", MINUTE, lambda: replica_of("NO", "ONE"))
        write_first(store)
        replica_of("127.0.0.1", free_port())
        goes_on(store)


@pytest.mark.parametrize("setting", ["min-replicas-to-write", "maxmemory"])
def test_a_redis_that_takes_no_writes_for_now_is_asked_again(tmp_path: Path, setting: str) -> None:
    """As without its replica after a failover, or without memory for a while."""
    with PlainRedis(tmp_path) as servers:
        client = servers.client(servers.all[0])
        store = open_replicated_store(
            servers.url, "job", MINUTE, lambda: client.config_set(setting, 0)
        )
        write_first(store)
        client.config_set(setting, 1)
        goes_on(store)


def test_a_redis_that_is_busy_with_another_client_s_script_is_asked_again(tmp_path: Path) -> None:
    waits: list[int] = []
    with PlainRedis(tmp_path) as servers:
        client = servers.client(servers.all[0])

        def wait() -> None:
            waits.append(1)
            with suppress(redis.ResponseError):  # it has ended
                client.script_kill()

        store = open_replicated_store(servers.url, "job", MINUTE, wait)
        write_first(store)
        client.config_set("lua-time-limit", 1)
        client.connection_pool.get_connection().send_command("EVAL", "while true do end", 0)
        goes_on(store)
        assert waits


def test_a_cluster_goes_on_without_two_of_its_masters(tmp_path: Path) -> None:
    """One had the job's slot, and a replica; the other one had neither."""
    with ClusterRedis(tmp_path, replica=True) as servers:
        store = open_replicated_store(servers.url, "job", MINUTE)
        write_first(store)
        assert servers.client(servers.owner).wait(1, 60000) == 1
        servers.owner.kill()
        goes_on(store)
        servers.others[0].kill()
        goes_on(store)
        goes_on(open_replicated_store(servers.url, "job", MINUTE))


def test_etcd_goes_on_without_one_of_three_members(tmp_path: Path) -> None:
    """One after the other, killed or hanging."""
    with EtcdServers(tmp_path, 3) as servers:
        store = open_replicated_store(servers.url, "job", MINUTE)
        write_first(store)
        servers.all[0].kill()
        goes_on(store)
        servers.all[0].start()
        servers.await_answer(servers.all[0])
        servers.all[1].send_signal(signal.SIGSTOP)
        goes_on(store)
        goes_on(open_replicated_store(servers.url, "job", MINUTE))


def test_launchers_prolong_one_lease_of_etcd(tmp_path: Path) -> None:
    with EtcdServers(tmp_path) as servers:
        (server,) = servers.all
        for name in ("one", "other"):
            store = open_replicated_store(servers.url, "job", MINUTE)
            store.set(name, "1")
        (lease,) = servers.asked(server, "lease/leases")["leases"]
        found = servers.asked(server, "lease/timetolive", ID=lease["ID"], keys=True)
        assert (found["grantedTTL"], len(found["keys"])) == ("600", 2)
        store.set("third", "1")
        servers.asked(server, "lease/revoke", ID=lease["ID"])  # as if it had run out
        assert not store.check(["third"])
        write_first(store)


def test_etcd_by_tls_with_a_password(tmp_path: Path) -> None:
    with EtcdServers(tmp_path, 1, "--auto-tls", scheme="https") as servers:
        (server,) = servers.all
        servers.enable_passwords()
        url = f"etcds://root:{PASSWORD}@{server.address}?ca_certs={servers.certificate}"
        store = open_replicated_store(url, "job", MINUTE)
        write_first(store)
        server.kill()
        server.start()  # without the tokens that it has given
        goes_on(store)
        wrong = url.replace(PASSWORD, "wrong")
        with pytest.raises(
            JobStoppedError, match=f": https://{server.address}: .*invalid user ID or pass"
        ):
            open_replicated_store(wrong, "job", MINUTE)


def test_etcd_goes_on_after_changes_of_users(tmp_path: Path) -> None:
    """A signed token is of no use after any, though the user that it names has not changed."""
    (tmp_path / "key").write_text(PASSWORD)
    tokens = f"jwt,priv-key={tmp_path / 'key'},sign-method=HS256"
    with EtcdServers(tmp_path, 1, "--auth-token", tokens) as servers:
        root = servers.enable_passwords()
        url = servers.url.replace("//", f"//root:{PASSWORD}@")
        store = open_replicated_store(url, "job", MINUTE)
        write_first(store)
        servers.asked(servers.all[0], "auth/user/add", root, name="other", password=PASSWORD)
        goes_on(store)


def test_jobs_go_on_without_node_0_and_a_server_of_their_store(tmp_path: Path) -> None:
    """One with Sentinel and one with etcd, at a time."""
    folders = tmp_path / "sentinel", tmp_path / "etcd"
    for folder in folders:
        folder.mkdir()
    with (
        SentinelRedis(folders[0]) as sentinel,
        EtcdServers(folders[1], 3) as etcd,
        launchers(folders[0], store=sentinel.url) as one,
        launchers(folders[1], store=etcd.url) as other,
    ):
        for job in (one, other):
            job.start(0)
        for job in (one, other):
            job.until(lambda job=job: "store at" in job.log(0))
            job.start(1)
        for job, server in ((one, sentinel.master), (other, etcd.all[0])):
            job.runs(0, 2)
            job.kill(0)
            server.kill()
        for job in (one, other):
            job.runs(1, 1)
            assert "this one decides from now on" in job.log(1), job.logs()
            (job.folder / "finish").touch()
        for job, servers in ((one, sentinel), (other, etcd)):
            assert job.status(1) == 0, job.logs() + servers.logs()
