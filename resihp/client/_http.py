"""HTTP requests to the sidecar, and their failures as `ServiceError`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit

import urllib3

from resihp.contracts import ContractError, ServiceError

_MAX_DETAIL = 500


class HttpSession:
    """Sends requests to one base address. Thread-safe.

    Connections are pooled per process: a forked child opens its own, because two processes that
    write to one socket corrupt both conversations.
    """

    def __init__(self, url: str, token: str | None, timeout: float) -> None:
        self.url = _checked(url)
        if not timeout > 0:
            raise ContractError("timeout", f"must be above 0 seconds, not {timeout}")
        self._timeout = timeout
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._pool: urllib3.PoolManager | None = None
        self._pid = -1

    def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        patience: float = 0.0,
    ) -> urllib3.BaseHTTPResponse:
        """Return the answer, of status below 300. `patience`: seconds that the sidecar may hold
        the request before it answers. Raises `ServiceError`."""
        given = {key: value for key, value in (query or {}).items() if value is not None}
        url = f"{self.url}{path}" + (f"?{urlencode(given)}" if given else "")
        try:
            answer = self._connections().request(
                method,
                url,
                body=body,
                headers={**self._headers, **(headers or {})},
                timeout=urllib3.Timeout(connect=self._timeout, read=self._timeout + patience),
                retries=False,
                redirect=False,
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ServiceError(f"no answer from {self.url}: {error}") from error
        if answer.status >= 300:
            raise ServiceError(_problem(answer), status=answer.status)
        return answer

    def close(self) -> None:
        """Close the idle connections."""
        if self._pool is not None and self._pid == os.getpid():
            self._pool.clear()

    def _connections(self) -> urllib3.PoolManager:
        pid = os.getpid()
        if self._pool is None or self._pid != pid:
            self._pool, self._pid = urllib3.PoolManager(num_pools=1, maxsize=4), pid
        return self._pool


def _checked(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ContractError("url", f"must be http://HOST[:PORT] or https://…, not {url!r}")
    return url.rstrip("/")


def _problem(answer: urllib3.BaseHTTPResponse) -> str:
    """Title and detail of an RFC 9457 problem document; the bare status where there is none."""
    try:
        document = json.loads(answer.data)
    except ValueError:
        document = None
    if not isinstance(document, Mapping) or "title" not in document:
        return f"status {answer.status} {answer.reason or ''}".strip()
    words = [str(document[key]) for key in ("title", "detail") if document.get(key)]
    return ": ".join(words)[:_MAX_DETAIL]
