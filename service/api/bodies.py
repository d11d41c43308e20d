"""Request bodies: their models, validation, and OpenAPI schemas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from traceback import clear_frames
from typing import Annotated, Any, Literal, NotRequired, TypeVar

import numpy as np
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetPydanticSchema,
    TypeAdapter,
    ValidationError,
    create_model,
)
from typing_extensions import TypedDict

from resihp.contracts import ContractError, Job, Op, SensorSample, TelemetryBatch, from_json
from resihp.contracts.codec import WireFormat, decode, encode
from resihp.contracts.json_size import parse_json, require_size
from resihp.contracts.sensors import MOST_READING, SENSOR_NAMES
from resihp.contracts.telemetry import MOST_MS, MOST_STEP

from ..errors import BodyTooLargeError, ContentEncodingError, MediaTypeError

LARGE_BYTES = 128 * 1024
"""A body beyond this size is decoded in a thread, one at a time; a smaller one costs less than the
change of threads."""
_MOST_RANKS = 131_072  # of one body
DOCUMENT_SIZE = {"parts": 2**19, "values": 2**20}
"""Limits of `require_size` for JSON: a job of so many ranks, in groups of four, is within them."""
_MOST_BYTES = 8 * 2**20  # of JSON, telemetry apart
_MOST_STEPS = 8_192  # of one message; the hooks' have so many records
_MOST_MISTAKES, _LONGEST_NAME = 100, 100  # in an answer

Rank = Annotated[int, Field(ge=0, lt=2**31)]
Ranks = Annotated[list[Rank], Field(min_length=1, max_length=_MOST_RANKS, fail_fast=True)]
Step = Annotated[int, Field(ge=-1, le=MOST_STEP)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Detail = Annotated[str, Field(max_length=4096)]
Frame = Annotated[str, Field(max_length=256)]
_Body = TypeVar("_Body", bound=BaseModel)
_Made = TypeVar("_Made")

_RETRY_KEY = {
    "parameters": [
        {"name": "Idempotency-Key", "in": "header", "schema": {"type": "string", "maxLength": 256}}
    ]
}
_MSGPACK = ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack")


_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Strict(BaseModel):
    model_config = _STRICT


# Of heartbeats there are thousands in a second: they are checked as they are, without an object or
# a default for each.

_Reading = Annotated[float, Field(ge=0, le=MOST_READING)]
_READINGS: dict[str, Any] = dict.fromkeys(SENSOR_NAMES, (_Reading | None, None))
_SECONDS: Any = (Annotated[float, Field(gt=0, le=MOST_READING)], ...)
_SENSORS = create_model(
    "SensorSample",
    __config__=_STRICT,
    __doc__=SensorSample.__doc__,
    seconds=_SECONDS,
    **_READINGS,
)
_Sensors = Annotated[SensorSample, GetPydanticSchema(lambda _, schema_of: schema_of(_SENSORS))]


class HeartbeatPosition(TypedDict):
    """Position of the training thread of a rank; `op` is a code of telemetry's column."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]
    step: Annotated[int, Field(ge=0, le=MOST_STEP)]
    microbatch: NotRequired[Annotated[int, Field(ge=-1, lt=2**31)]]
    op: NotRequired[Annotated[int, Field(ge=min(Op), le=max(Op))] | None]
    waiting: NotRequired[bool]
    passes: NotRequired[Count]
    for_s: NotRequired[Annotated[float, Field(ge=0, le=MOST_MS / 1e3)]]


