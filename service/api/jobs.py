"""Routes: jobs, their failures, joiners and probes, verdicts and diagnosis."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from operator import itemgetter
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query, Request, Response

from resihp.contracts import ContractError, Plan, to_json

from ..errors import BrokenJobError
from ..store.documents import VERDICTS, MessageKind, dumps, joined
from . import bodies
from .conditional import CONDITIONAL, Known
from .context import Ctx
from .ingest import retry_key

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

_Item = TypeVar("_Item")

_NO_DIAGNOSIS = {
    "slowdown": 1.0, "root_cause": "none", "attribution": {}, "steps": 0, "detail": [],
}  # fmt: skip


def _page(
    found: list[_Item], limit: int | None, place: Callable[[_Item], str | int]
) -> tuple[list[_Item], dict[str, str]]:
    """The first `limit` of what was found, and the field `next`, the `place` of the last of them,
    if there are more."""
    page = found[:limit]
    return page, {"next": dumps(place(page[-1]))} if len(page) < len(found) else {}


@router.put("/{job}", openapi_extra=bodies.documented_job())
async def register(job: str, request: Request, ctx: Ctx) -> Response:
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
    is_new = await ctx.store.register(description, first)
    return Response(
        joined(job=dumps(to_json(description)), plan=await ctx.store.newest_plan(job)),
        status_code=201 if is_new else 200,
        media_type="application/json",
    )


@router.get("", **CONDITIONAL)
async def list_jobs(
    ctx: Ctx,
    known: Known,
    after: Annotated[str, Query(max_length=256)] = "",
    limit: Annotated[int | None, Query(ge=1, le=1_000)] = None,
) -> Response:
    """All jobs with their newest step, number of devices by verdict, and plan, by name. With
    `limit` so many whose names are above `after`; `next` is the `after` of the next page, if there
    is one."""
    names = [name for name in await ctx.store.names() if name > after]
    page, more = _page(names, limit, str)
    summaries = [
        joined(
            name=dumps(name),
            last_step=status["last_step"] or "-1",
            devices=status["devices"] or "{}",
            rollout=status["rollout"],
        )
        for name, status in zip(
            page, await ctx.store.statuses(page, "last_step", "devices", "rollout"), strict=True
        )
    ]
    content = joined(jobs=b"[%s]" % b",".join(summaries), **more)

    async def made() -> bytes:
        return content

    return await known.answer(hashlib.sha256(content).hexdigest()[:32], made)


@router.get("/{job}", **CONDITIONAL)
async def get_job(job: str, ctx: Ctx, known: Known) -> Response:
    """A job, its newest plan, the roll-out of that plan, and how far the service is behind it:
    messages in no saved state, age of the oldest that no worker has read, messages refused and
    records dropped by senders; and the `error` for which no worker works on it, or null."""
    tag = await ctx.store.tag(job, "plans", "planning", "rollout", "last_step", "error")
    (counts,), (lag_s,) = await ctx.store.counts(job), await ctx.lags.of(job)
    if counts is None:
        raise BrokenJobError(job, "its messages or counters are something else")
    progress = {
        "backlog": counts["backlog"],
        "lag_s": lag_s,
        "refused": counts.get("refused", 0),
        "dropped": counts.get("dropped", 0),
    }

    async def content() -> bytes:
        planning, rollout, last_step, error = await ctx.store.status(
            job, "planning", "rollout", "last_step", "error"
        )
        return joined(
            job=await ctx.store.description(job),
            plan=await ctx.store.newest_plan(job),
            planning=planning or '{"state":"idle"}',
            rollout=rollout,
            last_step=last_step or "-1",
            error=error,
            **{name: dumps(value) for name, value in progress.items()},
        )

    return await known.answer("-".join([tag, *map(str, progress.values())]), content)


@router.delete("/{job}", status_code=204)
async def delete_job(job: str, ctx: Ctx) -> Response:
    """Delete a job with all its data."""
    await ctx.store.delete(job)
    return Response(status_code=204)


@router.post("/{job}/failures", **bodies.accepts(bodies.FailureBody, once=True))
async def post_failure(job: str, request: Request, ctx: Ctx) -> dict[str, Any]:
    """Stopped ranks, reported by a survivor. A plan without them follows at once."""
    failure = await bodies.read(request, bodies.FailureBody)
    body = failure.model_dump_json().encode()
    stored = await ctx.store.put(job, MessageKind.FAILURE, body, retry_key=retry_key(request))
    return {"accepted": len(failure.ranks), "duplicate": not stored.is_new}


@router.post("/{job}/joiners", **bodies.accepts(bodies.JoinersBody, once=True))
async def post_joiners(job: str, request: Request, ctx: Ctx) -> dict[str, Any]:
    """Ranks that are ready to work. A plan with them follows if it is worth its migration."""
    joiners = await bodies.read(request, bodies.JoinersBody)
    body = joiners.model_dump_json().encode()
    stored = await ctx.store.put(job, MessageKind.JOINER, body, retry_key=retry_key(request))
    return {"accepted": len(joiners.ranks), "duplicate": not stored.is_new}


@router.post("/{job}/probes/{probe}", **bodies.accepts(bodies.ProbeAnswerBody))
async def post_probe(job: str, probe: str, request: Request, ctx: Ctx) -> dict[str, Any]:
    """Result of a probe that an answer to telemetry requested. Unknown probes are ignored."""
    answer = await bodies.read(request, bodies.ProbeAnswerBody)
    document = {"probe": probe[:64], **answer.model_dump()}
    await ctx.store.put(job, MessageKind.PROBE, json.dumps(document).encode())
    return {"accepted": answer.ms is not None}


@router.get("/{job}/verdicts", **CONDITIONAL)
async def get_verdicts(
    job: str,
    ctx: Ctx,
    known: Known,
    after: Annotated[int, Query(ge=-1)] = -1,
    limit: Annotated[int | None, Query(ge=1, le=131_072)] = None,
) -> Response:
    """The verdict on each device, by rank. With `limit` so many on ranks above `after`; `next` is
    the `after` of the next page, if there is one."""
    tag = await ctx.store.tag(job, *VERDICTS)

    async def content() -> bytes:
        # One more than asked for tells whether there is another page.
        found = await ctx.store.verdicts(job, after=after, limit=limit and limit + 1)
        page, more = _page(found, limit, itemgetter(0))
        verdicts = ",".join(text for _, text in page)
        return joined(job=dumps(job), verdicts=f"[{verdicts}]", **more)

    return await known.answer(tag, content)


@router.get("/{job}/links", **CONDITIONAL)
async def get_links(
    job: str,
    ctx: Ctx,
    known: Known,
    after: Annotated[int, Query(ge=0)] = 0,
    limit: Annotated[int | None, Query(ge=1, le=131_072)] = None,
) -> Response:
    """The verdicts on links and groups that are slow or suspected, by rank, and how many of those
    that are compared have each status. With `limit` so many after the first `after` of them; `next`
    is the `after` of the next page, if there is one."""
    tag = await ctx.store.tag(job, "links", "link_counts")

    async def content() -> bytes:
        links, counts = await ctx.store.status(job, "links", "link_counts")
        numbered = list(enumerate(json.loads(links or "[]"), 1))
        page, more = _page(numbered[after:], limit, itemgetter(0))
        found = dumps([link for _, link in page])
        return joined(job=dumps(job), links=found, counts=counts or "{}", **more)

    return await known.answer(tag, content)


@router.get("/{job}/diagnosis", **CONDITIONAL)
async def get_diagnosis(job: str, ctx: Ctx, known: Known) -> Response:
    """Causes of the job's slowdown, with their shares of the lost time."""
    tag = await ctx.store.tag(job, "diagnosis")

    async def content() -> bytes:
        (diagnosis,) = await ctx.store.status(job, "diagnosis")
        return diagnosis or dumps(_NO_DIAGNOSIS).encode()

    return await known.answer(tag, content)


