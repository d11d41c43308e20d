"""Where plans come from: the sidecar, or the scheduler in this process while it is away."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from resihp.contracts import InfeasibleError, Job, Plan, ServiceError

if TYPE_CHECKING:
    from resihp.client import Client

_log = logging.getLogger("resihp.elastic")


class PlanSource(Protocol):
    """Asked by one rank at a time, never by the training thread while all is well."""

    def wait(self, after: int, seconds: float) -> Plan | None:
        """A plan newer than version `after`, or None after `seconds`. Never raises."""
        ...

    def after_loss(self, current: Plan, survivors: Collection[int], step: int) -> Plan:
        """A plan for the survivors. Raises `InfeasibleError` if there is none."""
        ...

    def joined(self, current: Plan, standbys: Collection[int], step: int) -> Plan | None:
        """A plan that gives `standbys` a place; None if they are of no use now. Never raises."""
        ...

    def applied(self, plan: Plan, rank: int, step: int, pause_ms: float) -> None:
        """Told when `plan` holds from `step` on. Never raises."""
        ...

    def refused(self, plan: Plan, rank: int, why: str) -> None:
        """Told when the job will not take on `plan`. Never raises."""
        ...


class NoPlans:
    """For a job whose layout is never to change."""

    def wait(self, after: int, seconds: float) -> Plan | None:
        """Nothing, after `seconds`."""
        time.sleep(seconds)
        return None

    def after_loss(self, current: Plan, survivors: Collection[int], step: int) -> Plan:
        """Refuses."""
        raise InfeasibleError("elasticity", "this job's layout is fixed")

    def joined(self, current: Plan, standbys: Collection[int], step: int) -> Plan | None:
        """Nothing."""
        return None

    def applied(self, plan: Plan, rank: int, step: int, pause_ms: float) -> None:
        """Nothing."""

    def refused(self, plan: Plan, rank: int, why: str) -> None:
        """Nothing."""


class ServicePlans:
    """Plans of the sidecar; after a loss, the scheduler's own if the sidecar does not answer.

    Where the job stands is told again after any silence: a sidecar that was away, or that has been
    too slow, does not know of a plan that was made here. Each silence is logged once.
    """

    def __init__(self, client: Client, job: Job, *, patience: timedelta) -> None:
        self._client, self._job, self._patience = client, job, patience
        self._local = LocalPlans(job)
        self._lost: set[int] = set()
        self._held: Plan | None = None  # what this rank works by, where that is not the first plan
        self._told: Plan | None = None  # what the sidecar is known to know of that
        self._is_silent = False

    def wait(self, after: int, seconds: float) -> Plan | None:
        """Long-poll the sidecar; first tell it what it has missed."""
        try:
            held = self._held
            if held is not self._told and held is not None:
                self._client.tell_plan(self._job.name, held, lost=self._lost)
                self._told = held
            plan = self._client.plan(self._job.name, after=after, wait=seconds)
        except ServiceError as error:
            if not self._is_silent:
                _log.warning("no plans from the sidecar for now: %s", error)
            self._is_silent, self._told = True, None
            time.sleep(min(seconds, 1.0))
            return None
        if self._is_silent:
            _log.info("plans come from the sidecar again")
        self._is_silent = False
        return plan

    def after_loss(self, current: Plan, survivors: Collection[int], step: int) -> Plan:
        """Report the loss, and take the sidecar's plan once it uses survivors only."""
        self._lost |= {*self._job.layout.ranks, *current.layout.ranks} - set(survivors)
        try:
            self._client.report_failure(
                self._job.name,
                ranks=[rank for rank in current.layout.ranks if rank not in survivors],
                step=step,
                plan_version=current.version,
                reported_by=min(survivors),
                detail="connection lost",
            )
            plan = self._await(current, survivors)
        except ServiceError as error:
            _log.warning("planning without the sidecar: %s", error)
            plan = None
        return plan or self._local.after_loss(current, survivors, step)

    def joined(self, current: Plan, standbys: Collection[int], step: int) -> Plan | None:
        """The sidecar's plan with some of the newcomers; the scheduler's own if it does not answer.

        None if the sidecar finds them of no use now: it knows them, and may offer a plan later.
        """
        self._lost -= set(standbys)
        try:
            self._client.announce_joiners(self._job.name, ranks=standbys, step=step)
            return self._await(current, {*current.layout.ranks, *standbys})
        except ServiceError as error:
            _log.warning("planning for standbys without the sidecar: %s", error)
            return self._local.joined(current, standbys, step)

    def applied(self, plan: Plan, rank: int, step: int, pause_ms: float) -> None:
        """Acknowledge. What cannot be said now, `wait` says later."""
        try:
            self._client.acknowledge(
                self._job.name,
                plan.version,
                rank=rank,
                step=step,
                state="applied",
                pause_ms=pause_ms,
                digest=plan.digest,
            )
            self._told = plan
        except ServiceError as error:
            _log.warning("plan %d was applied but not acknowledged: %s", plan.version, error)
        self._held = plan

    def refused(self, plan: Plan, rank: int, why: str) -> None:
        """Say so, so that the sidecar plans from the layout that stays."""
        try:
            self._client.acknowledge(
                self._job.name, plan.version, rank=rank, state="refused", detail=why
            )
        except ServiceError as error:
            _log.warning("plan %d was refused, but nobody was told: %s", plan.version, error)

    def _await(self, current: Plan, survivors: Collection[int]) -> Plan | None:
        deadline = time.monotonic() + self._patience.total_seconds()
        after = current.version
        while (left := deadline - time.monotonic()) > 0:
            plan = self._client.plan(self._job.name, after=after, wait=left)
            if plan is not None and set(plan.layout.ranks) <= set(survivors):
                return plan
            after = plan.version if plan is not None else after
        return None


_log = logging.getLogger("resihp.elastic")


class LocalPlans:
    """A `PlanSource` that acts on what is certain: who is lost, who leaves, who joins."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def wait(self, after: int, seconds: float) -> Plan | None:
        """Nothing, after `seconds`: slow devices are found by the sidecar alone."""
        time.sleep(seconds)
        return None

    def after_loss(self, current: Plan, survivors: Collection[int], step: int) -> Plan:
        """A plan for the survivors. Raises `InfeasibleError` if there is none."""
        from scheduler import make_plan

        lost = {*self._job.layout.ranks, *current.layout.ranks} - set(survivors)
        speeds = dict.fromkeys(sorted(lost), 0.0)
        return make_plan(self._job, speeds, current.layout, version=current.version + 1)

    def joined(self, current: Plan, standbys: Collection[int], step: int) -> Plan | None:
        """A plan with the newcomers at full speed, if it uses any of them."""
        from scheduler import make_plan

        gone = set(self._job.layout.ranks) - set(current.layout.ranks) - set(standbys)
        speeds = {**dict.fromkeys(gone, 0.0), **dict.fromkeys(standbys, 1.0)}
        version = current.version + 1
        try:
            plan = make_plan(self._job, speeds, current.layout, version=version, from_step=step + 1)
        except InfeasibleError as error:
            _log.warning("standbys %s find no place: %s", sorted(standbys), error)
            return None
        return plan if set(plan.layout.ranks) & set(standbys) else None

    def applied(self, plan: Plan, rank: int, step: int, pause_ms: float) -> None:
        """Nobody to tell."""

    def refused(self, plan: Plan, rank: int, why: str) -> None:
        """Nobody to tell."""
