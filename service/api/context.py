"""Resources of the routes, opened and closed by the app's lifespan."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Annotated, cast

from fastapi import Depends, Request

from ..settings import Settings
from ..store.http_store import HttpStore
from .heartbeats import HeartbeatBatches
from .metrics import HttpMetrics
from .notifier import Notifier


@dataclass
class AppContext:
    """Resources of a running sidecar.

    decoding  held while a large body is decoded in a thread
    """

    settings: Settings
    store: HttpStore
    notifier: Notifier
    metrics: HttpMetrics
    heartbeats: HeartbeatBatches
    decoding: asyncio.Lock = field(default_factory=asyncio.Lock)


def _context(request: Request) -> AppContext:
    return cast(AppContext, request.app.state.context)


Ctx = Annotated[AppContext, Depends(_context)]
