"""Delay of the requests to this API process, measured and reported to the workers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Hashable

import redis

from ..logs import logger
from ..store.http_store import HttpStore
from ..worker.listening import PATIENCE_S

log = logger("resihp.delay")

Address = tuple[str, int]
"""Host and port."""

REPORT_EVERY_S = 0.5
_FIRST_EVERY_S = 0.05  # until the process serves
_FAILURE_S = 2.0  # for which a failure is reported: a worker reads reports now and then
_MOST_PROBES = 60
_PROBE_S = 60.0
_PROBE = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


class WaitingRequests:
    """Requests that have arrived and are not answered. One that could not be stored counts for a
    while as one that waits for so long that its sender gives up."""

    def __init__(self) -> None:
        self._since_s: dict[Hashable, float] = {}  # in the order of their arrival
        self._failed_s = float("-inf")

    def add(self, key: Hashable) -> None:
        """Note that a request waits from now on, if it does not yet."""
        self._since_s.setdefault(key, time.monotonic())

    def remove(self, key: Hashable) -> None:
        """Note that a request is answered."""
        self._since_s.pop(key, None)

    def fail(self) -> None:
        """Note that the answer to a request was that Redis cannot serve."""
        self._failed_s = time.monotonic()

    def remove_until(self, since_s: float) -> None:
        """Note that all requests are answered that have waited since `since_s` or longer."""
        self._since_s = {key: each for key, each in self._since_s.items() if each > since_s}

    def __len__(self) -> int:
        return len(self._since_s)

    def remove_unless_oldest(self, key: Hashable) -> None:
        """Drop a request that an older one speaks for."""
        if key != next(iter(self._since_s), key):
            self.remove(key)

    @property
    def oldest_s(self) -> float:
        """Age of the oldest one in seconds; 0 if there is none."""
        now_s = time.monotonic()
        oldest_s = now_s - next(iter(self._since_s.values()), now_s)
        return max(oldest_s, PATIENCE_S) if now_s - self._failed_s < _FAILURE_S else oldest_s


class DelayReporter:
    """Reports the age of the oldest request to this process twice a second.

    A request that waits in the socket of the listener, in that of its connection or for a turn of
    the event loop is seen by none but the clients. The process is therefore a client of its own: a
    probe that it sends to `address` waits behind all requests that are there. Of several processes
    on the address any may answer; requests that have arrived in this one are known to it. While it
    hangs its last report ages.

    requests  those that have arrived
    """

    def __init__(
        self, store: HttpStore, process: str, requests: WaitingRequests, address: Address | None
    ) -> None:
        self._store, self._process, self._address = store, process, address
        self._requests, self._probes = requests, WaitingRequests()
        self._is_reached = address is None  # by a probe: before, no request is

    async def run(self) -> None:
        """Report until cancelled."""
        probing = set[asyncio.Task[None]]()
        async with asyncio.TaskGroup() as tasks:
            number = 0
            while True:
                probing = {task for task in probing if not task.done()}
                if self._address is not None and len(probing) < _MOST_PROBES:
                    number += 1
                    self._probes.add(number)
                    probing.add(tasks.create_task(self._probe(number, *self._address)))
                await asyncio.sleep(REPORT_EVERY_S if self._is_reached else _FIRST_EVERY_S)
                if self._is_reached:
                    await self._report(max(self._requests.oldest_s, self._probes.oldest_s))

    async def close(self) -> None:
        """Remove the report of this process, which has answered all its requests."""
        with contextlib.suppress(redis.RedisError):
            await self._store.remove_report(self._process)

    async def _report(self, delay_s: float) -> None:
        try:
            await self._store.report_delay(self._process, delay_s)
        except redis.RedisError as error:
            log.debug("delay not reported", error=str(error))

    async def _probe(self, number: int, host: str, port: int) -> None:
        """Send a probe. The first one that fails waits until a later one is answered."""
        sent_s = time.monotonic()
        with contextlib.suppress(OSError):  # time-outs are
            async with asyncio.timeout(_PROBE_S):
                reader, writer = await asyncio.open_connection(host, port)
                with contextlib.closing(writer):
                    writer.write(_PROBE)
                    if await reader.read(1):
                        self._probes.remove_until(sent_s)
                        self._is_reached = True
        self._probes.remove_unless_oldest(number)