@router.get("/{job}/advice", **CONDITIONAL)
async def get_advice(job: str, ctx: Ctx, known: Known) -> Response:
    """Ranks to leave out of a job that cannot do so by itself, and the gain; null if none."""
    tag = await ctx.store.tag(job, "planning")

    async def content() -> bytes:
        (planning,) = await ctx.store.status(job, "planning")
        advice = json.loads(planning or "{}").get("advice")
        return joined(job=dumps(job), advice=dumps(advice))

    return await known.answer(tag, content)


@router.get("/{job}/reactions", **CONDITIONAL)
async def get_reactions(job: str, ctx: Ctx, known: Known) -> Response:
    """The newest faults that plans account for, oldest first: step and time of onset, verdict, plan
    and its application by all ranks, and the seconds between them."""
    tag = await ctx.store.tag(job, "reactions")

    async def content() -> bytes:
        (reactions,) = await ctx.store.status(job, "reactions")
        return joined(job=dumps(job), reactions=reactions or "[]")

    return await known.answer(tag, content)


@router.get("/{job}/steps", **CONDITIONAL)
async def get_steps(
    job: str,
    ctx: Ctx,
    known: Known,
    after: Annotated[int, Query(ge=-1)] = -1,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1_000,
) -> Response:
    """Times of the newest steps above `after`, oldest first: observed, predicted for the plan, and
    expected by the step's own work, with the devices known to be slow and if all were healthy."""
    tag = await ctx.store.tag(job, "steps")

    async def content() -> bytes:
        steps = await ctx.store.steps(job, after=after, limit=limit)
        return joined(job=dumps(job), steps=dumps(steps))

    return await known.answer(tag, content)
