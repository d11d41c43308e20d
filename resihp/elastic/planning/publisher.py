"""Publication of plans: asks the plan source in a thread and proposes its plans to all ranks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch.distributed as dist

from resihp._shutdown import start_thread
from resihp.contracts import InfeasibleError, Plan

from ..rendezvous import keys
from ..rendezvous.joiners import Invitation, Joiners
from ..rendezvous.membership import Rendezvous
from ..rendezvous.proposals import Proposal, ProposalBoard
from ..state.events import LayoutChange
from ..state.phases import Phase
from ..state.runtime_state import RuntimeState
from .sources import PlanSource

_log = logging.getLogger("resihp.elastic")
_POLL_S = 0.1
_PATIENCE_S = 1.0
"""Longest wait for the source, and pause after a plan that cannot be used."""


class PlanPublisher:
    """On the first rank alive, proposes a new plan once the previous proposal is committed.

    A new plan has one of three reasons: ranks are to leave, joiners have announced themselves, or
    the source has a newer plan. Every rank runs a publisher; those of the other ranks only wait.

    refusal  why the job cannot run a plan, or None
    """

    def __init__(
        self,
        plans: PlanSource,
        rendezvous: Rendezvous,
        state: RuntimeState,
        refusal: Callable[[Plan], str | None],
    ) -> None:
        self._plans, self._rendezvous = plans, rendezvous
        self._state, self._refusal = state, refusal
        self._proposals = ProposalBoard(rendezvous)
        self._failed_once: int | None = None  # version whose proposal was given up once
        self._refused = -1
        self._planned_for: set[tuple[int, int, int]] = set()
        self._leaves: list[bool] = []  # announcements to be made
        self._published: tuple[int, int] | None = None  # generation whose successor is proposed
        self._proposal: Proposal | None = None
        self._has_failed = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="resihp-plans", daemon=True)

    def start(self) -> None:
        """Start to ask for plans."""
        start_thread(self._thread)

    def close(self) -> None:
        """Stop; a pending request is abandoned."""
        self._closed.set()

    def leave(self, *, hands_over: bool = True) -> None:
        """Announce that this rank is to leave, by a hand-over or not. Safe in a signal handler."""
        self._leaves.append(hands_over)

    def acknowledge(self, change: LayoutChange) -> None:
        """Report a committed plan to the source, without waiting for it."""
        threading.Thread(
            target=self._plans.applied,
            args=(change.plan, self._rendezvous.rank, change.step, change.pause_ms),
            name="resihp-acknowledge",
            daemon=True,
        ).start()

    # The loop.

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._publish_plans()
            except dist.DistError as error:
                if not self._rendezvous.stores.is_there():
                    _log.info("no new plans without the store: %s", error)
                    return
            except Exception:  # noqa: BLE001 without this thread no rank can leave
                level = logging.DEBUG if self._has_failed else logging.ERROR
                _log.log(level, "no plan for now, after an error:", exc_info=True)
                self._has_failed = True
                self._closed.wait(_PATIENCE_S)

    def _publish_plans(self) -> None:
        while not self._closed.is_set():
            while self._leaves:
                self._joiners.leave(self._rendezvous.rank, hands_over=self._leaves[0])
                self._leaves.pop(0)
            generation = self._settled_generation()
            is_first = self._rendezvous.alive[:1] == (self._rendezvous.rank,)
            if not is_first or generation in (None, self._published):
                self._closed.wait(_POLL_S)
                continue
            if self._proposal is not None and self._published is not None:
                self._check_failed(self._proposal, self._published[0])
            self._proposal = None
            proposal = self._next_proposal()
            is_current = generation == self._settled_generation()
            if not is_current:
                self._planned_for.clear()  # the layout changed meanwhile: ask for joiners again
            if proposal is None or not is_current or self._closed.is_set():
                continue
            self._publish(proposal)
            self._proposal, self._published = proposal, generation

    @property
    def _joiners(self) -> Joiners:
        return Joiners(self._rendezvous.stores.store)

    def _settled_generation(self) -> tuple[int, int] | None:
        """Current generation, None while the layout is changing: a plan made before is dropped."""
        if self._state.phase in (Phase.STREAMING, Phase.VOTING, Phase.RECOVERING):
            return None
        return self._rendezvous.recovery, self._state.generation

    def _publish(self, proposal: Proposal) -> None:
        """Publish the proposal, and invite the joiners in it."""
        state, rendezvous = self._state, self._rendezvous
        waiting = self._joiners.waiting()
        ranks = sorted(set(proposal.members) - set(rendezvous.alive))
        new = {rank: waiting.get(rank, 0) for rank in ranks}
        self._joiners.reset(new)
        self._proposals.publish(state.generation + 1, proposal)
        invitation = Invitation(rendezvous.recovery, state.generation, state.plan, proposal.members)
        for rank, number in new.items():
            self._joiners.invite(rank, number, invitation)

    # The next plan.

    def _next_proposal(self) -> Proposal | None:
        """The next proposal, or None after a wait of at most `_PATIENCE_S`."""
        current, alive = self._state.plan, self._rendezvous.alive
        requested = self._joiners.leaving()
        leaving = tuple(rank for rank in alive if requested.get(rank, False))
        if requested.keys() >= set(alive) or self._joiners.is_stopped():
            _log.warning("all ranks are to leave: the job ends")
            return Proposal(replace(current, version=current.version + 1), alive, alive)
        waiting = self._joiners.waiting()
        plan = self._plan_without(leaving) if leaving else self._plan_with(waiting)
        plan = plan or self._newer_plan(max(current.version, self._refused))
        if plan is None:
            return None
        missing = sorted(set(plan.layout.ranks) - {*alive, *waiting})
        reason = f"ranks {missing} are not there" if missing else self._refusal(plan)
        if reason is not None:
            self._refuse(plan, reason)
            return None
        members = set(alive) | (set(plan.layout.ranks) & set(waiting))
        leaving = tuple(rank for rank in leaving if rank not in plan.layout.ranks)
        return Proposal(plan, tuple(sorted(members)), leaving)

    def _plan_without(self, leaving: tuple[int, ...]) -> Plan | None:
        """A plan that does not use the `leaving` ranks, or None if there is none."""
        current = self._state.plan
        if not set(leaving) & set(current.layout.ranks):
            return replace(current, version=current.version + 1)
        staying = tuple(rank for rank in self._rendezvous.alive if rank not in leaving)
        try:
            return self._plans.after_loss(current, staying, self._state.completed)
        except InfeasibleError as error:
            _log.warning(
                "ranks %s are to leave, but no plan works without them: %s", leaving, error
            )
            self._closed.wait(_PATIENCE_S)
            return None

    def _plan_with(self, waiting: Mapping[int, int]) -> Plan | None:
        """A plan for joiners that announced themselves since the last one; None if it has no use
        for them. After a recovery all joiners count as new."""
        recovery = self._rendezvous.recovery
        announced = {(recovery, rank, number) for rank, number in waiting.items()}
        if announced <= self._planned_for:
            return None
        self._planned_for |= announced
        return self._plans.joined(self._state.plan, tuple(waiting), self._state.completed)

    def _newer_plan(self, after: int) -> Plan | None:
        """The source's next plan, or None. Plans up to version `after` are skipped."""
        plan = self._plans.wait(after, _PATIENCE_S)
        if plan is not None and plan.version <= after:
            self._closed.wait(_POLL_S)
            return None
        return plan

    # Refused plans.

    def _check_failed(self, proposal: Proposal, recovery: int) -> None:
        """Refuse a plan whose proposal was given up twice although no rank was lost.

        The first time a slow network may be the reason; what the model refuses fails again.
        """
        plan = proposal.plan
        is_given_up = self._rendezvous.recovery > recovery
        is_committed = self._state.plan.version == plan.version
        are_all_alive = set(proposal.members) <= set(self._rendezvous.alive)
        if is_committed or not is_given_up or not are_all_alive:
            return
        if plan.version == self._failed_once:
            reason = self._rendezvous.stores.store.get(keys.broken(recovery)).decode()
            self._refuse(plan, f"its generation could not be built: {reason}")
        self._failed_once = plan.version

    def _refuse(self, plan: Plan, reason: str) -> None:
        self._refused = plan.version
        _log.warning("plan %d is refused: %s", plan.version, reason)
        self._plans.refused(plan, self._rendezvous.rank, reason)
        self._closed.wait(_PATIENCE_S)
