"""Coordination of a change of layout: the two-phase commit of one generation after another."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from resihp._shutdown import start_thread
from resihp.contracts import ContractError, Plan

from .checkpointing.protocol import StateManager
from .microbatches.ledger import SurvivingSum, indices, spans
from .process_groups.abortable import close_groups
from .process_groups.communicators import at_once
from .rendezvous.proposals import Proposal, ProposalBoard
from .reshard.build import Generation, ReshardContext
from .reshard.spreading import CopyPace
from .reshard.transfer import StateTransfer
from .state.events import Callbacks, LayoutChange
from .state.phases import Phase
from .state.runtime_state import RuntimeState
from .step import Engine, ReducedStep
from .step.schedule import check_plan


class ReshardCoordinator:
    """Takes this rank from one generation of the layout to the next.

    1. `poll_proposal`: every rank builds the proposed generation in the background.
    2. The all-reduce that ends a step counts the ranks that are ready (`ready_generation`,
       `all_ready`). When all are, all know it in the same step and `start_reshard`.
    3. During the next step, or several if one is shorter than the copy, the state is copied, then
       each gradient as soon as it is summed (`is_transferring`).
    4. `reshard`: when all gradients are with the new holders, all ranks vote, and each commits.
       From the vote on the generation is in doubt: if a rank is lost, the survivors agree on the
       committed one (`Recovery`).

    New quotas alone need neither transfer nor vote: they are committed after step 2.
    """

    def __init__(
        self,
        context: ReshardContext,
        state: RuntimeState,
        callbacks: Callbacks,
        checkpoints: StateManager,
    ) -> None:
        self._context, self._state, self._callbacks = context, state, callbacks
        self._checkpoints = checkpoints
        self._proposals = ProposalBoard(context.rendezvous)
        self._transfer: StateTransfer | None = None

    # Before the change.

    def start_job(self) -> None:
        """Build and commit the first generation, with the initial values of the model."""
        rendezvous, plan = self._context.rendezvous, self._state.plan
        first = Generation(self._context, 0, Proposal(plan, rendezvous.alive), before=None)
        first.wait()
        self.commit(first)

    def poll_proposal(self) -> None:
        """Start to build the next generation if it has been proposed.

        Raises `PeerLostError` if it could not be built.
        """
        state = self._state
        if state.preparing is None:
            proposal = self._proposals.read(state.generation + 1)
            if proposal is not None:
                self.prepare(state.generation + 1, proposal)
        else:
            state.preparing.check_error()

    def prepare(
        self,
        number: int,
        proposal: Proposal,
        lost: tuple[int, ...] | None = None,
        kept: Sequence[SurvivingSum] = (),
    ) -> None:
        """Start to build a generation.

        lost  after a failure: ranks that it does without
        kept  gradient sums of the step that survive the failure
        """
        state, context = self._state, self._context
        before, engine = state.plan, state.engine
        state.prepare(
            Generation(
                context, number, proposal, before=before, engine=engine, lost=lost, kept=kept
            )
        )

    def refusal(self, plan: Plan) -> str | None:
        """Reason for which this job does not change to `plan`, or None."""
        setup, current = self._context.setup, self._state.plan
        parameters, moments = setup.model.parameters, setup.optimizer.copies - 1
        try:
            check_plan(plan, parameters, current.microbatches, setup.max_in_flight)
        except ContractError as error:
            return str(error)
        budget = self._context.budget.on(self._context.setup.device)
        return budget.refusal(current.layout, plan.layout, parameters, moments, setup.state_copies)

    @property
    def is_transferring(self) -> bool:
        """True when state is on its way to the next generation."""
        return self._transfer is not None

    @property
    def commits_next(self) -> bool:
        """True when the next generation is to be committed before the update of this step."""
        return self._transfer is not None and self._transfer.is_last_step

    @property
    def is_ending(self) -> bool:
        """True when the next generation is built and has no members: the job ends."""
        prepared = self._state.prepared
        return prepared is not None and not prepared.proposal.staying

    @property
    def can_update_in_doubt(self) -> bool:
        """True when this rank has the summed gradients of the step for the generation in doubt."""
        in_doubt, engine = self._state.in_doubt, self._state.engine
        if in_doubt is None or not in_doubt.keeps_layout:
            return in_doubt is not None and in_doubt.total is not None
        return engine is not None and engine.total is not None

    def ready_generation(self, next_step: int) -> int:
        """The generation that this rank could receive during `next_step`; 0 if there is none."""
        if self.is_transferring or self._context.rendezvous.stores.is_cut_off:
            return 0
        self.poll_proposal()
        prepared = self._state.prepared
        if prepared is None:
            return 0
        if next_step + (not prepared.keeps_layout) < prepared.plan.from_step:
            return 0
        if prepared.keeps_layout:
            # Others may commit it at the end of this step without this rank's knowledge.
            self._state.vote(prepared)
        return prepared.number

    def all_ready(self, reduced: ReducedStep) -> bool:
        """Return whether all ranks of the layout are ready for the next generation."""
        ranks = len(self._state.plan.layout.ranks)
        agreed = reduced.ready == (ranks, ranks * (self._state.generation + 1))
        if not agreed:
            self._state.vote(None)
        return agreed

    def start_reshard(self, pace: CopyPace) -> None:
        """After an update at which `all_ready`: commit new quotas, or start to transfer state.

        pace  of this rank, for the copy
        """
        prepared = self._state.prepared
        assert prepared is not None
        if self._context.rendezvous.rank == min(self._state.plan.layout.ranks):
            self._proposals.start_reshard(prepared.number)
        if prepared.keeps_layout:
            self._commit_quotas(prepared)
        else:
            self._transfer = self._new_transfer(prepared)
            self._transfer.start(self._state.completed, pace)

    def ends_transfer(self) -> bool:
        """Wait for what is copied beside this step; True if it is all, and `reshard` comes next.

        Raises `PeerLostError` if a peer is lost.
        """
        return self._transfer is not None and self._transfer.end_step()

    def continue_transfer(self, pace: CopyPace) -> None:
        """After an update: copy on beside the next step, if there is more."""
        if self._transfer is not None:
            self._transfer.start(self._state.completed, pace)

    def stop_transfer(self) -> None:
        """After a failure: let no thread write to state that both generations share any more.

        From the vote on none does, and the generation may still be committed.
        """
        if self._transfer is not None and self._state.in_doubt is None:
            self._transfer.stop()

    def poll_idle(self) -> bool:
        """On an idle rank: follow the others; returns whether it is to `reshard` now."""
        self.poll_proposal()
        prepared = self._state.prepared
        if prepared is None or not self._proposals.reshard_started(prepared.number):
            return False
        if prepared.keeps_layout:
            self._commit_quotas(prepared)
        return not prepared.keeps_layout

    def catch_up(self, generation: int) -> None:
        """On an idle rank: read the plans up to `generation` that it missed before a failure."""
        state = self._state
        while state.engine is None and state.generation < generation:
            proposal = self._proposals.read(state.generation + 1, recoveries_ago=1)
            assert proposal is not None, "every committed plan was published"
            state.follow(state.generation + 1, proposal.plan)

    # The change.

    def reshard(self, norm: float | None = None) -> float | None:
        """Transfer the state to the next generation and commit it: on all ranks, or on none.

        norm  of the gradients of the step, on ranks that know it; they are summed and move as well

        Collective over the ranks alive. Returns the norm on every rank if the update of the step is
        to be made in the new generation. Raises `PeerLostError` if a rank is lost (the survivors
        then agree on the committed generation), and `StateLostError` on all ranks if state is
        missing and no checkpoint is usable.
        """
        state, rendezvous, generation = self._state, self._context.rendezvous, self._state.preparing
        assert generation is not None
        generation.wait()
        proposal = generation.proposal
        start = state.paused_at or time.perf_counter()
        state.enter(Phase.STREAMING)
        transfer = self._transfer or self._new_transfer(generation)
        if proposal.missing_state:
            transfer.restore(self._checkpoints, proposal.missing_state)
        else:
            transfer.finish()
            state.resume(transfer.completed)
        state.enter(Phase.VOTING)
        state.vote(generation)
        rendezvous.change_members(proposal.members)  # whichever generation is committed
        norm = _vote(generation, norm)
        completed = state.completed if generation.rewound is None else generation.rewound
        change = LayoutChange(
            plan=generation.plan,
            step=completed + (norm is not None),
            pause_ms=0.0,
            prepare_ms=generation.took_s * 1e3,
            copy_ms=transfer.copied_s * 1e3,
            copy_steps=transfer.steps,
            received_bytes=transfer.received_bytes,
            gradient_bytes=transfer.gradient_bytes,
            extra_bytes=transfer.extra_bytes,
            spilled_bytes=transfer.spilled_bytes,
            lost=generation.lost or (),
            kept=spans(index for one in generation.kept for index in indices(one.finished)),
            is_rewound=generation.rewound is not None,
        )
        del transfer  # it holds the state of the old generation
        self._commit_measured(generation, change, start)
        return norm

    def commit(self, generation: Generation) -> None:
        """Continue in `generation`; the state of the old one is released only now."""
        state, rendezvous, previous = self._state, self._context.rendezvous, self._state.engine
        if generation.keeps_layout:
            generation.total = previous.total if previous is not None else None
        else:
            unused = generation.temporary_groups
            if previous is not None:
                unused += previous.groups.all
            close_groups(unused)
            generation.links.clear()  # with them mapped memory of peers
        engine = None
        if generation.groups is not None and generation.shard is not None:
            setup, waited = self._context.setup, self._context.waited
            groups, shard, plan = generation.groups, generation.shard, generation.plan
            engine = Engine(setup, groups, shard, plan, waited, generation.rest)
            engine.total = generation.total
        state.commit(generation, engine)
        alive = rendezvous.alive
        rendezvous.change_members(
            tuple(rank for rank in generation.proposal.staying if rank in alive)
        )
        self._transfer = None
        if previous is not None and not generation.keeps_layout:
            self._release(previous)

    def update(self, step: int, norm: float) -> None:
        """Make the update of `step`, once the checkpoint in flight allows the state to change."""
        self._checkpoints.fence()
        self._state.update(step, norm)

    def abort_groups(self) -> None:
        """Abort the process groups of the present and the next generation, at the same time.

        After a failure, and at the end of the job; those used later belong to a later generation.
        """
        state = self._state
        present = [] if state.engine is None else [state.engine.groups.everyone.abort]
        others = (state.preparing, state.in_doubt)
        following = [other.abort_groups for other in others if other is not None]
        at_once([*present, *following], self._context.setup.device)

    def abort(self) -> None:
        """Stay in the committed generation; stop and close everything of the next one."""
        if self._transfer is not None:
            self._transfer.stop()
        self._transfer = None
        self._state.abort()

    # Parts of the above.

    def _new_transfer(self, generation: Generation) -> StateTransfer:
        state = self._state
        return StateTransfer(
            self._context,
            generation,
            state.engine,
            state.plan,
            state.completed,
            on_transfer=self._callbacks.on_transfer,
        )

    def _release(self, engine: Engine) -> None:
        """Free the state of an engine, on the CPU beside the update, since it takes as long."""
        if self._context.setup.device.type == "cpu":
            start_thread(
                threading.Thread(target=engine.release, name="resihp-release", daemon=True)
            )
        else:
            engine.release()

    def _commit_quotas(self, generation: Generation) -> None:
        change = LayoutChange(plan=generation.plan, step=self._state.completed, pause_ms=0.0)
        self._commit_measured(generation, change, time.perf_counter())

    def _commit_measured(self, generation: Generation, change: LayoutChange, start: float) -> None:
        was_training = self._state.engine is not None
        self.commit(generation)
        pause_ms = (time.perf_counter() - start) * 1e3 if was_training else 0.0
        self._callbacks.on_layout_change(replace(change, pause_ms=pause_ms))


def _vote(generation: Generation, norm: float | None) -> float | None:
    """Wait until all ranks hold the complete state; returns the norm if any rank knows it."""
    assert generation.transit is not None
    vote = [-1.0, -1.0] if norm is None else [1.0, norm]
    votes = torch.tensor(vote, dtype=torch.float64, device=generation.transit.device)
    is_known, largest = generation.transit.all_reduce_max(votes).tolist()
    return float(largest) if is_known > 0 else None
