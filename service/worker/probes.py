"""Probes under way: what the detector asks for, whom it is asked, and what came back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from detector import ProbeKind, ProbeRequest, ProbeResult

_PATIENCE_S = 30.0


@dataclass
class _Open:
    """A request that waits for its two answers; `deadline_s` by the session's clock."""

    request: ProbeRequest
    deadline_s: float
    answers: dict[int, float] = field(default_factory=dict)

    @property
    def result(self) -> ProbeResult | None:
        """None until both ends have answered."""
        request, known = self.request, self.answers
        if request.rank not in known or request.reference not in known:
            return None
        return ProbeResult(
            rank=request.rank,
            reference=request.reference,
            kind=request.kind,
            rank_ms=known[request.rank],
            reference_ms=known[request.reference],
        )


class OpenProbes:
    """Requests by number. Ranks take up the orders with the answer to their telemetry."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._made = 0

    def ask(self, requests: Iterable[ProbeRequest], now_s: float) -> list[ProbeRequest]:
        """Open these requests, and give up those that nobody answered."""
        for identity in [i for i, probe in self._open.items() if probe.deadline_s <= now_s]:
            del self._open[identity]
        asked = list(requests)
        for request in asked:
            self._made += 1
            self._open[str(self._made)] = _Open(request, now_s + _PATIENCE_S)
        return asked

    def answer(self, identity: str, rank: int, ms: float | None) -> ProbeResult | None:
        """What one end measured (None: it would not); the result once both are known."""
        probe = self._open.get(identity)
        if probe is None:
            return None
        if ms is None:
            del self._open[identity]
            return None
        probe.answers[rank] = ms
        result = probe.result
        if result is not None:
            del self._open[identity]
        return result

    def orders(self) -> dict[str, list[dict[str, Any]]]:
        """What each rank is to measure and has not yet."""
        found: dict[str, list[dict[str, Any]]] = {}
        for identity, probe in self._open.items():
            for rank, peer in _ends(probe.request):
                if rank not in probe.answers:
                    order = {"id": identity, "kind": probe.request.kind.value, "peer": peer}
                    found.setdefault(str(rank), []).append(order)
        return found

    def save(self) -> dict[str, Any]:
        """Plain values from which `restore` makes an equal one."""
        probes = [
            {
                "id": identity,
                "rank": probe.request.rank,
                "reference": probe.request.reference,
                "kind": probe.request.kind.value,
                "peer": probe.request.peer,
                "reference_peer": probe.request.reference_peer,
                "deadline_s": probe.deadline_s,
                "answers": list(probe.answers.items()),
            }
            for identity, probe in self._open.items()
        ]
        return {"made": self._made, "open": probes}

    @classmethod
    def restore(cls, saved: dict[str, Any]) -> OpenProbes:
        """Those that were saved."""
        probes = cls()
        probes._made = saved["made"]
        for item in saved["open"]:
            request = ProbeRequest(
                rank=item["rank"],
                reference=item["reference"],
                kind=ProbeKind(item["kind"]),
                peer=item["peer"],
                reference_peer=item["reference_peer"],
            )
            answers = {int(rank): float(ms) for rank, ms in item["answers"]}
            probes._open[item["id"]] = _Open(request, item["deadline_s"], answers)
        return probes


def _ends(request: ProbeRequest) -> Iterator[tuple[int, int]]:
    """Every rank that takes part, with the other end of its link; -1 where it works alone."""
    yield request.rank, request.peer
    yield request.reference, request.reference_peer
    if request.peer >= 0:
        yield request.peer, request.rank
        yield request.reference_peer, request.reference
