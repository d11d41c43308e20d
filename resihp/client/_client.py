"""The HTTP API of the sidecar as methods."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from numbers import Integral, Real
from time import monotonic
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import urllib3

from resihp.contracts import (
    Advice,
    ContractError,
    Diagnosis,
    Heartbeat,
    Job,
    LinkVerdict,
    Plan,
    ServiceError,
    Verdict,
    from_json,
    to_json,
)
from resihp.contracts.codec import WireFormat

T = TypeVar("T")

_JSON = {"Content-Type": "application/json"}
_MAX_DETAIL = 500
_UNCHANGED = 304
_MOST_KNOWN = 16  # answers kept: those of a few jobs
_MOST_BYTES, _MOST_PROBLEM_BYTES = 64 << 20, 1 << 20
"""Longest answer, and what is read of one that is an error."""
_READ_BYTES = 1 << 18


@dataclass(frozen=True)
class _Answer:
    """A whole answer."""

    status: int
    reason: str
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Content. Raises `ValueError` if it is not JSON."""
        try:
            return json.loads(self.body)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None


@dataclass(frozen=True)
class _Known:
    """An answer and its tag."""

    tag: str
    value: Any


class Client:
    """The sidecar at `url`; `timeout` in seconds, for the connection and for each answer.

    Thread-safe, and usable on both sides of a fork. No method retries: the caller knows whether
    its request may be repeated. Every method raises `ServiceError` with the title and the detail
    of the sidecar's problem document and its HTTP status; status None means no valid answer.

    What is read again is transferred and decoded only if it has changed since (`ETag`).

    url    base address of the sidecar
    token  of the sidecar; white space around it is ignored
    """

    def __init__(self, url: str, token: str | None = None, *, timeout: float = 5.0) -> None:
        if not _is_address(url):
            raise ContractError("url", f"must be http://HOST[:PORT] or https://…, not {url!r}")
        if not timeout > 0:
            raise ContractError("timeout", f"must be above 0 seconds, not {timeout}")
        self.url = url.rstrip("/")
        self._timeout = timeout
        token = (token or "").strip()  # files of secrets end with a newline
        if not token.isascii() or not token.isprintable():
            raise ContractError("token", "must be printable ASCII characters")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._pool: urllib3.PoolManager | None = None
        self._pid = -1
        self._known: dict[str, _Known] = {}

    def register(self, job: Job) -> None:
        """Register a job, or replace its description."""
        self._send("PUT", _path(job.name), to_json(job))

    def delete(self, job: str) -> None:
        """Delete a job with all its data; one that the sidecar does not know is an error of status
        404."""
        self._request("DELETE", _path(job))

    def send_telemetry(
        self, job: str, message: bytes, form: WireFormat, key: str | None = None
    ) -> dict[str, Any]:
        """Send an encoded batch. A repetition with the same `key` is applied once.

        Returns the answer: the number of records `accepted`, the `probes` requested of its ranks,
        and `interval_s`, the seconds between two messages that an overloaded sidecar asks for.
        """
        headers = {"Content-Type": form.value}
        if key is not None:
            headers["Idempotency-Key"] = key
        return _document(
            self._request("POST", _path(job, "telemetry"), body=message, headers=headers)
        )

    def answer_probe(
        self, job: str, *, probe: str, rank: int, ms: float | None, detail: str = ""
    ) -> None:
        """Report the time of a probe, or with `ms` None why it was not run."""
        self._send("POST", _path(job, "probes", probe), {"rank": rank, "ms": ms, "detail": detail})

    def heartbeat(self, job: str, *, ranks: Iterable[int], step: int | None = None) -> None:
        """Report that these ranks are alive; later silence of one of them counts as its stop."""
        self.send_heartbeat(job, Heartbeat(ranks=tuple(ranks), step=step))

    def send_heartbeat(self, job: str, heartbeat: Heartbeat) -> dict[str, Any]:
        """Report that the ranks of a process are alive, where they are, or that they leave.

        Returns the answer: with `stack` true, the next heartbeat is to have the stack.
        """
        document = _heartbeat_document(heartbeat)
        return _document(self._send("POST", _path(job, "heartbeats"), document))

    def send_heartbeats(self, job: str, heartbeats: Iterable[Heartbeat]) -> dict[str, Any]:
        """Report the heartbeats of several processes in one request.

        Returns the answer: `stacks` are the ranks whose next heartbeat is to have the stack.
        """
        documents = [_heartbeat_document(heartbeat) for heartbeat in heartbeats]
        return _document(self._send("POST", _path(job, "heartbeats"), documents))

    def report_failure(
        self,
        job: str,
        *,
        ranks: Iterable[int],
        step: int | None = None,
        plan_version: int | None = None,
        reported_by: int | None = None,
        detail: str = "",
    ) -> None:
        """Report that these ranks have stopped, as seen by a survivor under a plan.

        It counts for nothing of ranks that have joined with a later plan.
        """
        body = {
            "ranks": list(ranks),
            "step": step,
            "plan_version": plan_version,
            "reported_by": reported_by,
            "detail": detail,
        }
        self._send("POST", _path(job, "failures"), body)

    def announce_joiners(self, job: str, *, ranks: Iterable[int], step: int | None = None) -> None:
        """Report that these ranks are ready to join the layout."""
        self._send("POST", _path(job, "joiners"), {"ranks": list(ranks), "step": step})

    def verdicts(self, job: str) -> list[Verdict]:
        """The verdict on every rank."""
        return list(self._get(_path(job, "verdicts"), partial(_items, "verdicts", Verdict)))

    def links(self, job: str) -> list[LinkVerdict]:
        """The verdicts on links and groups that are slow or suspected."""
        return list(self._get(_path(job, "links"), partial(_items, "links", LinkVerdict)))

    def diagnosis(self, job: str) -> Diagnosis:
        """The causes of the job's lost time."""
        return self._get(_path(job, "diagnosis"), partial(_read, Diagnosis))

    def advice(self, job: str) -> Advice | None:
        """The ranks to leave out of a job that cannot do so by itself; None if there are none."""
        return self._get(_path(job, "advice"), _advice)

    def plan(self, job: str, *, after: int | None = None, wait: float = 0.0) -> Plan | None:
        """The newest plan; with `after` one of a higher version, awaited for up to `wait` seconds,
        or None."""
        if after is None:
            return self._get(_path(job, "plan"), partial(_read, Plan))
        query = urlencode({"after": after, "wait": wait})
        answer = self._request("GET", f"{_path(job, 'plan')}?{query}", patience=wait)
        return None if answer.status == 204 else _read(Plan, _parse(answer))

    def acknowledge(
        self,
        job: str,
        version: int,
        *,
        rank: int,
        step: int | None = None,
        state: str = "applied",
        detail: str = "",
        pause_ms: float | None = None,
        digest: str | None = None,
    ) -> None:
        """Report that `rank` trains by a plan from `step` on, or that it `refused` it and why.

        `pause_ms`: pause of training for it. `digest`: digest of the plan; another digest than the
        sidecar's for this version is an error of status 409.
        """
        body = {
            "rank": rank,
            "step": step,
            "state": state,
            "detail": detail,
            "pause_ms": pause_ms,
            **({"digest": digest} if digest else {}),
        }
        self._send("POST", _path(job, "plan", str(version), "ack"), body)

    def tell_plan(self, job: str, plan: Plan, *, lost: Iterable[int] = ()) -> None:
        """Report a plan that the job made by itself and all ranks apply, after losing `lost`."""
        body = {"plan": to_json(plan), "lost": sorted(lost)}
        self._send("PUT", _path(job, "plan", str(plan.version)), body)

    def health(self) -> dict[str, Any]:
        """The health report of the sidecar."""
        document = _parse(self._request("GET", "/v1/healthz"))
        return document if isinstance(document, dict) else {}

    def close(self) -> None:
        """Close the idle connections."""
        if self._pool is not None and self._pid == os.getpid():
            self._pool.clear()

    def _get(self, path: str, read: Callable[[Any], T]) -> T:
        """The JSON at `path` as `read` converts it; the caller must not change it."""
        known = self._known.get(path)
        answer = self._request("GET", path, tag=known.tag if known is not None else None)
        if known is not None and answer.status == _UNCHANGED:
            value: T = known.value
            return value
        value = read(_parse(answer))
        if tag := answer.headers.get("ETag"):
            self._known[path] = _Known(tag, value)
            if len(self._known) > _MOST_KNOWN:
                self._known.clear()
        return value

    def _send(self, method: str, path: str, document: Any) -> _Answer:
        body = json.dumps(document, separators=(",", ":"), allow_nan=False, default=_plain)
        return self._request(method, path, body=body.encode(), headers=_JSON)

    def _request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        tag: str | None = None,
        patience: float = 0.0,
    ) -> _Answer:
        """The answer, which the sidecar may hold back for `patience` seconds. Its status is below
        300, or 304 if `tag` is still that of the answer.

        Connections are pooled per process: a forked child opens its own, because two processes that
        write to one socket corrupt both conversations.
        """
        if self._pool is None or self._pid != os.getpid():
            self._pool, self._pid = urllib3.PoolManager(num_pools=1, maxsize=4), os.getpid()
        condition = {} if tag is None else {"If-None-Match": tag}
        deadline_s = monotonic() + 2 * self._timeout + patience
        try:
            received = self._pool.request(
                method,
                self.url + path,
                body=body,
                headers={**self._headers, **(headers or {}), **condition},
                timeout=urllib3.Timeout(connect=self._timeout, read=self._timeout + patience),
                retries=False,
                redirect=False,
                preload_content=False,
            )
            answer = _whole(received, deadline_s)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ServiceError(f"no answer from {self.url}: {error}") from error
        if answer.status >= 300 and not (condition and answer.status == _UNCHANGED):
            raise ServiceError(
                _problem(answer), status=answer.status, retry_after_s=_retry_after_s(answer)
            )
        return answer


