"""Route: server-sent events of a job."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header
from fastapi.responses import StreamingResponse

from resihp.contracts import ContractError

from ..errors import UnknownJobError
from ..store.documents import dumps
from .context import AppContext, Ctx

router = APIRouter(prefix="/v1/jobs/{job}/events", tags=["events"])

_CURSOR = re.compile(r"(\d+-\d+)_(\d+-\d+)")


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
    ctx.notifier.require_capacity()  # before the response starts, while it can be an error
    await ctx.store.require(job)
    cursor = await _start(ctx, job, last_event_id, replay=replay)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(
        _stream(ctx, job, cursor), media_type="text/event-stream", headers=headers
    )


async def _start(ctx: AppContext, job: str, last: str | None, *, replay: bool) -> tuple[str, str]:
    """First cursor: a stream id for the events and one for the step summaries."""
    if last is not None:
        match = _CURSOR.fullmatch(last)
        if match is None:
            raise ContractError("Last-Event-ID", "is not an id of this event stream")
        return match[1], match[2]
    start = "0-0" if replay else await ctx.store.last_event(job)
    return start, await ctx.store.last_event(job, steps=True)


async def _stream(ctx: AppContext, job: str, cursor: tuple[str, str]) -> AsyncIterator[str]:
    yield f"retry: 1000\nid: {'_'.join(cursor)}\n\n"
    with ctx.notifier.watching():
        while not ctx.notifier.closed:
            change = ctx.notifier.next_change(job)
            try:
                await ctx.store.require(job)
            except UnknownJobError:
                yield 'event: deleted\ndata: {"kind":"deleted"}\n\n'
                return
            before = cursor
            async for after, message in _new(ctx, job, before):
                cursor = after
                yield message
            if cursor == before:
                await ctx.notifier.wait(change, ctx.notifier.RECHECK_S)
                yield ": keepalive\n\n"


async def _new(
    ctx: AppContext, job: str, cursor: tuple[str, str]
) -> AsyncIterator[tuple[tuple[str, str], str]]:
    """Events after a cursor as (cursor after the event, message)."""
    for steps in (False, True):
        for identity, document in await ctx.store.events(job, cursor[steps], steps=steps):
            cursor = (cursor[0], identity) if steps else (identity, cursor[1])
            head = f"event: {document['kind']}\nid: {'_'.join(cursor)}"
            yield cursor, f"{head}\ndata: {dumps(document)}\n\n"
