"""Talks to the plan source off the training thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import replace

import torch.distributed as dist

from resihp._shutdown import start_thread
from resihp.contracts import InfeasibleError, Plan

from ..rendezvous.joiners import Invitation, Joiners
from ..rendezvous.membership import Rendezvous
from ..rendezvous.proposals import Proposal
from ..state.events import LayoutChange
from ..state.runtime_state import RuntimeState
from .sources import PlanSource

_log = logging.getLogger("resihp.elastic")
_TURN_S = 0.1
_PATIENCE_S = 1.0


class PlanPublisher:
    """On the first rank alive, publishes each new plan once the one before is taken on.

    A plan comes from the source; or because a rank is to leave, or because a standby could help.
    `is_settled` is False while the layout is changing; a plan that was made before is then stale.
    """

    def __init__(
        self,
        plans: PlanSource,
        rendezvous: Rendezvous,
        present: RuntimeState,
        is_settled: Callable[[], bool],
        refusal: Callable[[Plan], str | None],
    ) -> None:
        self._plans, self._rendezvous = plans, rendezvous
        self._present, self._is_settled, self._refusal = present, is_settled, refusal
        self._tried = self._refused = -1
        self._offered: set[tuple[int, int, int]] = set()
        self._wants_to_leave = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="resihp-agent", daemon=True)

    def start(self) -> None:
        """Begin to ask for plans."""
        start_thread(self._thread)

    def close(self) -> None:
        """Stop; a question that is under way is abandoned."""
        self._over.set()

    def leave(self) -> None:
        """This rank has been told to leave. Safe in a signal handler."""
        self._wants_to_leave = True

    def acknowledge(self, switch: LayoutChange) -> None:
        """Tell the source that a plan holds, without waiting for it."""
        threading.Thread(
            target=self._plans.applied,
            args=(switch.plan, self._rendezvous.rank, switch.step, switch.pause_ms),
            name="resihp-acknowledge",
            daemon=True,
        ).start()

    def _run(self) -> None:
        try:
            self._serve(Joiners(self._rendezvous.link.store))
        except dist.DistError as error:
            _log.info("no new plans without the store: %s", error)

    def _serve(self, standbys: Joiners) -> None:
        published, offered = (-1, -1), None
        while not self._over.is_set():
            if self._wants_to_leave:
                standbys.leave(self._rendezvous.rank)
                self._wants_to_leave = False
            turn = (self._rendezvous.recovery, self._present.generation)
            is_first = self._rendezvous.alive[:1] == (self._rendezvous.rank,)
            if not is_first or turn == published or not self._is_settled():
                self._over.wait(_TURN_S)
                continue
            if offered is not None and self._has_failed(offered, published):
                self._failed(offered.plan, self._rendezvous.broke(published[0]))
            offered = None
            offer = self._next(standbys)
            still = (
                self._rendezvous.recovery,
                self._present.generation,
            ) == turn and self._is_settled()
            if offer is not None and still and not self._over.is_set():
                self._publish(offer, standbys)
                published, offered = turn, offer

    def _has_failed(self, offer: Proposal, turn: tuple[int, int]) -> bool:
        """Whether an offer was given up although nobody was lost."""
        was_given_up = self._rendezvous.recovery > turn[0]
        is_held = self._present.plan.version == offer.plan.version
        are_there = set(offer.members) <= set(self._rendezvous.alive)
        return was_given_up and are_there and not is_held

    def _failed(self, plan: Plan, why: str) -> None:
        """A slow network may have been the reason, once; what the model refuses fails again."""
        if plan.version == self._tried:
            self._refuse(plan, f"its world could not be taken on: {why}")
        self._tried = plan.version

    def _next(self, standbys: Joiners) -> Proposal | None:
        """What to do next, if anything."""
        current, alive = self._present.plan, self._rendezvous.alive
        told = standbys.leaving()
        leaving = tuple(rank for rank in alive if rank in told)
        waiting = standbys.waiting()
        plan: Plan | None = None
        if leaving == alive:
            _log.warning("all ranks have been told to leave: the job ends")
            return Proposal(replace(current, version=current.version + 1), alive, leaving)
        if leaving:
            plan = self._without(leaving)
        elif offered := self._new_among(waiting):
            self._offered |= offered
            plan = self._plans.joined(current, tuple(waiting), self._present.completed)
        plan = plan or self._newer(max(current.version, self._refused))
        if plan is None or self._refuses(plan, {*alive, *waiting}):
            return None
        members = set(alive) | (set(plan.layout.ranks) & set(waiting))
        leaving = tuple(rank for rank in leaving if rank not in plan.layout.ranks)
        return Proposal(plan, tuple(sorted(members)), leaving)

    def _newer(self, after: int) -> Plan | None:
        """The source's next plan. One that is not newer is passed over: it has been taken on."""
        plan = self._plans.wait(after, _PATIENCE_S)
        if plan is not None and plan.version <= after:
            self._over.wait(_TURN_S)
            return None
        return plan

    def _refuses(self, plan: Plan, there: Collection[int]) -> bool:
        """Whether the plan asks too much; its source is told, and not asked for it again."""
        missing = sorted(set(plan.layout.ranks) - set(there))
        why = f"ranks {missing} are not there" if missing else self._refusal(plan)
        if why is not None:
            self._refuse(plan, why)
        return why is not None

    def _refuse(self, plan: Plan, why: str) -> None:
        self._refused = plan.version
        _log.warning("plan %d is refused: %s", plan.version, why)
        self._plans.refused(plan, self._rendezvous.rank, why)
        self._over.wait(_PATIENCE_S)

    def _new_among(self, waiting: dict[int, int]) -> set[tuple[int, int, int]]:
        """Standbys that have not been thought of yet, or not since the last loss."""
        now = {(self._rendezvous.recovery, rank, number) for rank, number in waiting.items()}
        return now - self._offered

    def _without(self, leaving: tuple[int, ...]) -> Plan | None:
        current = self._present.plan
        if not set(leaving) & set(current.layout.ranks):
            return replace(current, version=current.version + 1)
        stay = tuple(rank for rank in self._rendezvous.alive if rank not in leaving)
        try:
            return self._plans.after_loss(current, stay, self._present.completed)
        except InfeasibleError as error:
            _log.warning("ranks %s are to leave, but no plan does without them: %s", leaving, error)
            self._over.wait(_PATIENCE_S)
            return None

    def _publish(self, offer: Proposal, standbys: Joiners) -> None:
        present, rendezvous = self._present, self._rendezvous
        alive = tuple(sorted(set(offer.members)))
        invitation = Invitation(rendezvous.recovery, present.generation, present.plan, alive)
        waiting, new = standbys.waiting(), sorted(set(offer.members) - set(rendezvous.alive))
        standbys.welcome(new)
        rendezvous.publish(present.generation + 1, offer)
        for rank in new:
            standbys.invite(rank, waiting.get(rank, 0), invitation)
