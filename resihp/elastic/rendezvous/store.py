"""The store through which ranks find each other; a process of its own hosts it, no rank."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

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


_log = logging.getLogger("resihp.elastic")
Answer = TypeVar("Answer")


class StorePool:
    """Few connections, which are used again: making one is slow where names are looked up.

    `store` is for questions that are answered at once, from any thread; `is_cut_off` once it has
    not answered. `open` makes a further connection, `borrow` takes one that is free.
    """

    def __init__(self, open_store: Callable[[], dist.Store]) -> None:
        self.open = open_store
        self.store = open_store()
        self.is_cut_off = False
        self._spare: list[dist.Store] = []

    def borrow(self) -> dist.Store:
        """A connection for a thread that may block in it."""
        try:
            return self._spare.pop()
        except IndexError:
            return self.open()

    def give_back(self, store: dist.Store) -> None:
        """A connection of `borrow` in which no thread can be blocked any more."""
        self._spare.append(store)

    def ask(self, question: Callable[[], Answer], otherwise: Answer) -> Answer:
        """The store's answer; `otherwise`, now and ever after, if it is gone."""
        if self.is_cut_off:
            return otherwise
        try:
            return question()
        except dist.DistError as error:
            self.cut_off(error)
            return otherwise

    def cut_off(self, error: Exception) -> None:
        """Note that the store is gone, and say so once."""
        if not self.is_cut_off:
            self.is_cut_off = True
            _log.error("the store is gone; training goes on, but cannot change: %s", error)
