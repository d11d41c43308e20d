"""Routes: jobs, their telemetry, heartbeats and failures, verdicts and diagnosis."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Depends, Header, Query, Request, Response

from resihp.contracts import ContractError, Plan, to_json

from ..store.documents import MessageKind
from . import bodies
from .context import AppContext, Ctx
from .lag import sending_interval_s

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


def _retry_key(
    idempotency_key: Annotated[str | None, Header(max_length=256)] = None,
) -> str | None:
    return hashlib.sha256(idempotency_key.encode()).hexdigest()[:32] if idempotency_key else None


RetryKey = Annotated[str | None, Depends(_retry_key)]


@router.put("/{job}", openapi_extra=bodies.documented_job())
async def register(job: str, request: Request, response: Response, ctx: Ctx) -> dict[str, Any]:
    """Register a job. Equal content changes nothing; other content resets the job."""
    description = await bodies.read_job(request, job)
    if description.name != job:
        raise ContractError("name", f"is {description.name!r}, the address says {job!r}")
    first = Plan(
        version=0,
        layout=description.layout,
        quotas=description.quotas,
        schedule=description.schedule,
        reason=("the layout that the job was registered with",),
    )
    response.status_code = 201 if await ctx.store.register(description, first) else 200
    plan = await ctx.store.plan(job, await ctx.store.require(job))
    return {"job": to_json(description), "plan": plan}


@router.get("")
async def list_jobs(ctx: Ctx) -> dict[str, Any]:
    """All jobs with their newest step, number of devices by verdict, and plan."""
    return {"jobs": [await _summary(ctx, name) for name in await ctx.store.names()]}


async def _summary(ctx: AppContext, name: str) -> dict[str, Any]:
    status = await ctx.store.status(name)
    return {
        "name": name,
        "last_step": status.get("last_step", -1),
        "devices": status.get("devices", {}),
        "rollout": status.get("rollout"),
    }


@router.get("/{job}")
async def get_job(job: str, ctx: Ctx) -> dict[str, Any]:
    """A job, its newest plan, the roll-out of that plan, and how far its worker is behind: messages
    in no saved state, age of the oldest that no worker has read, messages refused and records
    dropped by senders."""
    description = await ctx.store.job(job)
    status, counts = await ctx.store.status(job), await ctx.store.counts(job)
    (lag_s,) = await ctx.lags.of(job)
    return {
        "job": to_json(description),
        "plan": await ctx.store.plan(job, await ctx.store.require(job)),
        "planning": status.get("planning", {"state": "idle"}),
        "rollout": status.get("rollout"),
        "last_step": status.get("last_step", -1),
        "backlog": await ctx.store.backlog(job),
        "lag_s": lag_s,
        "refused": counts.get("refused", 0),
        "dropped": counts.get("dropped", 0),
    }


@router.delete("/{job}", status_code=204)
async def delete_job(job: str, ctx: Ctx) -> Response:
    """Delete a job with all its data."""
    await ctx.store.delete(job)
    return Response(status_code=204)


@router.post("/{job}/telemetry", status_code=202, openapi_extra=bodies.documented_telemetry())
async def post_telemetry(job: str, request: Request, ctx: Ctx, key: RetryKey) -> dict[str, Any]:
    """Microbatch records as columns, in JSON or msgpack. A retry under the same
    `Idempotency-Key` is applied once. The answer lists the `probes` that ranks in it should run, if
    any: `{"id", "kind", "peer", "rank"}`, and while the job's worker is behind `interval_s`: the
    seconds that the sender should leave between two messages."""
    batch, body = await bodies.read_telemetry(request, ctx.settings.max_records)
    new = await ctx.store.put(
        job, MessageKind.TELEMETRY, body,
        records=len(batch), dropped=batch.dropped, retry_key=key,
    )  # fmt: skip
    answer: dict[str, Any] = {"accepted": len(batch), "duplicate": not new}
    if wanted := await ctx.store.probes(job):
        ranks = np.intersect1d(batch.rank, [int(rank) for rank in wanted]).tolist()
        probes = [{**probe, "rank": rank} for rank in ranks for probe in wanted[str(rank)]]
        answer |= {"probes": probes} if probes else {}
    (lag_s,) = await ctx.lags.of(job)
    if interval_s := sending_interval_s(lag_s, ctx.settings.slow_down_lag_s):
        answer["interval_s"] = interval_s
    return answer


@router.post("/{job}/heartbeats", **bodies.accepts_heartbeats())
async def post_heartbeat(job: str, request: Request, ctx: Ctx) -> dict[str, Any]:
    """Report that these ranks are alive, or with `left` that their process ends. A rank that has
    sent heartbeats and falls silent has stopped; its telemetry counts as heartbeats too. With
    `stack` true in the answer, the next heartbeat is to have the stack of the training thread. A
    list of heartbeats, as of the ranks of one host, is answered with the `stacks` asked for: the
    ranks."""
    body = await bodies.read_heartbeats(request)
    heartbeats = body.root if isinstance(body, bodies.HeartbeatList) else [body]
    documents = [heartbeat.model_dump(exclude_defaults=True) for heartbeat in heartbeats]
    ranks = {rank for heartbeat in heartbeats for rank in heartbeat.ranks}
    asked = await ctx.heartbeats.add(job, documents) & ranks
    answer: dict[str, Any] = {"accepted": len(ranks)}
    if isinstance(body, bodies.HeartbeatList):
        return {**answer, "stacks": sorted(asked)} if asked else answer
    return {**answer, "stack": True} if asked else answer


@router.post("/{job}/failures", **bodies.accepts(bodies.FailureBody))
async def post_failure(job: str, request: Request, ctx: Ctx, key: RetryKey) -> dict[str, Any]:
    """Stopped ranks, reported by a survivor. A plan without them follows at once."""
    failure = await bodies.read(request, bodies.FailureBody)
    body = failure.model_dump_json().encode()
    await ctx.store.put(job, MessageKind.FAILURE, body, retry_key=key)
    return {"accepted": len(failure.ranks)}


@router.post("/{job}/joiners", **bodies.accepts(bodies.JoinersBody))
async def post_joiners(job: str, request: Request, ctx: Ctx, key: RetryKey) -> dict[str, Any]:
    """Ranks that are ready to work. A plan with them follows if it is worth its migration."""
    joiners = await bodies.read(request, bodies.JoinersBody)
    body = joiners.model_dump_json().encode()
    await ctx.store.put(job, MessageKind.JOINER, body, retry_key=key)
    return {"accepted": len(joiners.ranks)}


@router.post("/{job}/probes/{probe}", **bodies.accepts(bodies.ProbeAnswerBody))
async def post_probe(job: str, probe: str, request: Request, ctx: Ctx) -> dict[str, Any]:
    """Result of a probe that an answer to telemetry requested. Unknown probes are ignored."""
    answer = await bodies.read(request, bodies.ProbeAnswerBody)
    document = {"probe": probe[:64], **answer.model_dump()}
    await ctx.store.put(job, MessageKind.PROBE, json.dumps(document).encode())
    return {"accepted": answer.ms is not None}


@router.get("/{job}/verdicts")
async def get_verdicts(job: str, ctx: Ctx) -> dict[str, Any]:
    """The verdict on each device."""
    await ctx.store.require(job)
    return {"job": job, "verdicts": await ctx.store.verdicts(job)}


@router.get("/{job}/diagnosis")
async def get_diagnosis(job: str, ctx: Ctx) -> dict[str, Any]:
    """Causes of the job's slowdown, with their shares of the lost time."""
    await ctx.store.require(job)
    nothing = {"slowdown": 1.0, "root_cause": "none", "attribution": {}, "steps": 0, "detail": []}
    diagnosis: dict[str, Any] = (await ctx.store.status(job)).get("diagnosis", nothing)
    return diagnosis


@router.get("/{job}/steps")
async def get_steps(
    job: str,
    ctx: Ctx,
    after: Annotated[int, Query(ge=-1)] = -1,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1_000,
) -> dict[str, Any]:
    """Observed and predicted times of the newest steps above `after`, oldest first."""
    await ctx.store.require(job)
    return {"job": job, "steps": await ctx.store.steps(job, after=after, limit=limit)}