def _whole(received: urllib3.BaseHTTPResponse, deadline_s: float) -> _Answer:
    """The answer with its body; the beginning of the body for an error. Raises `OSError` if it is
    too long, or does not end in time although something of it arrives now and then."""
    is_error = received.status >= 300
    most, body = _MOST_PROBLEM_BYTES if is_error else _MOST_BYTES, bytearray()
    try:
        while data := received.read1(_READ_BYTES):
            body += data
            if len(body) > most:
                if is_error:
                    break
                raise OSError(f"the answer is longer than {most} bytes")
            if monotonic() > deadline_s:
                raise TimeoutError("the answer does not end")
        else:
            received.release_conn()
    finally:
        received.close()
    return _Answer(received.status, received.reason or "", received.headers, bytes(body))


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # no port, or no IPv6 address
        return False


def _path(job: str, *parts: str) -> str:
    return "/".join(["/v1/jobs", quote(job, safe=""), *parts])


def _plain(value: object) -> int | float:
    """The plain number for one of numpy. Raises `TypeError` for what is none."""
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise TypeError(f"{type(value).__name__} is no JSON")


def _heartbeat_document(heartbeat: Heartbeat) -> dict[str, Any]:
    usual = {field.name: field.default for field in fields(heartbeat)}
    given = to_json(heartbeat)
    document = {key: given[key] for key in usual if getattr(heartbeat, key) != usual[key]}
    if heartbeat.sensors is not None:
        readings = heartbeat.sensors.readings()
        document["sensors"] = {"seconds": heartbeat.sensors.seconds, **readings}
    return document


