"""Plans that change nothing but quotas, for training loops whose layout stays."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from resihp._shutdown import start_thread
from resihp.contracts import ContractError, Plan

from .sources import PlanSource

_log = logging.getLogger("resihp.elastic")
_POLL_S = 0.1
_PATIENCE_S = 1.0
"""Longest wait for the source, and pause after an answer that cannot be used."""


@runtime_checkable
class SlowdownSource(Protocol):
    """Plan source that also knows how slow single devices are."""

    def slowdowns(self) -> Mapping[int, float]:
        """Slowdown of each slow rank. May raise `ServiceError`."""
        ...


class PlanVersionHolder(Protocol):
    """Part of `resihp.Monitor` that says which plan later records belong to."""

    plan_version: int


@dataclass(frozen=True)
class QuotaPlan:
    """A plan whose layout is the current one.

    quotas     microbatches by replica
    slowdowns  of its slow ranks, where the source knows them
    """

    plan: Plan
    quotas: Mapping[int, int]
    slowdowns: Mapping[int, float]

    @property
    def version(self) -> int:
        """Version of the plan."""
        return self.plan.version

    def speed(self, ranks: Iterable[int]) -> float:
        """Speed of the slowest of `ranks`; 1.0 is healthy."""
        slowdown = max(self.slowdowns.get(rank, 1.0) for rank in ranks)
        return 1.0 / slowdown if 1.0 < slowdown < math.inf else 1.0

    @property
    def has_slow_ranks(self) -> bool:
        """True where slowdowns measure the speeds; else quotas are the only measure."""
        return any(slowdown > 1.0 for slowdown in self.slowdowns.values())


class QuotaPlanPoller:
    """Asks a plan source in a thread of one rank and keeps its newest plan that can be used.

    Neither a source that raises, stays silent or answers with nonsense nor a plan of another layout
    reaches the training loop: it is counted in `failures` and logged once.

    read  returns the quotas of a plan by replica; raises `ContractError` for a plan that the job
          cannot take
    """

    def __init__(
        self, plans: PlanSource, rank: int, read: Callable[[Plan], Mapping[int, int]]
    ) -> None:
        self.failures = 0
        self._plans, self._rank, self._read = plans, rank, read
        self._newest: QuotaPlan | None = None
        self._after = 0
        self._closed: threading.Event | None = None

    def start(self, after: int) -> None:
        """Ask for plans newer than version `after` from now on, unless it does so already."""
        if self._closed is None:
            self._after, self._closed = max(after, self._after), threading.Event()
            thread = threading.Thread(
                target=self._run, args=(self._closed,), name="resihp-quotas", daemon=True
            )
            start_thread(thread, self._closed.set)

    def newest(self, after: int, step: int) -> QuotaPlan | None:
        """Return the newest plan if it is later than version `after` and may hold at `step`."""
        found = self._newest
        if found is None or found.version <= after or found.plan.from_step > step:
            return None
        return found

    def acknowledge(self, plan: Plan, step: int) -> None:
        """Report that `plan` holds from `step` on, in a thread of its own."""

        def report() -> None:
            try:
                self._plans.applied(plan, self._rank, step, 0.0)
            except Exception as error:  # noqa: BLE001 the boundary to a source of the user's
                self._fail(f"acknowledging plan {plan.version}", error)

        start_thread(threading.Thread(target=report, name="resihp-acknowledge", daemon=True))

    def close(self) -> None:
        """Stop; a pending request is abandoned."""
        if self._closed is not None:
            self._closed.set()
            self._closed = None

    def _run(self, closed: threading.Event) -> None:
        while not closed.is_set():
            try:
                plan = self._plans.wait(self._after, _PATIENCE_S)
                if closed.is_set():
                    return
                if plan is None or plan.version <= self._after:
                    closed.wait(_POLL_S)
                    continue
                self._take(plan)
            except Exception as error:  # noqa: BLE001 the boundary to a source of the user's
                self._fail("asking for a plan", error)
                closed.wait(_PATIENCE_S)

    def _take(self, plan: Plan) -> None:
        try:
            quotas = self._read(plan)
        except ContractError as error:
            self._after = plan.version
            self._fail(f"plan {plan.version}", error)
            self._plans.refused(plan, self._rank, str(error))
            return
        slowdowns: Mapping[int, float] = {}
        if isinstance(self._plans, SlowdownSource):
            with suppress(Exception):  # the quotas of the plan are a measure too
                slowdowns = dict(self._plans.slowdowns())
        self._newest = QuotaPlan(plan, quotas, slowdowns)
        self._after = plan.version

    def _fail(self, what: str, error: Exception) -> None:
        self.failures += 1
        level = logging.WARNING if self.failures == 1 else logging.DEBUG
        _log.log(level, "%s: %s; training continues with the quotas it has", what, error)


def quotas_by_replica(plan: Plan, members: int, microbatches: int) -> dict[int, int]:
    """Return the microbatches of each replica, replicas being `members` consecutive ranks.

    Raises `ContractError` if the plan has another layout or another number of microbatches.
    """
    if plan.microbatches != microbatches:
        raise ContractError(
            "quotas", f"of plan {plan.version} sum to {plan.microbatches}, not {microbatches}"
        )
    found: dict[int, int] = {}
    for replica, quota in zip(plan.layout.replicas, plan.quotas, strict=True):
        first = min(replica.ranks)
        if sorted(replica.ranks) != list(range(first, first + members)) or first % members:
            raise ContractError(
                "layout", f"of plan {plan.version} has a replica of ranks {replica.ranks}: this "
                "loop changes quotas alone, and its replicas stay"
            )  # fmt: skip
        found[first // members] = quota
    return found
