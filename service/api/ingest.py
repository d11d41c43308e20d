"""Routes of what every rank sends all the time: telemetry and heartbeats."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send

from resihp.contracts import ContractError

from ..store.documents import MessageKind, loads
from . import bodies
from .context import Ctx

_LONGEST_KEY = 256


class IngestRoute(APIRoute):
    """A route whose endpoint gets the name of the job, the request and the context, and returns a
    JSON document. What else the framework does for a route costs more than these endpoints."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; its errors go to the handlers of the app."""
        if scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)
            return
        request, context = Request(scope, receive, send), scope["app"].state.context
        await request.body()  # from now on it waits for the service
        document = await self.endpoint(scope["path_params"]["job"], request, context)
        body = json.dumps(document, separators=(",", ":")).encode()
        await Response(body, 202, media_type="application/json")(scope, receive, send)


router = APIRouter(prefix="/v1/jobs", tags=["jobs"], route_class=IngestRoute)


@router.post("/{job}/telemetry", status_code=202, openapi_extra=bodies.documented_telemetry())
async def post_telemetry(job: str, request: Request, ctx: Ctx) -> dict[str, Any]:
    """Microbatch records as columns, in JSON or msgpack. A retry under the same
    `Idempotency-Key` is applied once. The answer lists the `probes` that ranks in it should run, if
    any: `{"id", "kind", "rank"}`, and while the job's worker or the API is behind
    `interval_s`: the seconds that the sender should leave between two messages."""
    key = retry_key(request)
    async with ctx.turns:
        batch, body = await bodies.read_telemetry(request, ctx.settings.max_records)
        stored = await ctx.store.put(
            job, MessageKind.TELEMETRY, body,
            records=len(batch), dropped=batch.dropped, retry_key=key, status="probes",
        )  # fmt: skip
    answer: dict[str, Any] = {"accepted": len(batch), "duplicate": not stored.is_new}
    if wanted := loads(stored.status or b"{}"):
        ranks = np.intersect1d(batch.rank, [int(rank) for rank in wanted]).tolist()
        probes = [{**probe, "rank": rank} for rank in ranks for probe in wanted[str(rank)]]
        answer |= {"probes": probes} if probes else {}
    if interval_s := await ctx.lags.sending_interval_s(job):
        answer["interval_s"] = interval_s
    return answer


@router.post("/{job}/heartbeats", **bodies.accepts_heartbeats())
async def post_heartbeat(job: str, request: Request, ctx: Ctx) -> dict[str, Any]:
    """Report that these ranks are alive, or with `left` that their process ends. A rank that has
    sent heartbeats and falls silent has stopped; its telemetry counts as heartbeats too. With
    `stack` true in the answer, the next heartbeat is to have the stack of the training thread. A
    list of heartbeats, as of the ranks of one host, is answered with the `stacks` asked for: the
    ranks."""
    async with ctx.turns:
        body = await bodies.read_heartbeats(request)
        await asyncio.sleep(0)  # else all that wait would have their turns at once
    document = (await request.body()).strip()
    if not isinstance(body, list):
        asked = await ctx.heartbeats.add(job, document, 1) & set(body["ranks"])
        return {"accepted": len(set(body["ranks"]))} | ({"stack": True} if asked else {})
    ranks = {rank for heartbeat in body for rank in heartbeat["ranks"]}
    asked = await ctx.heartbeats.add(job, document[1:-1], len(body)) & ranks
    return {"accepted": len(ranks)} | ({"stacks": sorted(asked)} if asked else {})


def retry_key(request: Request) -> str | None:
    """The key under which a message is recognised when it comes again to the same route; None
    without one. Raises `ContractError`."""
    key = request.headers.get("idempotency-key")
    if not key:
        return None
    if len(key) > _LONGEST_KEY:
        raise ContractError("idempotency-key", f"has more than {_LONGEST_KEY} characters")
    return hashlib.sha256(f"{request.url.path}\0{key}".encode()).hexdigest()[:32]
