"""Routes: plans by long poll, and what the ranks made of them."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from ..store.api import dumps
from ..store.inbox import Kind
from . import bodies
from .context import Context, Ctx

router = APIRouter(prefix="/v1/jobs/{job}/plan", tags=["plans"])


@router.get("", responses={204: {"description": "no newer plan"}})
async def get_plan(
    job: str,
    ctx: Ctx,
    after: Annotated[int | None, Query(ge=-1)] = None,
    wait: Annotated[float, Query(ge=0)] = 0.0,
) -> Response:
    """The newest plan; with `after`, only one of a higher version, waiting up to `wait` seconds
    for it (204 if none came)."""
    if after is None:
        version: int | None = await ctx.store.require(job)
    else:
        with ctx.bell.watching():
            version = await _newer(ctx, job, after, min(wait, ctx.settings.max_wait_s))
    if version is None:
        return Response(status_code=204)
    return Response(dumps(await ctx.store.plan(job, version)), media_type="application/json")


async def _newer(ctx: Context, job: str, after: int, wait_s: float) -> int | None:
    deadline_s = time.monotonic() + wait_s
    while True:
        news = ctx.bell.next(job)
        version = await ctx.store.require(job)
        if version > after:
            return version
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or ctx.bell.closed:
            return None
        await ctx.bell.wait(news, left_s)


@router.get("/{version}")
async def get_version(job: str, version: int, ctx: Ctx) -> dict[str, Any]:
    """A plan by its version."""
    await ctx.store.require(job)
    return await ctx.store.plan(job, version)


@router.post("/{version}/ack", status_code=202, openapi_extra=bodies.documented(bodies.Ack))
async def post_ack(job: str, version: int, request: Request, ctx: Ctx) -> dict[str, Any]:
    """One rank took a plan on, or refused it."""
    ack = await bodies.read(request, bodies.Ack)
    await ctx.store.require(job)
    await ctx.store.plan(job, version)
    document = {"version": version, **ack.model_dump()}
    await ctx.store.put(job, Kind.ACK, dumps(document).encode())
    return {"accepted": True}
