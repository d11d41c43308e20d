"""Heartbeats of a job, stored together: thousands of ranks cost a few messages per second."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field

from ..store.documents import MessageKind
from ..store.http_store import HttpStore

_WINDOW_S = 0.1
_MOST = 4_096
"""Heartbeats in one message."""


@dataclass
class _Batch:
    """Heartbeats as JSON. `asked` is set when they are `done`: the outcome for each request with a
    part in it."""

    heartbeats: list[bytes] = field(default_factory=list)
    number: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)
    asked: frozenset[int] | Exception = frozenset()


class HeartbeatBatches:
    """Collects the heartbeats of each job for 100 ms and stores them as one message."""

    def __init__(self, store: HttpStore) -> None:
        self._store = store
        self._open: dict[str, _Batch] = {}
        self._tasks = set[asyncio.Task[None]]()

    async def add(self, job: str, heartbeats: bytes, number: int) -> frozenset[int]:
        """Store so many heartbeats, as JSON between commas; return the ranks of the job whose
        stacks are asked for.

        Raises the errors of `HttpStore.put`.
        """
        batch = self._open.get(job)
        if batch is None or batch.number >= _MOST:
            batch = self._open[job] = _Batch()
            task = asyncio.create_task(self._store_later(job, batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        batch.heartbeats.append(heartbeats)
        batch.number += number
        await batch.done.wait()
        if isinstance(batch.asked, Exception):
            raise batch.asked
        return batch.asked

    async def _store_later(self, job: str, batch: _Batch) -> None:
        await asyncio.sleep(_WINDOW_S)
        if self._open.get(job) is batch:
            del self._open[job]
        body = b'{"heartbeats":[%s]}' % b",".join(batch.heartbeats)
        try:
            stored = await self._store.put(job, MessageKind.HEARTBEAT, body, status="stacks")
            batch.asked = frozenset(json.loads(stored.status or b"[]"))
        except Exception as error:  # noqa: BLE001 each request raises it, and none waits for ever
            batch.asked = error
        batch.done.set()