def _retry_after_s(answer: _Answer) -> float | None:
    """The seconds in a `Retry-After` header; None without one, or with a date."""
    text = answer.headers.get("Retry-After", "")
    return float(text) if text.isdecimal() else None


def _parse(answer: _Answer) -> Any:
    try:
        return answer.json()
    except ValueError as error:
        raise ServiceError(f"the answer is not JSON: {error}") from None


def _document(answer: _Answer) -> dict[str, Any]:
    """Content of an answer to something that was accepted in any case; {} if it is no object."""
    try:
        document = answer.json()
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _problem(answer: _Answer) -> str:
    """Title and detail of an RFC 9457 problem document; the bare status where there is none."""
    try:
        document = answer.json()
    except ValueError:
        document = None
    if not isinstance(document, Mapping) or "title" not in document:
        return f"status {answer.status} {answer.reason}".strip()
    words = [str(document[key]) for key in ("title", "detail") if document.get(key)]
    return ": ".join(words)[:_MAX_DETAIL]


def _items(name: str, cls: type[T], document: Any) -> tuple[T, ...]:
    items = document.get(name, []) if isinstance(document, Mapping) else []
    return tuple(_read(cls, item) for item in items)


def _advice(document: Any) -> Advice | None:
    found = document.get("advice") if isinstance(document, Mapping) else None
    return None if found is None else _read(Advice, found)


def _read(cls: type[T], document: Any) -> T:
    """Read `cls` from JSON; fields of a newer sidecar are ignored."""
    try:
        return from_json(cls, document, skip_unknown=True)
    except ContractError as error:
        raise ServiceError(f"the answer is no {cls.__name__}: {error}") from None
