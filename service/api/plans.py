"""Routes: plans by long poll, their acknowledgements, and plans made by the job itself."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Path, Query, Request, Response

from resihp.contracts import ContractError

from ..errors import FirstPlanError, PlanMismatchError
from ..store.documents import MessageKind, dumps, plan_from_json
from ..store.schema import PLANS
from . import bodies
from .conditional import CONDITIONAL, Known
from .context import AppContext, Ctx

router = APIRouter(prefix="/v1/jobs/{job}/plan", tags=["plans"])


Version = Annotated[int, Path(ge=0, lt=2**31)]
_MOST_AHEAD = 1_000_000  # versions that a job may have made by itself since the newest one

_MOST_REASONS, _MOST_CHARACTERS = 1_024, 65_536  # of a plan of the job's own: events hold them
_T = TypeVar("_T")
_NO_PLAN = {204: {"description": "no newer plan"}}


@router.get("", **{**CONDITIONAL, "responses": CONDITIONAL["responses"] | _NO_PLAN})
async def get_plan(
    job: str,
    request: Request,
    ctx: Ctx,
    known: Known,
    after: Annotated[int | None, Query(ge=-1, lt=2**31)] = None,
    wait: Annotated[float, Query(ge=0, allow_inf_nan=False)] = 0.0,
) -> Response:
    """The newest plan. With `after`, only a plan of a higher version; the request waits for it, at
    most `wait` seconds, and answers 204 without one."""
    if after is None:
        tag = await ctx.store.tag(job, "plans")
        return await known.answer(tag, partial(ctx.store.plan, job, await ctx.store.require(job)))
    with ctx.notifier.watching():
        newer = _newer(ctx, job, after, min(wait, ctx.settings.max_wait_s))
        plan = await _unless_gone(request, newer)
    if plan is None:
        return Response(status_code=204)
    return Response(plan, media_type="application/json")


async def _unless_gone(request: Request, work: Coroutine[Any, Any, _T]) -> _T | None:
    """Result of `work`; None once the client has gone."""
    tasks = asyncio.create_task(work), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _newer(ctx: AppContext, job: str, after: int, wait_s: float) -> bytes | None:
    deadline_s = time.monotonic() + wait_s

    def read() -> Coroutine[Any, Any, bytes | None]:
        return ctx.watched.newest_plan(job, after=after)

    await ctx.watched.require(job)  # else the notifier kept any name that is asked for
    change = ctx.notifier.next_change(PLANS, job)
    plan = await read()
    while plan is None and not ctx.notifier.closed:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            break
        await ctx.notifier.wait(change, left_s)
        change = ctx.notifier.next_change(PLANS, job)
        plan = await change.read(after, read)
    return plan


@router.get("/{version}", **CONDITIONAL)
async def get_version(job: str, version: Version, ctx: Ctx, known: Known) -> Response:
    """A plan by its version."""
    tag = await ctx.store.tag(job, "plans")
    return await known.answer(tag, partial(ctx.store.plan, job, version))


@router.post("/{version}/ack", **bodies.accepts(bodies.AckBody))
async def post_ack(job: str, version: Version, request: Request, ctx: Ctx) -> dict[str, Any]:
    """Answer of one rank to a plan: applied or refused."""
    ack = await bodies.read(request, bodies.AckBody)
    await ctx.store.require(job)
    known = await ctx.store.digest(job, version)
    if ack.digest is not None and ack.digest != (known or ack.digest):
        raise PlanMismatchError(job, version)
    document = {"version": version, **ack.model_dump(exclude={"digest"})}
    await ctx.store.put(job, MessageKind.ACK, dumps(document).encode())
    return {"accepted": True}


@router.put("/{version}", **bodies.accepts(bodies.OwnPlanBody))
async def put_own(job: str, version: Version, request: Request, ctx: Ctx) -> dict[str, Any]:
    """Register a plan that the job made while the sidecar was unavailable and that all ranks work
    under. Plan 0 is that of the registration: the same changes nothing, and another gets 409."""
    own = await bodies.read(request, bodies.OwnPlanBody)
    plan = await bodies.off_loop(request, lambda: plan_from_json(own.plan, "plan"))
    known = await ctx.store.job(job)
    if plan.version != version:
        raise ContractError("plan.version", f"is {plan.version}, and {version} in the path")
    if version > (most := await ctx.store.require(job) + _MOST_AHEAD):
        raise ContractError(
            "plan.version", f"must be at most {most}, {_MOST_AHEAD:,} above the newest"
        )
    if plan.microbatches != known.microbatches:
        raise ContractError("plan.quotas", f"must sum to the job's {known.microbatches}")
    if plan.layout.layers != known.layout.layers:
        raise ContractError("plan.layout", f"must have the job's {known.layout.layers} layers")
    if len(plan.reason) > _MOST_REASONS or sum(map(len, plan.reason)) > _MOST_CHARACTERS:
        limits = f"{_MOST_REASONS} reasons, of {_MOST_CHARACTERS} characters together"
        raise ContractError("plan.reason", f"must hold at most {limits}")
    if version == 0:
        if plan.digest != plan_from_json(json.loads(await ctx.store.plan(job, 0))).digest:
            raise FirstPlanError(job)
        return {"accepted": True}
    await ctx.store.put(job, MessageKind.OWN_PLAN, dumps(own.model_dump()).encode())
    return {"accepted": True}
