"""Errors as problem documents (RFC 9457): one table from exceptions to HTTP statuses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from http import HTTPStatus
from typing import Any

import redis
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Message, Send

from resihp.contracts import ContractError, InfeasibleError

from .. import errors
from ..logs import logger
from ..store.faults import store_fault

log = logger("resihp.api")

MEDIA_TYPE = "application/problem+json"
_RETRY, _IDENTITY = {"Retry-After": "1"}, {"Accept-Encoding": "identity"}

# Exception -> status, name of the problem, headers.
PROBLEMS: dict[type[Exception], tuple[int, str, Mapping[str, str]]] = {
    ContractError: (422, "invalid-content", {}),
    RequestValidationError: (422, "invalid-content", {}),
    InfeasibleError: (409, "no-feasible-plan", {}),
    errors.UnknownJobError: (404, "unknown-job", {}),
    errors.BrokenJobError: (500, "broken-job", {}),
    errors.UnknownPlanError: (404, "unknown-plan", {}),
    errors.PlanMismatchError: (409, "another-plan", {}),
    errors.FirstPlanError: (409, "another-plan", {}),
    errors.BodyTooLargeError: (413, "body-too-large", {}),
    errors.SlowRequestError: (408, "slow-request", {"Connection": "close"}),
    ClientDisconnect: (400, "incomplete-request", {}),  # only for the log
    errors.ContentEncodingError: (415, "unsupported-content-encoding", _IDENTITY),
    errors.MediaTypeError: (415, "unsupported-media-type", {}),
    errors.TooManyJobsError: (429, "too-many-jobs", _RETRY),
    errors.TooManyWatchersError: (429, "too-many-watchers", _RETRY),
    errors.BacklogFullError: (429, "backlog-full", _RETRY),
}


def problem(
    status: int, name: str, detail: str, headers: Mapping[str, str] | None = None, **more: Any
) -> Response:
    """A problem document. `more` adds members, such as the invalid fields."""
    document = {
        "type": f"urn:resihp:problem:{name}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        **more,
    }
    return Response(json.dumps(document), status, dict(headers or {}), MEDIA_TYPE)


async def send_problem(send: Send, response: Response) -> None:
    """Send a response from middleware, before any of the request was read."""

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    await response({"type": "http"}, receive, send)


def add_problem_handlers(app: FastAPI) -> None:
    """Register handlers for the table, for HTTP errors and for unexpected exceptions."""
    for kind in PROBLEMS:
        app.add_exception_handler(kind, _known)
    app.add_exception_handler(redis.RedisError, _store)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _unexpected)


async def _known(request: Request, error: Exception) -> Response:
    kind = next(base for base in type(error).__mro__ if base in PROBLEMS)
    status, name, headers = PROBLEMS[kind]
    if isinstance(error, RequestValidationError):
        return _invalid(error)
    if isinstance(error, ContractError):
        fields = [{"field": error.field, "problem": error.problem}]
        return problem(status, name, str(error), headers, errors=fields)
    return problem(status, name, str(error), headers)


async def _store(request: Request, error: Exception) -> Response:
    assert isinstance(error, redis.RedisError)
    detail = store_fault(error)
    job = request.path_params.get("job")
    if detail is None and job is not None:
        _note_broken(job, str(error))
        return await _known(request, errors.BrokenJobError(job, str(error)))
    if detail is None:
        return await _unexpected(request, error)
    log.warning("store unavailable", path=request.url.path, reason=detail, error=str(error))
    return problem(503, "store-unavailable", f"{detail}; retry", _RETRY)


@lru_cache(maxsize=1_024)
def _note_broken(job: str, error: str) -> None:
    """Log an error of a job's data once, whatever the requests."""
    log.error("data of a job cannot be used", job=job, error=error)


def _invalid(error: RequestValidationError) -> Response:
    """Validation errors of the framework with dotted paths of the fields."""
    fields = []
    for item in error.errors():
        path = [str(part) for part in item["loc"]]
        field = ".".join(path[1:]) if path[0] == "body" and len(path) > 1 else ".".join(path)
        fields.append({"field": field, "problem": item["msg"]})
    detail = "; ".join(f"{item['field']}: {item['problem']}" for item in fields[:3])
    return problem(422, "invalid-content", detail, errors=fields)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    name = HTTPStatus(error.status_code).phrase.lower().replace(" ", "-")
    detail = f"{request.method} {request.url.path}: {error.detail}"
    return problem(error.status_code, name, detail, error.headers)


async def _unexpected(request: Request, error: Exception) -> Response:
    log.error("unexpected error", path=request.url.path, exc_info=error)
    return problem(500, "internal-error", "an unexpected error; the sidecar's log has the details")
