"""Sources of plans: the sidecar, or the scheduler in this process while the sidecar is away."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from resihp import _own_packages
from resihp.client import Client
from resihp.contracts import InfeasibleError, Job, Plan, ServiceError, Status

if TYPE_CHECKING:
    from scheduler import ReplanDecision

_log = logging.getLogger("resihp.elastic")

_UNKNOWN_JOB = 404
_PAUSE_S = 0.5
_REGISTRATION_S = 30.0
"""Time in which the job may still be registered, which its first records do."""


class PlanSource(Protocol):
    """Makes plans for a job; one rank at a time asks it, the first one alive.

    1. `wait` is called again and again by a thread of the first rank alive.
    2. `after_loss` is called once in a recovery, by the training thread, and by the thread of 1
       for ranks that are to leave.
    3. `joined` is called by the thread of 1 when joiners have announced themselves.
    4. `applied` is called on every rank, in a thread of its own, when a plan is committed;
       `refused` by the thread of 1 for a plan that the job will not run.
    """

    def wait(self, after: int, seconds: float) -> Plan | None:
        """A plan newer than version `after`, or None after `seconds`. Never raises."""
        ...

    def after_loss(self, current: Plan, survivors: Collection[int], step: int) -> Plan:
        """A plan for the survivors. Raises `InfeasibleError` if there is none."""
        ...

    def joined(self, current: Plan, joiners: Collection[int], step: int) -> Plan | None:
        """A plan that uses some of `joiners`; None if it has no use for them. Never raises."""
        ...

    def applied(self, plan: Plan, rank: int, step: int, pause_ms: float) -> None:
        """Record that `plan` holds from `step` on. Never raises."""
        ...

    def refused(self, plan: Plan, rank: int, why: str) -> None:
        """Record that the job will not run `plan`. Never raises."""
        ...


class NoPlans:
    """Source of a job whose layout never changes."""

    def wait(self, after: int, seconds: float) -> Plan | None:
        """None, after `seconds`."""
        time.sleep(seconds)
        return None

    def after_loss(self, current: Plan, survivors: Collection[int], step: int) -> Plan:
        """Raises `InfeasibleError`."""
        raise InfeasibleError("elasticity", "this job's layout is fixed")

    def joined(self, current: Plan, joiners: Collection[int], step: int) -> Plan | None:
        """None."""
        return None

    def applied(self, plan: Plan, rank: int, step: int, pause_ms: float) -> None:
        """Do nothing."""

    def refused(self, plan: Plan, rank: int, why: str) -> None:
        """Do nothing."""


class LocalPlans(NoPlans):
    """Plans of ResiHP's scheduler in this process: for lost, leaving and joining ranks only.

    Slow devices are found by the sidecar alone. The scheduler is loaded here, not at the first
    loss, and by its location: the training script may have a module `scheduler` of its own.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        scheduler = _own_packages.load("scheduler")
        self._make_plan: Callable[..., Plan] = scheduler.make_plan
        self._replan: Callable[..., ReplanDecision] = scheduler.replan

    def after_loss(self, current: Plan, survivors: Collection[int], step: int) -> Plan:
        """A plan for the survivors that takes the shortest migration or, of equal ones, is
        quickest. Raises `InfeasibleError` if there is none."""
        lost = {*self._job.layout.ranks, *current.layout.ranks} - set(survivors)
        speeds = dict.fromkeys(sorted(lost), 0.0)
        decision = self._replan(self._job, current, speeds, step=step)
        if decision.plan is None:  # the job says that it takes on no other layout
            raise InfeasibleError("actions", decision.explanation)
        return replace(decision.plan, from_step=0)  # the step that the loss ended is run again

    def joined(self, current: Plan, joiners: Collection[int], step: int) -> Plan | None:
        """A plan with the joiners at full speed, or None if it uses none of them."""
        gone = set(self._job.layout.ranks) - set(current.layout.ranks) - set(joiners)
        speeds = {**dict.fromkeys(gone, 0.0), **dict.fromkeys(joiners, 1.0)}
        version = current.version + 1
        try:
            plan = self._make_plan(
                self._job, speeds, current.layout, version=version, from_step=step + 1
            )
        except InfeasibleError as error:
            _log.warning("no plan uses the joiners %s: %s", sorted(joiners), error)
            return None
        return plan if set(plan.layout.ranks) & set(joiners) else None


