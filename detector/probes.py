"""Probes: the same short work on a suspect and on a healthy peer, between two steps.

The detector makes requests and takes answers; the service delivers both. A probe has the same work
on both ends by construction, so that it needs no workload model, and it separates a slow processor
from slow memory. It lasts a few milliseconds; their number is limited.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from resihp.contracts import ContractError

from .evidence.sequential import log_ratio
from .persistence import Persistent

_WAIT_S = 20.0
_SPREAD = 0.03
"""Spread (log) of the ratio of two probes on healthy devices."""
_MOST_EVIDENCE = 6.0
"""Largest evidence of one probe (log)."""


class ProbeKind(StrEnum):
    """Work of a probe: a matrix product, a copy within memory, a transfer over a link."""

    GEMM = "gemm"
    MEMORY = "memory"
    LINK = "link"


@dataclass(frozen=True, kw_only=True)
class ProbeRequest:
    """Request to run `kind` on `rank` and on `reference`; for LINK, on the links between `rank` and
    `peer` and between `reference` and `reference_peer` (-1: no link)."""

    rank: int
    reference: int
    kind: ProbeKind
    peer: int = -1
    reference_peer: int = -1


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """Best time in ms of a probe on the suspect and on its reference."""

    rank: int
    reference: int
    kind: ProbeKind
    rank_ms: float
    reference_ms: float

    def __post_init__(self) -> None:
        for name in ("rank_ms", "reference_ms"):
            if not getattr(self, name) > 0:
                raise ContractError(name, "must be above 0")

    @property
    def slowdown(self) -> float:
        """Time on the suspect over time on the reference."""
        return self.rank_ms / self.reference_ms

    @property
    def words(self) -> str:
        """The result as an evidence sentence."""
        where = "that of" if self.kind is ProbeKind.LINK else "on"
        return (
            f"a {self.kind.value} probe took {self.slowdown:.2f} times as long as {where} rank "
            f"{self.reference}"
        )


class ProbeBudget(Persistent):
    """Limit of probes: at most `per_minute`, and no rank twice within `_WAIT_S` seconds."""

    _saved = ("_asked", "_last")
    _asked: deque[float]
    _last: dict[int, float]

    def __init__(self, per_minute: int) -> None:
        self._per_minute = per_minute
        self._asked = deque()
        self._last = {}

    def allow(self, rank: int, kinds: int, now: float) -> bool:
        """Returns whether `kinds` probes of a rank may be asked for at `now` (seconds); counts
        them."""
        while self._asked and self._asked[0] <= now - 60.0:
            self._asked.popleft()
        if now - self._last.get(rank, -np.inf) < _WAIT_S:
            return False
        if len(self._asked) + kinds > self._per_minute:
            return False
        self._asked.extend([now] * kinds)
        self._last[rank] = now
        return True


def probe_gain(result: ProbeResult, slowdown: float) -> float:
    """Log-likelihood ratio that a probe adds: the suspected slowdown against none; bounded."""
    shift = np.asarray(max(np.log(slowdown), _SPREAD))
    ratio = float(log_ratio(np.asarray(np.log(result.slowdown)), np.asarray(_SPREAD), shift))
    return min(max(ratio, -_MOST_EVIDENCE), _MOST_EVIDENCE)
