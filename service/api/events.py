"""Route: server-sent events of a job."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import redis
from fastapi import APIRouter, Header
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from resihp.contracts import ContractError

from ..errors import UnknownJobError
from ..logs import logger
from ..store.documents import dumps
from ..store.http_store import EventCursor, HttpStore
from ..store.schema import NEWS
from .context import AppContext, Ctx

router = APIRouter(prefix="/v1/jobs/{job}/events", tags=["events"])

log = logger("resihp.events")

# Nineteen digits: Redis counts to 2^64.
_CURSOR = re.compile(r"([0-9]{1,19}-[0-9]{1,19})_([0-9]{1,19}-[0-9]{1,19})")
_KEEPALIVE_S = 5.0


@router.get("", response_class=StreamingResponse)
async def get_events(
    job: str,
    ctx: Ctx,
    last_event_id: Annotated[str | None, Header()] = None,
    replay: bool = False,
) -> StreamingResponse:
    """Verdicts, plans, acknowledgements, failures and step summaries as they occur. A client that
    reconnects with `Last-Event-ID` receives all kept events since; `replay` starts with all kept
    events except step summaries, which `GET .../steps` returns."""
    ctx.notifier.require_capacity()  # a refusal reads nothing of the store
    cursor = await _start(ctx, job, last_event_id, replay=replay)
    return _EventStream(ctx, job, cursor)


class _EventStream(StreamingResponse):
    """The events of a job from a cursor on; counted as a watcher from its start to its end.

    Others may have taken the last places since the request came: the stream is refused before its
    head is sent, while the answer can still be an error.
    """

    def __init__(self, ctx: AppContext, job: str, cursor: EventCursor) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        events = _stream(ctx, job, cursor)
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._notifier = ctx.notifier

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._notifier.watching():
            await super().__call__(scope, receive, send)


async def _start(ctx: AppContext, job: str, last: str | None, *, replay: bool) -> EventCursor:
    resumed = None if last is None else _cursor(last)
    newest = await ctx.watched.newest(job)
    if resumed is not None:
        return resumed
    return EventCursor(step=newest.step) if replay else newest


def _cursor(text: str) -> EventCursor:
    """The cursor in `Last-Event-ID`. Raises `ContractError`."""
    match = _CURSOR.fullmatch(text)
    if match is None:
        raise ContractError("Last-Event-ID", "is not an id of this event stream")
    return EventCursor(match[1], match[2])


@dataclass(frozen=True)
class _Page:
    """Events as they are sent, and the cursor after them; empty at the end."""

    cursor: EventCursor
    text: bytes


async def _stream(ctx: AppContext, job: str, cursor: EventCursor) -> AsyncIterator[bytes]:
    yield f"retry: 1000\nid: {'_'.join(cursor)}\n\n".encode()
    sent_s = time.monotonic()
    try:
        async for page in _pages(ctx, job, cursor):
            if page.text or time.monotonic() - sent_s > _KEEPALIVE_S:
                yield page.text or b": keepalive\n\n"
                sent_s = time.monotonic()
    except UnknownJobError:
        yield b'event: deleted\ndata: {"kind":"deleted"}\n\n'
    except redis.RedisError as error:  # the client comes back with its cursor
        log.warning("event stream ended", job=job, error=str(error))


async def _pages(ctx: AppContext, job: str, cursor: EventCursor) -> AsyncIterator[_Page]:
    change = ctx.notifier.next_change(NEWS, job)
    page = await _read(ctx.watched, job, cursor)
    while not ctx.notifier.closed:
        yield page
        if not page.text:
            await ctx.notifier.wait(change)
        change = ctx.notifier.next_change(NEWS, job)
        page = await change.read(page.cursor, partial(_read, ctx.watched, job, page.cursor))


async def _read(store: HttpStore, job: str, cursor: EventCursor) -> _Page:
    messages = []
    news = await store.news(job, cursor)
    for after, document in news:
        head = f"event: {document['kind']}\nid: {'_'.join(after)}"
        messages.append(f"{head}\ndata: {dumps(document)}\n\n")
    return _Page(news[-1][0] if news else cursor, "".join(messages).encode())
