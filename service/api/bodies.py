"""Request bodies: their models, validation, and OpenAPI schemas."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from resihp.contracts import ContractError, Job, Op, SensorSample
from resihp.contracts.codec import WireFormat

from ..errors import ContentEncodingError, MediaTypeError

Rank = Annotated[int, Field(ge=0, lt=2**31)]
Ranks = Annotated[list[Rank], Field(min_length=1, max_length=1_000_000)]
Detail = Annotated[str, Field(max_length=4096)]
Frame = Annotated[str, Field(max_length=256)]
_Body = TypeVar("_Body", bound="_Strict")

_MSGPACK = ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class HeartbeatPosition(_Strict):
    """Position of the training thread of a rank; `op` is a code of telemetry's column."""

    step: Annotated[int, Field(ge=0)]
    microbatch: Annotated[int, Field(ge=-1)] = -1
    op: Annotated[int, Field(ge=min(Op), le=max(Op))] | None = None
    waiting: bool = False
    passes: Annotated[int, Field(ge=0)] = 0
    for_s: Annotated[float, Field(ge=0)] = 0.0


class HeartbeatBody(_Strict):
    """Sign of life of the process that holds these ranks; `stack` and `collective` if an answer
    asked for them."""

    ranks: Ranks
    step: int | None = None
    process: Annotated[str, Field(max_length=64)] = ""
    sequence: Annotated[int, Field(ge=0, lt=2**63)] = 0
    position: HeartbeatPosition | None = None
    sensors: SensorSample | None = None
    left: bool = False
    error: Detail = ""
    stack: Annotated[list[Frame], Field(max_length=32)] = []
    collective: Annotated[str, Field(max_length=256)] = ""


class AckBody(_Strict):
    """Answer of one rank to a plan."""

    rank: Rank
    state: Literal["applied", "refused"]
    step: int | None = None
    detail: Detail = ""
    pause_ms: float | None = None
    digest: str | None = None


class OwnPlanBody(_Strict):
    """A plan that the job made and applied by itself, and the ranks that it has lost so far."""

    plan: dict[str, Any]
    lost: Annotated[list[Rank], Field(max_length=1_000_000)] = []
    step: int | None = None


class FailureBody(_Strict):
    """Stopped ranks, reported by a survivor."""

    ranks: Ranks
    step: int | None = None
    plan_version: int | None = None
    reported_by: int | None = None
    detail: Detail = ""


class JoinersBody(_Strict):
    """Ranks that are ready to join the layout."""

    ranks: Ranks
    step: int | None = None


class ProbeAnswerBody(_Strict):
    """Best time of a probe on one rank; null, with a reason, if it was refused."""

    rank: Rank
    ms: Annotated[float, Field(gt=0)] | None
    detail: Detail = ""


async def read(request: Request, model: type[_Body]) -> _Body:
    """A JSON body of a model. Raises `RequestValidationError` and `MediaTypeError`."""
    _require_json(request)
    try:
        return model.model_validate_json(await request.body())
    except ValidationError as error:
        items = [{**item, "loc": ("body", *item["loc"])} for item in error.errors()]
        raise RequestValidationError(items) from None


async def read_document(request: Request) -> Any:
    """A JSON body of any content. Raises `ContractError` and `MediaTypeError`."""
    _require_json(request)
    try:
        return json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise ContractError("", f"the body is not valid JSON: {error}") from None


def wire_format(request: Request) -> WireFormat:
    """The format of a telemetry message, by its content type. Raises `MediaTypeError`."""
    given = _content_type(request)
    if given not in (*_MSGPACK, WireFormat.JSON.value):
        raise MediaTypeError(given, (WireFormat.MSGPACK.value, WireFormat.JSON.value))
    return WireFormat.MSGPACK if given in _MSGPACK else WireFormat.JSON


def accepts(model: type[BaseModel]) -> dict[str, Any]:
    """Options of a route that answers 202 and validates its body of this model itself."""
    return {"status_code": 202, "openapi_extra": _json_body(model.model_json_schema())}


def documented_job() -> dict[str, Any]:
    """OpenAPI schema of a job."""
    return _json_body(TypeAdapter(Job).json_schema())


def documented_telemetry() -> dict[str, Any]:
    """OpenAPI schema of a telemetry message."""
    example = {
        "version": 1,
        "plan_version": 0,
        "dropped": 0,
        "columns": {"rank": [0], "step": [7], "microbatch": [0], "op": [0], "compute_ms": [12.5]},
    }
    part = _json_body({"type": "object", "example": example})
    part["requestBody"]["content"]["application/msgpack"] = {
        "schema": {"type": "string", "format": "binary"}
    }
    return part


def _json_body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _content_type(request: Request) -> str:
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise ContentEncodingError(encoding)
    return request.headers.get("content-type", "").split(";")[0].strip().lower()


def _require_json(request: Request) -> None:
    if _content_type(request) != "application/json":
        raise MediaTypeError(_content_type(request), ("application/json",))
