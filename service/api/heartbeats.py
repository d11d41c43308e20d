"""Heartbeats of a job, stored together: thousands of ranks cost a few messages per second."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from ..store.documents import MessageKind
from ..store.http_store import HttpStore

_WINDOW_S = 0.1
_MOST = 4_096
"""Heartbeats in one message."""


@dataclass
class _Batch:
    heartbeats: list[dict[str, Any]] = field(default_factory=list)
    stored: asyncio.Task[frozenset[int]] | None = None


class HeartbeatBatches:
    """Collects the heartbeats of each job for 100 ms and stores them as one message."""

    def __init__(self, store: HttpStore) -> None:
        self._store = store
        self._open: dict[str, _Batch] = {}

    async def add(self, job: str, heartbeats: list[dict[str, Any]]) -> frozenset[int]:
        """Store heartbeats; return the ranks of the job whose stacks are asked for.

        Raises the errors of `HttpStore.put`.
        """
        batch = self._open.get(job)
        if batch is None or len(batch.heartbeats) >= _MOST:
            batch = self._open[job] = _Batch()
            batch.stored = asyncio.create_task(self._store_later(job, batch))
        batch.heartbeats += heartbeats
        assert batch.stored is not None
        return await asyncio.shield(batch.stored)

    async def _store_later(self, job: str, batch: _Batch) -> frozenset[int]:
        await asyncio.sleep(_WINDOW_S)
        if self._open.get(job) is batch:
            del self._open[job]
        body = json.dumps({"heartbeats": batch.heartbeats}, separators=(",", ":")).encode()
        await self._store.put(job, MessageKind.HEARTBEAT, body)
        return await self._store.asked_stacks(job)
