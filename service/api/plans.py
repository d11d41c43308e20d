"""Routes: plans by long poll, what the ranks made of them, and plans of the job's own."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from resihp.contracts import ContractError

from ..errors import PlanMismatchError
from ..store.documents import MessageKind, dumps, plan_from_json
from . import bodies
from .context import AppContext, Ctx

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
        with ctx.notifier.watching():
            version = await _newer(ctx, job, after, min(wait, ctx.settings.max_wait_s))
    if version is None:
        return Response(status_code=204)
    return Response(dumps(await ctx.store.plan(job, version)), media_type="application/json")


async def _newer(ctx: AppContext, job: str, after: int, wait_s: float) -> int | None:
    deadline_s = time.monotonic() + wait_s
    while True:
        news = ctx.notifier.next(job)
        version = await ctx.store.require(job)
        if version > after:
            return version
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or ctx.notifier.closed:
            return None
        await ctx.notifier.wait(news, left_s)


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
    known = await ctx.store.digest(job, version)
    if ack.digest is not None and ack.digest != (known or ack.digest):
        raise PlanMismatchError(job, version)
    document = {"version": version, **ack.model_dump(exclude={"digest"})}
    await ctx.store.put(job, MessageKind.ACK, dumps(document).encode())
    return {"accepted": True}


@router.put("/{version}", status_code=202, openapi_extra=bodies.documented(bodies.OwnPlan))
async def put_own(job: str, version: int, request: Request, ctx: Ctx) -> dict[str, Any]:
    """The plan that all ranks work by, which the job made while the sidecar was away."""
    told = await bodies.read(request, bodies.OwnPlan)
    known, plan = await ctx.store.job(job), plan_from_json(told.plan)
    if plan.version != version:
        raise ContractError("plan.version", f"is {plan.version}, and {version} in the path")
    if plan.microbatches != known.microbatches:
        raise ContractError("plan.quotas", f"must sum to the job's {known.microbatches}")
    if plan.layout.layers != known.layout.layers:
        raise ContractError("plan.layout", f"must have the job's {known.layout.layers} layers")
    await ctx.store.put(job, MessageKind.OWN_PLAN, dumps(told.model_dump()).encode())
    return {"accepted": True}
