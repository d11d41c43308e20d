"""Resources of the routes, opened and closed by the app's lifespan."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated, cast

from fastapi import Depends, Request

from ..settings import Settings
from ..store.http_store import HttpStore
from .heartbeats import HeartbeatBatches
from .lag import JobLags
from .metrics import HttpMetrics
from .notifier import Notifier


@dataclass
class AppContext:
    """Resources of a running sidecar.

    decoding  the one thread that decodes large bodies
    turns     so many messages are decoded and written at a time: of thousands that arrive together,
              all in one turn of the event loop would keep it from all else for seconds
    watched   the same store as `store`, on connections of their own: for requests that wait
    """

    settings: Settings
    store: HttpStore
    watched: HttpStore
    notifier: Notifier
    metrics: HttpMetrics
    heartbeats: HeartbeatBatches
    lags: JobLags
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(64))
    decoding: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "decoding"))


async def _context(request: Request) -> AppContext:
    return cast(AppContext, request.app.state.context)


Ctx = Annotated[AppContext, Depends(_context)]