class HeartbeatBody(TypedDict):
    """Sign of life of the process that holds these ranks; `stack` and `collective` if an answer
    asked for them."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]
    ranks: Ranks
    step: NotRequired[Step | None]
    process: NotRequired[Annotated[str, Field(max_length=64)]]
    sequence: NotRequired[Count]
    position: NotRequired[HeartbeatPosition | None]
    sensors: NotRequired[_Sensors | None]
    left: NotRequired[bool]
    error: NotRequired[Detail]
    stack: NotRequired[Annotated[list[Frame], Field(max_length=32)]]
    collective: NotRequired[Annotated[str, Field(max_length=256)]]


Heartbeats = Annotated[list[HeartbeatBody], Field(min_length=1, max_length=4_096, fail_fast=True)]
"""Heartbeats of several processes, as of the ranks of one host."""
_HEARTBEAT = TypeAdapter[HeartbeatBody](HeartbeatBody)
HEARTBEATS = TypeAdapter[list[HeartbeatBody]](Heartbeats)


class AckBody(_Strict):
    """Answer of one rank to a plan."""

    rank: Rank
    state: Literal["applied", "refused"]
    step: Step | None = None
    detail: Detail = ""
    pause_ms: Annotated[float, Field(ge=0, le=MOST_MS)] | None = None
    digest: Annotated[str, Field(max_length=64)] | None = None


class OwnPlanBody(_Strict):
    """A plan that the job made and applied by itself, and the ranks that it has lost so far."""

    plan: dict[str, Any]
    lost: Annotated[list[Rank], Field(max_length=_MOST_RANKS, fail_fast=True)] = []
    step: Step | None = None


class FailureBody(_Strict):
    """Stopped ranks, reported by a survivor."""

    ranks: Ranks
    step: Step | None = None
    plan_version: Count | None = None
    reported_by: Rank | None = None
    detail: Detail = ""


class JoinersBody(_Strict):
    """Ranks that are ready to join the layout."""

    ranks: Ranks
    step: Step | None = None


class ProbeAnswerBody(_Strict):
    """Best time of a probe on one rank; null, with a reason, if it was refused."""

    rank: Rank
    ms: Annotated[float, Field(gt=0, le=MOST_MS)] | None
    detail: Detail = ""


async def read(request: Request, model: type[_Body]) -> _Body:
    """A JSON body of a model. Raises `RequestValidationError`, `ContractError`,
    `BodyTooLargeError` and `MediaTypeError`."""
    return await _checked(request, model.model_validate_json)


async def _checked(request: Request, check: Callable[[bytes], _Made]) -> _Made:
    document = await _json(request)
    require_size(document, **DOCUMENT_SIZE)

    def checked() -> _Made:
        try:
            return check(document)
        except ValidationError as error:
            raise _refusal(error) from None

    return await off_loop(request, checked)


def _refusal(error: ValidationError) -> ContractError | RequestValidationError:
    """The mistakes of a body, without its values."""
    if error.error_count() > _MOST_MISTAKES:
        return ContractError("", f"has {error.error_count()} mistakes")
    found = error.errors(include_url=False, include_context=False, include_input=False)
    return RequestValidationError(
        [
            {**item, "loc": ("body", *(str(part)[:_LONGEST_NAME] for part in item["loc"]))}
            for item in found
        ]
    )


async def read_heartbeats(request: Request) -> HeartbeatBody | list[HeartbeatBody]:
    """A JSON body of one heartbeat, or of a list of them. Raises as `read`."""
    if (await request.body()).lstrip()[:1] == b"[":
        return await _checked(request, HEARTBEATS.validate_json)
    return await _checked(request, _HEARTBEAT.validate_json)


async def read_job(request: Request, name: str) -> Job:
    """The description of a job in a JSON body; `name` where it gives none. Raises `ContractError`,
    `BodyTooLargeError` and `MediaTypeError`."""
    body = await _json(request)

    def job() -> Job:
        document = parse_json(body, **DOCUMENT_SIZE)
        if isinstance(document, dict):
            document.setdefault("name", name)
        return from_json(Job, document)

    return await off_loop(request, job)


async def read_telemetry(request: Request, max_records: int) -> tuple[TelemetryBatch, bytes]:
    """The records of a telemetry message, and the message in msgpack, the one format that workers
    read. Raises `ContractError` and `MediaTypeError`."""
    form = wire_format(request)
    body = await request.body()

    def records() -> tuple[TelemetryBatch, bytes]:
        batch = decode(body, form, max_records=max_records)
        if len(batch) > _MOST_STEPS and np.unique(batch.step).size > _MOST_STEPS:
            raise ContractError("columns.step", f"holds more than {_MOST_STEPS} different steps")
        return batch, body if form is WireFormat.MSGPACK else encode(batch)

    return await off_loop(request, records)


async def off_loop(request: Request, work: Callable[[], _Made]) -> _Made:
    """The result of `work` on the body of a request. On a large one it is done in the thread for
    these, so that the event loop serves other requests meanwhile and one takes memory at a time."""
    if len(await request.body()) <= LARGE_BYTES:
        return work()
    thread = request.app.state.context.decoding
    return await asyncio.get_running_loop().run_in_executor(thread, _without_frames(work))


def _without_frames(work: Callable[[], _Made]) -> Callable[[], _Made]:
    """`work` whose refusals do not keep what was made of the body: they may wait for the event loop
    while the next body is decoded."""

    def light() -> _Made:
        try:
            return work()
        except (ContractError, RequestValidationError) as error:
            error.__context__ = None
            clear_frames(error.__traceback__)
            raise

    return light


def wire_format(request: Request) -> WireFormat:
    """The format of a telemetry message, by its content type. Raises `MediaTypeError`."""
    given = _content_type(request)
    if given not in (*_MSGPACK, WireFormat.JSON.value):
        raise MediaTypeError(given, (WireFormat.MSGPACK.value, WireFormat.JSON.value))
    return WireFormat.MSGPACK if given in _MSGPACK else WireFormat.JSON


def accepts(model: type[BaseModel], *, once: bool = False) -> dict[str, Any]:
    """Options of a route that answers 202 and validates its body of this model itself; with `once`
    a repetition under the same key has no effect."""
    extra = _json_body(_schema(model)) | (_RETRY_KEY if once else {})
    return {"status_code": 202, "openapi_extra": extra}


def accepts_heartbeats() -> dict[str, Any]:
    """Options of the route of heartbeats, one or a list of them."""
    schema = _schema(HeartbeatBody | Heartbeats)
    return {"status_code": 202, "openapi_extra": _json_body(schema)}


def documented_job() -> dict[str, Any]:
    """OpenAPI schema of a job."""
    return _json_body(_schema(Job))


def documented_telemetry() -> dict[str, Any]:
    """OpenAPI schema of a telemetry message."""
    example = {
        "version": 1,
        "plan_version": 0,
        "dropped": 0,
        "columns": {"rank": [0], "step": [7], "microbatch": [0], "op": [0], "compute_ms": [12.5]},
    }
    part = _json_body({"type": "object", "example": example}) | _RETRY_KEY
    part["requestBody"]["content"]["application/msgpack"] = {
        "schema": {"type": "string", "format": "binary"}
    }
    return part


def _schema(kind: Any) -> dict[str, Any]:
    """Schema whose definitions `OpenApiDocument` moves to where its references look for them."""
    return TypeAdapter(kind).json_schema(ref_template="#/components/schemas/{model}")


def _json_body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _content_type(request: Request) -> str:
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise ContentEncodingError(encoding)
    return request.headers.get("content-type", "").split(";")[0].strip().lower()


async def _json(request: Request) -> bytes:
    if _content_type(request) != "application/json":
        raise MediaTypeError(_content_type(request), ("application/json",))
    body = await request.body()
    if len(body) > _MOST_BYTES:
        raise BodyTooLargeError(_MOST_BYTES)
    return body
