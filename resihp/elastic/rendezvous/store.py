"""Connections to the job's store (`torch.distributed.TCPStore`), and the time-outs of a job."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from typing import Any, TypeVar

import torch.distributed as dist

from resihp.contracts import JobStoppedError

from . import keys
from .liveness import ProcessHistory

_log = logging.getLogger("resihp.elastic")
_PROBE_S = 0.2
_ATTEMPT_S = 3.0  # for one address of a host that does not answer: the next may
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.1
_ELSEWHERE: dict[int, str] = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses for documentation, which no machine has."""
Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Time-outs of a rank that waits for others.

    heartbeat  silence after which a rank counts as lost
    connect    for the process groups of a new generation
    exchange   upper limit of one exchange between healthy ranks
    plan       for the sidecar's plan after a loss, before planning in-process
    poll       interval at which a rank reads the store and sends a heartbeat
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
    """Host the store in this process, at `host` and at a free port if `port` is 0.

    It listens on one address family. torch's own socket listens on both, and its server then looks
    up the name of `::ffff:127.0.0.1` for each connection; a slow name server delays every rank.

    Raises `JobStoppedError` if the port is taken, or the host's name is not known in time.
    """
    try:
        family = _await_name(host, port, timeout)
        listener = socket.create_server(("", port), family=family, backlog=socket.SOMAXCONN)
        return dist.TCPStore(
            host,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listener.detach(),
        )
    except (OSError, dist.DistError) as error:
        raise JobStoppedError(f"no store can be hosted at {host}:{port}: {error}") from error


def _await_name(host: str, port: int, timeout: timedelta) -> int:
    """Return the address family of a host, whose name may be new, as that of a pod."""
    deadline_s, is_late = time.monotonic() + timeout.total_seconds(), False
    while True:
        try:
            return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        except socket.gaierror:
            if time.monotonic() >= deadline_s:
                raise
        if not is_late:
            _log.info("waiting until the name of the store's host is known: %s", host)
        is_late = True
        time.sleep(_LONGEST_PAUSE_S)


def connect(host: str, port: int, job: str, timeouts: Timeouts) -> dist.Store:
    """Open a connection to the store; a blocking call of one thread blocks its connection.

    Raises `JobStoppedError` if no store answers within `Timeouts.connect`.
    """
    return dist.PrefixStore(job, connect_store(host, port, timeouts.connect))