class ServicePlans:
    """Plans of the sidecar; after a loss those of `LocalPlans` if the sidecar does not answer.

    After each silence of the sidecar the current plan is sent to it: it may have missed a plan
    that was made in this process. Each silence is logged once.

    patience  longest wait for the sidecar's plan after a loss
    """

    def __init__(self, client: Client, job: Job, *, patience: timedelta) -> None:
        self._client, self._job, self._patience = client, job, patience
        self._local = LocalPlans(job)
        self._lost: set[int] = set()
        self._current: Plan | None = None  # None: the job's first plan
        self._reported: Plan | None = None  # the current plan as far as the sidecar knows it
        self._is_silent = False
        self._unknown_since_s: float | None = None

    def wait(self, after: int, seconds: float) -> Plan | None:
        """Long-poll the sidecar, after sending it the current plan if it may not know that."""
        try:
            self._tell_current(self._lost)
            plan = self._poll(after, seconds)
        except ServiceError as error:
            if not self._is_silent and not self._may_register_yet(error):
                _log.warning("no plans from the sidecar for now: %s", error)
                self._is_silent = True
            self._reported = None
            time.sleep(min(seconds, 1.0))
            return None
        if self._is_silent:
            _log.info("plans come from the sidecar again")
        self._is_silent, self._unknown_since_s = False, None
        return plan

    def _tell_current(self, lost: Collection[int]) -> None:
        """Send the current plan if the sidecar may not know it. Raises `ServiceError`."""
        current = self._current
        if current is not self._reported and current is not None:
            self._client.tell_plan(self._job.name, current, lost=lost)
            self._reported = current

    def _may_register_yet(self, error: ServiceError) -> bool:
        if error.status != _UNKNOWN_JOB:
            return False
        now_s = time.monotonic()
        self._unknown_since_s = self._unknown_since_s or now_s
        return now_s - self._unknown_since_s < _REGISTRATION_S

    def after_loss(self, current: Plan, survivors: Collection[int], step: int) -> Plan:
        """Report the loss, and wait for a plan of the sidecar that uses survivors only."""
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
            plan = self._await_plan(current, survivors)
        except ServiceError as error:
            _log.warning("planning without the sidecar: %s", error)
            plan = None
        return plan or self._local.after_loss(current, survivors, step)

    def joined(self, current: Plan, joiners: Collection[int], step: int) -> Plan | None:
        """The sidecar's plan with some of the joiners; that of `LocalPlans` if it is silent.

        None if the sidecar has no use for them now; it may offer a plan with them later. It takes
        none for a joiner whose number is still at work in the plan that it knows.
        """
        lost, self._lost = self._lost, self._lost - set(joiners)
        try:
            self._tell_current(lost)
            self._client.announce_joiners(self._job.name, ranks=joiners, step=step)
            return self._await_plan(current, {*current.layout.ranks, *joiners})
        except ServiceError as error:
            _log.warning("planning for joiners without the sidecar: %s", error)
            return self._local.joined(current, joiners, step)

    def applied(self, plan: Plan, rank: int, step: int, pause_ms: float) -> None:
        """Acknowledge the plan. If that fails, `wait` sends the plan later."""
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
            self._reported = plan
        except ServiceError as error:
            _log.warning("plan %d was applied but not acknowledged: %s", plan.version, error)
        self._current = plan

    def refused(self, plan: Plan, rank: int, why: str) -> None:
        """Report the refusal, so that the sidecar plans from the layout that stays."""
        try:
            self._client.acknowledge(
                self._job.name, plan.version, rank=rank, state="refused", detail=why
            )
        except ServiceError as error:
            _log.warning(
                "plan %d was refused but the sidecar does not know: %s", plan.version, error
            )

    def slowdowns(self) -> Mapping[int, float]:
        """Slowdowns of the ranks that the sidecar calls slow. Raises `ServiceError`."""
        verdicts = self._client.verdicts(self._job.name)
        return {one.rank: one.slowdown for one in verdicts if one.status is Status.FAIL_SLOW}

    def _poll(self, after: int, seconds: float) -> Plan | None:
        """Return the sidecar's next plan, or None after `seconds`, or before where a proxy answers.

        The plan may hold at once: its first step is the one after the newest reported, at which a
        job that went back to a checkpoint arrives late. What answers much too early is not asked
        again at once.
        """
        start = time.monotonic()
        plan = self._client.plan(self._job.name, after=after, wait=seconds)
        waited_s = time.monotonic() - start
        if plan is None and waited_s < seconds / 2:
            time.sleep(min(seconds - waited_s, _PAUSE_S))
        return None if plan is None else replace(plan, from_step=0)

    def _await_plan(self, current: Plan, available: Collection[int]) -> Plan | None:
        """The sidecar's next plan that uses `available` ranks only; None after the patience."""
        deadline = time.monotonic() + self._patience.total_seconds()
        after = current.version
        while (left := deadline - time.monotonic()) > 0:
            plan = self._poll(after, left)
            if plan is not None and set(plan.layout.ranks) <= set(available):
                return plan
            after = plan.version if plan is not None else after
        return None
