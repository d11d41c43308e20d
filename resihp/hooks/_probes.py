"""Probes that the sidecar asks for: taken in by the sender, run on the training thread between two
steps, answered by the sender."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from ._probe_kernels import TIMED
from ._stats import FailureLog

LinkProbe = Callable[[int], float | None]
"""Best time in ms of a small transfer with a peer; None if the two did not meet. It bounds its own
waiting: training waits for it."""

_PAUSE_S = 1.0
"""Least time between two probes of this process."""
_CALL_S = 5.0
"""Time between two signs of life of a rank without work."""
_MOST_WAITING = 4
_OFF = ("0", "false", "no", "off")


@dataclass(frozen=True)
class Order:
    """A probe that the sidecar asks this rank for; `peer` is the other end of a link, else -1."""

    id: str
    kind: str
    peer: int = -1


@dataclass(frozen=True)
class Answer:
    """What became of an order: its best time, or why there is none."""

    id: str
    ms: float | None = None
    detail: str = ""


class Probes:
    """Orders and answers of one rank.

    Both ends of each queue are used by one thread each: the sender puts orders in and takes
    answers out, the training thread the other way round. A probe runs at most once a second and
    measures for `budget_ms`; trouble with it is counted, logged once, and answered as a refusal.
    """

    def __init__(
        self, failures: FailureLog, *, allowed: bool, link: LinkProbe | None, budget_ms: float
    ) -> None:
        self._failures, self._allowed = failures, allowed
        self._link, self._budget_ms = link, budget_ms
        self.orders: deque[Order] = deque()
        self.answers: deque[Answer] = deque()
        self._last_s = self._called_s = float("-inf")
        self._known: deque[str] = deque(maxlen=64)

    def take(self, document: object) -> None:
        """Orders in the sidecar's answer to telemetry. Sender's thread."""
        asked = document.get("probes") if isinstance(document, Mapping) else None
        for item in asked if isinstance(asked, Sequence) else ():
            order = _order(item)
            if order is None or order.id in self._known:
                continue
            self._known.append(order.id)
            if not self._allowed:
                self.answers.append(Answer(order.id, detail="probes are forbidden on this rank"))
            elif len(self.orders) < _MOST_WAITING:
                self.orders.append(order)

    def is_call_due(self) -> bool:
        """Whether a rank without work should say again that it is there. Training thread."""
        now_s = perf_counter()
        due = self._allowed and now_s - self._called_s >= _CALL_S
        self._called_s = now_s if due else self._called_s
        return due

    def run(self) -> None:
        """Run the oldest order, if it is time for one. Training thread, between two steps."""
        now_s = perf_counter()
        if not self.orders or now_s - self._last_s < _PAUSE_S:
            return
        order = self.orders.popleft()
        self._last_s = now_s
        try:
            ms, detail = self._measure(order)
        except Exception as error:  # noqa: BLE001 the boundary: training goes on without the answer
            self._failures.add("a probe", error)
            ms, detail = None, f"failed: {error!r}"
        self.answers.append(Answer(order.id, ms, detail))

    def _measure(self, order: Order) -> tuple[float | None, str]:
        if order.kind in TIMED:
            return TIMED[order.kind](self._budget_ms), ""
        if order.kind == "link" and self._link is not None:
            ms = self._link(order.peer)
            return ms, "" if ms is not None else "the peer did not answer in time"
        return None, f"this rank has no {order.kind} probe"

    def reset(self) -> None:
        """Nothing asked and nothing to say: the state of a forked child."""
        self.orders.clear()
        self.answers.clear()


def allowed_by_environment() -> bool:
    """Whether RESIHP_PROBES forbids probes."""
    return os.environ.get("RESIHP_PROBES", "").strip().lower() not in _OFF


def _order(item: Any) -> Order | None:
    """None for what a newer sidecar may mean and this process does not understand."""
    if not isinstance(item, Mapping):
        return None
    identity, kind, peer = item.get("id"), item.get("kind"), item.get("peer", -1)
    if not (isinstance(identity, str) and isinstance(kind, str) and isinstance(peer, int)):
        return None
    return Order(identity, kind, peer)
