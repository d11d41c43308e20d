"""Recovery of a rank after the loss of others: agree, settle, continue without them."""

from __future__ import annotations

import logging

from resihp.contracts import ContractError, InfeasibleError, Plan, StateLostError
from resihp.layout import moves

from .coordinator import ReshardCoordinator
from .planning.sources import PlanSource
from .process_groups.layout_groups import LayoutGroups
from .rendezvous.consensus import RecoveryDecision, SurvivorReport, agree
from .rendezvous.proposals import Proposal, ProposalBoard
from .reshard.build import ReshardContext
from .state.runtime_state import RuntimeState
from .step.schedule import check_plan

_log = logging.getLogger("resihp.elastic")


class Recovery:
    """One rank's part in a recovery.

    can_restore  state that no rank alive holds can be read from a checkpoint
    """

    def __init__(
        self,
        context: ReshardContext,
        state: RuntimeState,
        plans: PlanSource,
        coordinator: ReshardCoordinator,
        *,
        can_restore: bool,
    ) -> None:
        self._setup, self._rendezvous, self._state = context.setup, context.rendezvous, state
        self._plans, self._coordinator, self._can_restore = plans, coordinator, can_restore
        self._proposals = ProposalBoard(context.rendezvous)

    def recover(self, reason: str, steps: int) -> None:
        """Agree with the survivors on the state, and continue in a layout without the lost ranks.

        There is nothing to continue with once all `steps` are completed. Raises `PeerLostError` if
        another rank is lost meanwhile: call it again.
        """
        rendezvous, state = self._rendezvous, self._state
        state.pause()
        _log.warning("rank %d: %s", rendezvous.rank, reason)
        rendezvous.request_recovery(reason, self._abandoned())
        self._coordinator.abort_groups()
        self._coordinator.stop_transfer()
        decision = agree(rendezvous, self._report(), state.plan.microbatches)
        self._settle(decision)
        if decision.completed >= steps and self._setup.optimizer_replicas is None:
            return  # else parameters may still have to be gathered
        lost = tuple(sorted(set(state.plan.layout.ranks) - set(decision.survivors)))
        if rendezvous.rank == decision.survivors[0]:
            self._publish(decision)
        proposal = self._proposals.wait(decision.next_generation)
        kept = () if proposal.missing_state else decision.kept
        self._coordinator.prepare(decision.next_generation, proposal, lost, kept)
        self._coordinator.reshard()

    def _abandoned(self) -> list[str]:
        """The passes that the other ranks of this rank's replica cannot finish without it."""
        abandoned, state, in_doubt = [], self._state, self._state.in_doubt
        if state.engine is not None:
            step = state.completed + state.engine.is_accumulated
            abandoned.append(passes(state.generation, state.engine.groups, step))
        if in_doubt is not None and in_doubt.groups is not None:
            step = state.completed if in_doubt.rewound is None else in_doubt.rewound
            abandoned.append(passes(in_doubt.number, in_doubt.groups, step))
        return abandoned

    def _report(self) -> SurvivorReport:
        state, in_doubt = self._state, self._state.in_doubt
        holdings = [] if state.engine is None else [state.engine.holding(state.generation)]
        if in_doubt is not None and in_doubt.groups is not None:
            rest = in_doubt.rest
            begun = rest.shares[in_doubt.groups.place.dp].begun if rest else ()
            summed = self._coordinator.can_update_in_doubt
            holdings.append(in_doubt.groups.holding(in_doubt.number, begun, summed=summed))
        return SurvivorReport(
            generation=state.generation,
            completed=state.completed,
            holdings=tuple(holdings),
            norm=state.norm,
            in_doubt=in_doubt.number if in_doubt is not None else None,
            rewound=in_doubt.rewound if in_doubt is not None else None,
            seen=state.preparing.number if state.preparing is not None else state.generation,
            idle=state.engine is None,
        )

    def _settle(self, decision: RecoveryDecision) -> None:
        """Bring this rank to the state of the decision."""
        state, coordinator = self._state, self._coordinator
        in_doubt = state.in_doubt
        if in_doubt is not None and decision.generation == in_doubt.number:
            coordinator.commit(in_doubt)
            state.pause()
        coordinator.catch_up(decision.generation)
        if state.engine is not None and decision.completed > state.completed:
            assert decision.norm is not None
            coordinator.update(state.completed, decision.norm)
        state.resume(decision.completed)
        coordinator.abort()

    def _publish(self, decision: RecoveryDecision) -> None:
        """Propose a plan for the survivors, or publish the reason for which there is none."""
        state, missing = self._state, ""
        plan, lost = state.plan, set(state.plan.layout.ranks) - set(decision.survivors)
        try:
            if lost:
                plan = self._plans.after_loss(plan, decision.survivors, decision.completed)
            parameters, most = self._setup.model.parameters, self._setup.max_in_flight
            check_plan(plan, parameters, state.plan.microbatches, most)
            missing = self._missing_state(plan, lost)
        except (ContractError, InfeasibleError, StateLostError) as error:
            self._proposals.publish(decision.next_generation, str(error))
            return
        proposal = Proposal(plan, decision.survivors, missing_state=missing)
        self._proposals.publish(decision.next_generation, proposal)

    def _missing_state(self, plan: Plan, lost: set[int]) -> str:
        """Names the state that no rank alive holds, or "".

        Raises `StateLostError` if there is such state and no checkpoint.
        """
        try:
            moves(
                self._state.plan.layout,
                plan.layout,
                self._setup.model.parameters,
                lost=lost,
                copies=self._setup.state_copies,
            )
        except StateLostError as error:
            if not self._can_restore:
                raise StateLostError(f"{error}; the job keeps no checkpoints") from error
            _log.warning("%s; going back to the newest checkpoint", error)
            return str(error)
        return ""


def passes(generation: int, groups: LayoutGroups, step: int) -> str:
    """Name of the passes of one step in this rank's replica."""
    return f"{generation}.{groups.place.dp}.{step}"
