"""What every route needs, opened by the app's lifespan and closed by it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, Request

from ..settings import Settings
from ..store.api import ApiStore
from .bell import Bell
from .metrics import HttpMetrics


@dataclass
class Context:
    """The open parts of a running sidecar."""

    settings: Settings
    store: ApiStore
    bell: Bell
    metrics: HttpMetrics


def _context(request: Request) -> Context:
    return cast(Context, request.app.state.context)


Ctx = Annotated[Context, Depends(_context)]
