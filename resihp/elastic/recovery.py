"""What a rank does when others are lost: agree, settle, and go on in a generation without them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from resihp.contracts import ContractError, InfeasibleError, Plan, StateLostError
from resihp.layout import moves

from .planning.sources import PlanSource
from .process_groups.layout_groups import LayoutGroups
from .rendezvous.consensus import RecoveryDecision, SurvivorReport, agree
from .rendezvous.membership import Rendezvous
from .rendezvous.proposals import Proposal, ProposalBoard
from .reshard.coordinator import ReshardCoordinator
from .state.runtime_state import RuntimeState
from .step import Setup
from .step.schedule import check_plan

_log = logging.getLogger("resihp.elastic")


class Recovery:
    """One rank's side of it. `complete` makes the update of a step, given its norm.

    can_restore  state that nobody alive holds can be read from a checkpoint
    """

    def __init__(
        self,
        setup: Setup,
        present: RuntimeState,
        rendezvous: Rendezvous,
        plans: PlanSource,
        switching: ReshardCoordinator,
        complete: Callable[[int, float], None],
        *,
        can_restore: bool,
    ) -> None:
        self._setup, self._present, self._rendezvous = setup, present, rendezvous
        self._plans, self._switching, self._complete = plans, switching, complete
        self._proposals = ProposalBoard(rendezvous)
        self._can_restore = can_restore

    def recover(self, reason: str) -> None:
        """Agree with the survivors on what holds, and take on a generation without the lost ranks.

        Raises `PeerLostError` if another rank is lost on the way: call it again.
        """
        rendezvous, switching, present = self._rendezvous, self._switching, self._present
        switching.paused_at = switching.paused_at or time.perf_counter()
        _log.warning("rank %d: %s", rendezvous.rank, reason)
        rendezvous.request_recovery(reason, self._leaves())
        decision = agree(rendezvous, self._report(), present.plan.microbatches)
        self._settle(decision)
        lost = tuple(sorted(set(present.plan.layout.ranks) - set(decision.survivors)))
        if rendezvous.rank == decision.survivors[0]:
            self._publish(decision)
        offer = self._proposals.wait(decision.next_generation)
        kept = () if offer.missing_state else decision.kept
        switching.repair(decision.next_generation, offer, lost, kept)
        switching.switch(lost, kept)

    def _leaves(self) -> list[str]:
        """The passes that the other ranks of this one's replica cannot finish without it."""
        left, present, doubt = [], self._present, self._switching.doubt
        if present.engine is not None:
            step = present.completed + present.engine.is_accumulated
            left.append(passes(present.generation, present.engine.groups, step))
        if doubt is not None and doubt.groups is not None:
            step = present.completed if doubt.rewound is None else doubt.rewound
            left.append(passes(doubt.generation, doubt.groups, step))
        return left

    def _report(self) -> SurvivorReport:
        present = self._present
        pending, doubt = self._switching.pending, self._switching.doubt
        holdings = [] if present.engine is None else [present.engine.holding(present.generation)]
        if doubt is not None and doubt.groups is not None:
            begun = doubt.rest.shares[doubt.groups.place.dp].begun if doubt.rest else ()
            summed = self._switching.is_handed_over
            holdings.append(doubt.groups.holding(doubt.generation, begun, summed=summed))
        return SurvivorReport(
            generation=present.generation,
            completed=present.completed,
            holdings=tuple(holdings),
            norm=present.norm,
            in_doubt=doubt.generation if doubt is not None else None,
            rewound=doubt.rewound if doubt is not None else None,
            seen=pending.target.generation if pending is not None else present.generation,
            idle=present.engine is None,
        )

    def _settle(self, decision: RecoveryDecision) -> None:
        """Bring this rank to the state that was decided."""
        present, switching = self._present, self._switching
        doubt = switching.doubt
        if doubt is not None and decision.generation == doubt.generation:
            switching.adopt(doubt)
            switching.paused_at = time.perf_counter()
        switching.catch_up(decision.generation)
        if present.engine is not None and decision.completed > present.completed:
            assert decision.norm is not None
            self._complete(present.completed, decision.norm)
        present.completed = decision.completed
        switching.forget()

    def _publish(self, decision: RecoveryDecision) -> None:
        """Offer a plan for the survivors, or the reason why there is none."""
        present, gone = self._present, ""
        plan, lost = present.plan, set(present.plan.layout.ranks) - set(decision.survivors)
        try:
            if lost:
                plan = self._plans.after_loss(plan, decision.survivors, decision.completed)
            check_plan(plan, self._setup.model.parameters, present.plan.microbatches)
            gone = self._gone(plan, lost)
        except (ContractError, InfeasibleError, StateLostError) as error:
            self._proposals.publish(decision.next_generation, str(error))
            return
        offer = Proposal(plan, decision.survivors, missing_state=gone)
        self._proposals.publish(decision.next_generation, offer)

    def _gone(self, plan: Plan, lost: set[int]) -> str:
        """The state that nobody alive holds; raises `StateLostError` if it is lost for ever."""
        try:
            moves(self._present.plan.layout, plan.layout, self._setup.model.parameters, lost=lost)
        except StateLostError as error:
            if not self._can_restore:
                raise StateLostError(f"{error}; the job keeps no checkpoints") from error
            _log.warning("%s; going back to the newest checkpoint", error)
            return str(error)
        return ""


def passes(generation: int, groups: LayoutGroups, step: int) -> str:
    """Names the passes of one step in the replica of `groups` in which this rank stands."""
    return f"{generation}.{groups.place.dp}.{step}"
