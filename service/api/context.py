"""Resources of the routes, opened and closed by the app's lifespan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, Request

from ..settings import Settings
from ..store.http_store import HttpStore
from .heartbeats import HeartbeatBatches
from .metrics import HttpMetrics
from .notifier import Notifier


@dataclass
class AppContext:
    """Resources of a running sidecar."""

    settings: Settings
    store: HttpStore
    notifier: Notifier
    metrics: HttpMetrics
    heartbeats: HeartbeatBatches


def _context(request: Request) -> AppContext:
    return cast(AppContext, request.app.state.context)


Ctx = Annotated[AppContext, Depends(_context)]
