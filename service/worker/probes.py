"""Probes in progress: requests of the detector, the ranks that run them, and their answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from detector import ProbeRequest, ProbeResult

_TIMEOUT_S = 30.0


@dataclass
class OpenProbe:
    """A request without both answers yet; `deadline_s` in time of the session's clock."""

    request: ProbeRequest
    deadline_s: float
    answers: dict[int, float] = field(default_factory=dict)


@dataclass
class OpenProbes:
    """Open probes by number. Ranks receive their requests in the answer to their telemetry."""

    by_number: dict[int, OpenProbe] = field(default_factory=dict)
    count: int = 0

    def ask(self, requests: Iterable[ProbeRequest], now_s: float) -> list[ProbeRequest]:
        """Open the requests and drop those whose deadline has passed; the requests opened."""
        self.by_number = {
            n: probe for n, probe in self.by_number.items() if probe.deadline_s > now_s
        }
        asked = list(requests)
        for request in asked:
            self.count += 1
            self.by_number[self.count] = OpenProbe(request, now_s + _TIMEOUT_S)
        return asked

    def answer(self, number: str, rank: int, ms: float | None) -> ProbeResult | None:
        """Record the time of one rank (None: refused); the result once both are known."""
        probe = self.by_number.get(int(number)) if number.isdecimal() else None
        if probe is None:
            return None
        request, known = probe.request, probe.answers
        if rank not in (request.rank, request.reference):
            return None
        if ms is not None:
            known[rank] = ms
            if request.rank not in known or request.reference not in known:
                return None
        del self.by_number[int(number)]
        if ms is None:
            return None
        return ProbeResult(
            rank=request.rank,
            reference=request.reference,
            kind=request.kind,
            rank_ms=known[request.rank],
            reference_ms=known[request.reference],
        )

    def by_rank(self) -> dict[str, list[dict[str, Any]]]:
        """The measurements that each rank (decimal string) has still to make."""
        found: dict[str, list[dict[str, Any]]] = {}
        for number, probe in self.by_number.items():
            for rank in (probe.request.rank, probe.request.reference):
                if rank not in probe.answers:
                    wanted = {"id": str(number), "kind": probe.request.kind.value}
                    found.setdefault(str(rank), []).append(wanted)
        return found
