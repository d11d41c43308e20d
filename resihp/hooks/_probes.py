"""Probes requested by the sidecar: received by the sender, run by the training thread between two
steps, answered by the sender."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from ._probe_kernels import TIMED
from ._stats import FailureLog

_PAUSE_S = 1.0
"""Minimum time between two probes of this process."""
_CALL_S = 5.0
"""Time between two records of a rank without work."""
_MOST_WAITING = 4


@dataclass(frozen=True)
class RequestedProbe:
    """A probe requested of this rank."""

    id: str
    kind: str


@dataclass(frozen=True)
class MeasuredProbe:
    """Outcome of a probe: its best time, or why there is none."""

    id: str
    ms: float | None = None
    detail: str = ""


class Probes:
    """Requested probes and their answers, of one rank.

    Each end of each queue is used by one thread: the sender adds requests and removes answers, the
    training thread the reverse. A probe runs at most once a second and measures for `budget_ms`;
    a failure is counted, logged once, and answered as a refusal.
    """

    def __init__(self, failures: FailureLog, *, allowed: bool, budget_ms: float) -> None:
        self._failures, self._allowed, self._budget_ms = failures, allowed, budget_ms
        self.requests: deque[RequestedProbe] = deque()
        self.answers: deque[MeasuredProbe] = deque()
        self._last_s = self._called_s = float("-inf")
        self._known: deque[str] = deque(maxlen=64)

    def add(self, document: object, rank: int) -> None:
        """Add the requests of `rank` in the sidecar's answer to telemetry. Called by the sender."""
        asked = document.get("probes") if isinstance(document, Mapping) else None
        for item in asked if isinstance(asked, Sequence) else ():
            request = _request(item, rank)
            if request is None or request.id in self._known:
                continue
            self._known.append(request.id)
            if not self._allowed:
                self.answers.append(MeasuredProbe(request.id, detail="probes are forbidden here"))
            elif len(self.requests) < _MOST_WAITING:
                self.requests.append(request)

    def is_call_due(self) -> bool:
        """Return whether a rank without work is to send a record. Called by the training thread."""
        now_s = perf_counter()
        due = self._allowed and now_s - self._called_s >= _CALL_S
        self._called_s = now_s if due else self._called_s
        return due

    def run(self) -> None:
        """Run the oldest request if it is due. Called by the training thread between two steps."""
        now_s = perf_counter()
        if not self.requests or now_s - self._last_s < _PAUSE_S:
            return
        request = self.requests.popleft()
        self._last_s = now_s
        try:
            ms, detail = self._measure(request)
        except Exception as error:  # noqa: BLE001 the boundary: training goes on without the answer
            self._failures.add("a probe", error)
            ms, detail = None, f"failed: {error!r}"
        self.answers.append(MeasuredProbe(request.id, ms, detail))

    def _measure(self, request: RequestedProbe) -> tuple[float | None, str]:
        if request.kind in TIMED:
            return TIMED[request.kind](self._budget_ms), ""
        return None, f"this rank has no {request.kind} probe"

    def reset(self) -> None:
        """Drop all requests and answers, as in a forked child."""
        self.requests.clear()
        self.answers.clear()


def _request(item: Any, rank: int) -> RequestedProbe | None:
    """Parse a request; None for one of another rank, or of a newer sidecar that this version does
    not know."""
    if not isinstance(item, Mapping) or item.get("rank") != rank:
        return None
    identity, kind = item.get("id"), item.get("kind")
    if not (isinstance(identity, str) and isinstance(kind, str)):
        return None
    return RequestedProbe(identity, kind)
