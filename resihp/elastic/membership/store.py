"""The store through which ranks find each other; a process of its own hosts it, no rank."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """How long a rank waits for others.

    heartbeat  a rank that is waited for and does not beat for so long is given up
    connect    to build the groups of a new world
    exchange   the longest that one exchange between healthy ranks may last
    plan       for the service's plan after a loss, before planning locally
    poll       between two looks at the store
    """

    heartbeat: timedelta = timedelta(seconds=5)
    connect: timedelta = timedelta(seconds=30)
    exchange: timedelta = timedelta(minutes=10)
    plan: timedelta = timedelta(seconds=10)
    poll: timedelta = timedelta(milliseconds=100)

    def __post_init__(self) -> None:
        if not timedelta(0) < self.poll < self.heartbeat <= self.connect <= self.exchange:
            raise ValueError("time-outs must satisfy 0 < poll < heartbeat <= connect <= exchange")


def host_store(host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """Host the store in this process, at `host` and a free port where `port` is 0.

    It listens on the addresses of one family. torch's own socket takes both, and its server then
    asks the name server who `::ffff:127.0.0.1` is, for each connection; every rank waits when the
    answer is late, seconds when it is lost.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server(("", port), family=family, backlog=socket.SOMAXCONN)
    return dist.TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )


def connect(host: str, port: int, job: str, timeouts: Timeouts) -> dist.Store:
    """A connection of its own to the store; one thread must not block another's."""
    store = dist.TCPStore(host, port, is_master=False, timeout=timeouts.connect)
    return dist.PrefixStore(job, store)


def announce_death(store: dist.Store, rank: int) -> None:
    """Tell the survivors that a process is known to have ended (its launcher calls this)."""
    store.add(f"deaths/{rank}", 1)
    store.set(f"dead/{rank}", "1")
    store.add("signal", 1)


def address_towards(host: str, port: int) -> str:
    """This machine's address on the network over which it reaches `host`; sends nothing.

    >>> address_towards("127.0.0.1", 29500)
    '127.0.0.1'
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])
