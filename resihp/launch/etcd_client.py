"""Client of a job's values in etcd v3, by the JSON gateway of its servers."""

from __future__ import annotations

import json
import random
import time
from base64 import b64decode, b64encode
from collections.abc import Callable
from hashlib import sha256
from itertools import count
from math import inf
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

import urllib3

from .store_url import StoreUrl

_NOT_AUTHENTICATED, _TOO_MANY, _UNAVAILABLE = 401, 429, 500
_OF_AN_OLD_TOKEN = (
    *("revision of auth store is old", "revision in header is old"),
    *("user name is empty", "invalid auth token"),
)
"""Ends of messages after changes of users, roles or authentication, of whatever status."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 1.0


class EtcdSilentError(Exception):
    """No server gives an answer."""


class EtcdRefusedError(Exception):
    """A server refuses a request."""


class EtcdClient:
    """`StoreClient` whose values have one prefix, and one lease that all launchers prolong.

    Asks the server that answered last, else the next one. Options of a URL of etcds are the files
    `ca_certs`, `cert_file` and `key_file`.
    """

    errors: tuple[type[Exception], ...] = EtcdSilentError, EtcdRefusedError
    passing_errors: tuple[type[Exception], ...] = (EtcdSilentError,)

    def __init__(self, url: StoreUrl, job: str, lifetime_s: int, timeout_s: float) -> None:
        files: dict[str, Any] = dict(parse_qsl(url.options))
        self._pool = urllib3.PoolManager(maxsize=4, timeout=timeout_s, retries=False, **files)
        scheme = "https" if url.is_tls else "http"
        hosts = [(f"[{host}]" if ":" in host else host, port) for host, port in url.servers]
        self._servers = [f"{scheme}://{host}:{port}" for host, port in hosts]
        self._name, _, self._password = map(unquote, url.user.partition(":"))
        self._token: str | None = None
        self._prefix = f"resihp/run/{quote(job, safe='')}/"
        # Chosen, not given by etcd, so that launchers have one in common.
        self._lease = str(int.from_bytes(sha256(self._prefix.encode()).digest()[:8]) >> 1)
        self._lifetime_s, self._prolong_at_s = lifetime_s, -inf

    def read(self, keys: list[str]) -> list[bytes | None]:
        """Return the values of keys; None for those without one."""
        return [self._found(key)[0] for key in keys]

    def set(self, key: str, value: str) -> None:
        """Set the value of a key."""
        self._change(key, lambda _: value.encode())

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; returns its value."""
        return int(self._change(key, lambda found: str(int(found or 0) + amount).encode()))

    def append(self, key: str, value: str) -> None:
        """Append to the value of a key."""
        self._change(key, lambda found: (found or b"") + value.encode())

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Set a key that has the `expected` value; returns the value that it has."""

        def changed(found: bytes | None) -> bytes | None:
            return value.encode() if (found or b"") == expected.encode() else found

        return self._change(key, changed)

    def forget(self, key: str, value: bytes) -> bool:
        """Delete all keys if `key` has this value; returns whether it had."""
        end = self._prefix[:-1] + chr(ord(self._prefix[-1]) + 1)  # the first key of no such prefix
        delete = {"key": _encoded(self._prefix), "range_end": _encoded(end)}
        return self._transact(
            {"key": self._key(key), "target": "VALUE", "value": _encoded(value)},
            {"request_delete_range": delete},
        )

    def _change(self, key: str, change: Callable[[bytes | None], bytes | None]) -> bytes:
        """Set a key to what `change` makes of its value, in one step; returns it."""
        for attempt in count():
            found, revision = self._found(key)
            value = change(found)
            if value == found or self._put(key, value or b"", revision):
                break
            longest_s = min(_LONGEST_PAUSE_S, _SHORTEST_PAUSE_S * 2 ** min(attempt, 16))
            time.sleep(random.uniform(0, longest_s))  # another launcher was faster
        return value or b""

    def _found(self, key: str) -> tuple[bytes | None, str]:
        """A value, and the revision that wrote it; None and "0" for none."""
        found = self._ask("kv/range", {"key": self._key(key)}).get("kvs")
        if not found:
            return None, "0"
        return b64decode(found[0].get("value", "")), found[0]["mod_revision"]

    def _put(self, key: str, value: bytes, revision: str) -> bool:
        """Set a key whose value is of this revision; returns whether it was."""
        if time.monotonic() >= self._prolong_at_s:
            self._prolong()
        name = self._key(key)
        compare = {"key": name, "target": "MOD", "mod_revision": revision}
        put = {"key": name, "value": _encoded(value), "lease": self._lease}
        try:
            return self._transact(compare, {"request_put": put})
        except EtcdRefusedError as error:
            if "lease not found" not in str(error):
                raise
        self._prolong()  # the values are lost, as those of any store may be
        return self._transact(compare, {"request_put": put})

    def _transact(self, compare: dict[str, Any], success: dict[str, Any]) -> bool:
        compare = {**compare, "result": "EQUAL"}
        answer = self._ask("kv/txn", {"compare": [compare], "success": [success]})
        return bool(answer.get("succeeded"))

    def _prolong(self) -> None:
        """Let the values live for another lifetime; make the lease if there is none."""
        answer = self._ask("lease/keepalive", {"ID": self._lease}).get("result", {})
        if not int(answer.get("TTL", 0)):
            try:
                answer = self._ask("lease/grant", {"ID": self._lease, "TTL": self._lifetime_s})
            except EtcdRefusedError as error:
                if "lease already exists" not in str(error):
                    raise
        ttl_s = int(answer.get("TTL", 0))  # of the launcher that made it
        self._prolong_at_s = time.monotonic() + ttl_s / 10

    def _ask(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of the first server that gives one."""
        if self._name and self._token is None:
            user = {"name": self._name, "password": self._password}
            self._token = self._post("auth/authenticate", user, {})["token"]
        return self._post(path, request, {"Authorization": self._token} if self._token else {})

    def _post(self, path: str, request: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
        silent = []
        for server in self._servers:
            try:
                answer = self._pool.request(
                    "POST", f"{server}/v3/{path}", json=request, headers=headers
                )
            except (urllib3.exceptions.HTTPError, OSError) as error:
                silent.append(f"{server}: {error}")
                continue
            message = "" if answer.status == 200 else _error(answer.data)
            is_old = bool(headers) and message.endswith(_OF_AN_OLD_TOKEN)
            if is_old or answer.status == _NOT_AUTHENTICATED:
                self._token = None  # the request is repeated with another
                raise EtcdSilentError(message)
            if answer.status == _TOO_MANY or answer.status >= _UNAVAILABLE:  # as without a leader
                silent.append(f"{server}: {message}")
                continue
            self._servers = [server, *(each for each in self._servers if each != server)]
            if answer.status != 200:
                raise EtcdRefusedError(f"{server}: {message}")
            document: dict[str, Any] = json.loads(answer.data.partition(b"\n")[0])
            return document
        raise EtcdSilentError("; ".join(silent))

    def _key(self, key: str) -> str:
        return _encoded(self._prefix + key)


def _encoded(value: str | bytes) -> str:
    return b64encode(value.encode() if isinstance(value, str) else value).decode()


def _error(answer: bytes) -> str:
    """Message of a server that refuses a request."""
    try:
        document = json.loads(answer)
        return str(document.get("message") or document.get("error"))
    except (ValueError, AttributeError):
        return answer.decode(errors="replace").strip()[:200]