def connect_store(host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """Open a connection without prefix. Raises `JobStoppedError` if no store answers."""
    try:
        return dist.TCPStore(host, port, is_master=False, timeout=timeout)
    except dist.DistError as error:
        raise _no_store(host, port) from error


def await_store(host: str, port: int, timeout: timedelta) -> None:
    """Wait until somebody listens where the store of a job is to be that may not run.

    torch would print stack traces at its time-out. Not for every rank: this costs the host of the
    store a connection. Raises `JobStoppedError` after the time-out.
    """
    limit_s, pause_s = timeout.total_seconds(), 0.0
    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            with socket.create_connection((host, port), min(_ATTEMPT_S, limit_s)) as probe:
                # Where nobody listens, a port of this machine may be connected to itself.
                if probe.getsockname() != probe.getpeername():
                    return
            raise ConnectionRefusedError
        except OSError as error:
            if not pause_s:
                _log.info("waiting for the store at %s:%d", host, port)
            pause_s = min(max(2 * pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
            if time.monotonic() + pause_s > deadline_s:
                raise _no_store(host, port) from error
        time.sleep(pause_s)


def _no_store(host: str, port: int) -> JobStoppedError:
    return JobStoppedError(
        f"no store answers at {host}:{port}: the job has ended or has not started yet"
    )


def announce_death(store: dist.Store, rank: int) -> None:
    """Announce that the process of `rank` has ended; its launcher calls this."""
    store.append(keys.PROCESS_HISTORY, ProcessHistory.end(rank))  # type: ignore[attr-defined]
    store.add(keys.SIGNAL, 1)


def address_towards(host: str, port: int) -> str:
    """Return this machine's address on its route to `host`; send nothing.

    Where the name of this machine is one of its loopback, as Debian writes it to `/etc/hosts`, that
    of the default route, as others are told it. Raises `JobStoppedError` if there is none.

    >>> address_towards("127.0.0.1", 29500)
    '127.0.0.1'
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        found = _source_towards(family, address)
    except OSError as error:
        raise JobStoppedError(f"there is no route to {host}:{port}: {error}") from error
    if ip_address(found).is_loopback and not (host == address[0] or "localhost" in host):
        with suppress(OSError):
            return _source_towards(family, (_ELSEWHERE[family], port))
    return found


def _source_towards(family: int, address: tuple[Any, ...]) -> str:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


class StorePool:
    """Pool of connections to the store; opening one is slow where names are looked up.

    A connection may break, or a request fail after a pause of the store, while the store is there:
    it is then asked on a new connection.

    store       for requests that are answered at once, from any thread; not to be kept
    is_cut_off  True once the store is gone; it is not asked again
    open        opens a further connection
    """

    def __init__(self, open_store: Callable[[], dist.Store]) -> None:
        self.open = open_store
        self.store = open_store()
        self.is_cut_off = False
        self._spare: list[dist.Store] = []
        self._renewing = threading.Lock()

    def borrow(self) -> dist.Store:
        """Take a free connection, or open one, for requests that may block."""
        try:
            spare = self._spare.pop()
        except IndexError:
            return self.open()
        try:
            spare.check([keys.SIGNAL])
        except dist.DistError as error:  # it broke while nobody used it
            return self.reopen(spare, error) or spare
        return spare

    def give_back(self, store: dist.Store) -> None:
        """Return a connection taken with `borrow` on which no request is pending."""
        self._spare.append(store)

    def ask(self, request: Callable[[], Answer], otherwise: Answer) -> Answer:
        """The store's answer to `request`; `otherwise` if the store is gone.

        A request to `store` that fails is made once more, on a new connection.
        """
        if self.is_cut_off:
            return otherwise
        used = self.store
        try:
            return request()
        except dist.DistError as error:
            if not self._renew(used, error):
                return otherwise
        try:
            return request()
        except dist.DistError as error:
            self.cut_off(error)
            return otherwise

    def is_there(self) -> bool:
        """Return whether the store answers, on a new connection if `store` has broken."""
        return self.ask(lambda: self.store.check([keys.SIGNAL]) or True, False)

    def reopen(self, failed: dist.Store, error: dist.DistError) -> dist.Store | None:
        """Return a connection in place of one that `failed`; None if the store is gone.

        It is gone if it refuses connections, if none can be opened within the time-out, and if what
        answers does not know the job. A store that was only late keeps its connections.
        """
        if self.is_cut_off:
            return None
        with suppress(dist.DistError, JobStoppedError):
            was_late = isinstance(error, dist.DistStoreError)
            if was_late or not _is_refused(failed):
                store = failed if was_late else self.open()
                if store.check([keys.PROCESS_HISTORY]):
                    _log.warning("the store answers again after an error: %s", error)
                    return store
        self.cut_off(error)
        return None

    def _renew(self, used: dist.Store, error: dist.DistError) -> bool:
        """Replace `store` unless another thread has done so; False if the store is gone."""
        with self._renewing:
            if self.store is used:
                self.store = self.reopen(used, error) or used
        return not self.is_cut_off

    @contextmanager
    def required(self, purpose: str) -> Iterator[dist.Store]:
        """The store, for work without which the job cannot go on.

        Raises `JobStoppedError` with the `purpose` if the store is gone.
        """
        self.is_there()
        try:
            yield self.store
        except dist.DistError as error:
            self.cut_off(error)
            raise JobStoppedError(f"{purpose}: the store is gone") from error

    def cut_off(self, error: Exception) -> None:
        """Record that the store is gone, and log it once."""
        if not self.is_cut_off:
            self.is_cut_off = True
            _log.error("the store is gone; training goes on, its layout cannot change: %s", error)


def _is_refused(store: dist.Store) -> bool:
    """Return whether nobody listens any more where `store` was connected to.

    torch would try again until its time-out.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return False
    try:
        with socket.create_connection((store.host, store.port), timeout=_PROBE_S) as probe:
            return not probe.recv(1)  # a server that ends resets what it has not accepted yet
    except ConnectionError:
        return True
    except OSError:  # silent, or out of reach for now
        return False
