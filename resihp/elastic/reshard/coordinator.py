"""One rank's side of a change of layout: prepare, fill, hand over, vote, take on, let go."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from resihp.contracts import PeerLostError, Plan

from ..checkpointing.protocol import StateManager
from ..microbatches.ledger import SurvivingSum, indices, spans
from ..process_groups.abortable import WaitClock
from ..process_groups.close import close_groups
from ..rendezvous.membership import Rendezvous
from ..rendezvous.proposals import Proposal, ProposalBoard
from ..state.events import Callbacks, LayoutChange
from ..state.phases import Phase
from ..state.runtime_state import RuntimeState
from ..step import ReducedStep, Setup
from .buffers import ReshardBudget, refusal
from .build import Generation, GenerationBuild, GenerationBuilder
from .transfer import Carried, Carrier
from .warmup import warm_up


class ReshardCoordinator:
    """Takes a rank from its present generation to the next one.

    The next generation is `pending` from its plan's appearance on. Once all ranks stand ready, a
    step runs during which it is filled (`is_filling`), and it is taken on before that step's
    update. It is in `doubt` from the vote on until this rank knows that all have taken it on.
    `paused_at` (`time.perf_counter`) is when training stopped because a generation broke; None
    while all is well.
    """

    def __init__(
        self,
        setup: Setup,
        present: RuntimeState,
        rendezvous: Rendezvous,
        waited: WaitClock,
        enter: Callable[[Phase], None],
        callbacks: Callbacks,
        keeper: StateManager,
        *,
        memory: ReshardBudget,
    ) -> None:
        self.pending: GenerationBuild | None = None
        self.doubt: Generation | None = None
        self.paused_at: float | None = None
        self._setup, self._present, self._rendezvous = setup, present, rendezvous
        self._proposals = ProposalBoard(rendezvous)
        self._builder = GenerationBuilder(setup, present, rendezvous, waited, memory)
        self._enter, self._callbacks, self._memory = enter, callbacks, memory
        self._carrier = Carrier(
            setup, present, rendezvous.rank, keeper, memory, callbacks.on_transfer
        )

    # Before a switch.

    def warm_up(self) -> None:
        """Do beside the job what is slow the first time, before this rank takes a place."""
        with self._builder.factory(threading.Event()) as factory:
            warm_up(self._setup, factory)

    @property
    def is_prepared(self) -> bool:
        """Whether the next generation stands ready to be taken on."""
        return self.pending is not None and self.pending.result is not None

    @property
    def is_filling(self) -> bool:
        """Whether the next generation is taken on before the update of the present step."""
        return self._carrier.is_filling

    @property
    def is_ending(self) -> bool:
        """Whether nobody stays in the next generation, which stands ready: the job ends."""
        pending = self.pending
        return pending is not None and pending.result is not None and not pending.target.staying

    @property
    def is_handed_over(self) -> bool:
        """Whether this rank could make the update of the step in the generation in doubt."""
        doubt, engine = self.doubt, self._present.engine
        if doubt is None or doubt.transit is not None:
            return doubt is not None and doubt.total is not None
        return engine is not None and engine.total is not None

    def begin(self) -> None:
        """Build the first generation, fill it with the model's initial values, take it on."""
        # Processes start at their own pace, so silence means nothing yet; connecting times out.
        first = self._builder.first()
        self.adopt(first.wait(lambda ranks, _: self._rendezvous.broken(ranks, 0.0)))

    def look_for_plan(self) -> None:
        """Begin to prepare the next generation's generation if its plan has been published.

        Raises `PeerLostError` if it could not be prepared.
        """
        if self.pending is None:
            generation = self._present.generation + 1
            offer = self._proposals.read(generation)
            if offer is not None:
                self.pending = self._builder.next(generation, offer)
        elif self.pending.error is not None:
            # Someone is not there. Those who are agree on it as after any other loss.
            raise PeerLostError(f"the next generation could not be built: {self.pending.error}")

    def refusal(self, plan: Plan) -> str | None:
        """Why this job will not change to `plan`, if it will not."""
        settings, parameters = self._setup.optimizer, self._setup.model.parameters
        present = self._present.plan.layout
        return refusal(self._memory, present, plan.layout, parameters, settings.copies + 1)

    def repair(
        self, generation: int, offer: Proposal, lost: tuple[int, ...], kept: Sequence[SurvivingSum]
    ) -> None:
        """Begin to build a generation in place of a broken one, to `switch` to it.

        `lost` can send nothing any more; `kept` are the gradient sums that they left.
        """
        self.pending = self._builder.next(generation, offer, lost, kept)

    def ready_generation(self, next_step: int) -> int:
        """The generation that this rank could fill during `next_step`; 0 if there is none."""
        if self.is_filling or self._rendezvous.stores.is_cut_off:
            return 0
        self.look_for_plan()
        if self.pending is None or self.pending.result is None:
            return 0
        target = self.pending.target
        keeps_layout = self.pending.result.transit is None
        if next_step + (not keeps_layout) < target.plan.from_step:
            return 0
        if keeps_layout:
            # Others may take it on at the end of this step without this rank's knowledge.
            self.doubt = self.pending.result
        return target.generation

    def everyone_ready(self, reduced: ReducedStep) -> bool:
        """Whether all ranks of the present generation said that they are ready for the next one."""
        ranks = len(self._present.plan.layout.ranks)
        agreed = reduced.ready == (ranks, ranks * (self._present.generation + 1))
        if not agreed:
            self.doubt = None
        return agreed

    def proceed(self) -> None:
        """Go on towards the next generation, for which all ranks stand ready, after an update.

        New quotas are taken on at once. Another layout is filled while the coming step runs.
        """
        assert self.pending is not None
        prepared = self.pending.result
        assert prepared is not None
        if self._rendezvous.rank == min(self._present.plan.layout.ranks):
            self._proposals.start_reshard(prepared.generation)
        if prepared.transit is None:
            self._requota(prepared)
        else:
            self._carrier.start(prepared)

    def follow(self) -> bool:
        """On an idle rank: keep up with the others; whether it is to take part in a switch now."""
        self.look_for_plan()
        if not self.is_prepared or not self._proposals.reshard_started(
            self._present.generation + 1
        ):
            return False
        assert self.pending is not None
        assert self.pending.result is not None
        if self.pending.result.transit is not None:
            return True
        self._requota(self.pending.result)
        return False

    def catch_up(self, generation: int) -> None:
        """Read the plans up to `generation` that this idle rank missed before a recovery."""
        while self._present.engine is None and self._present.generation < generation:
            offer = self._proposals.read(self._present.generation + 1, recoveries_ago=1)
            assert offer is not None, "what others have taken on was published"
            self._present.generation, self._present.plan = self._present.generation + 1, offer.plan

    # The switch.

    def switch(
        self,
        lost: tuple[int, ...] = (),
        kept: Sequence[SurvivingSum] | None = None,
        norm: float | None = None,
    ) -> float | None:
        """Bring the state to the pending generation and take it on: all ranks, or none.

        Collective over the ranks alive. After a loss, `lost` can send nothing any more and `kept`
        are the gradient sums of the step that they left. Otherwise the gradients of the present
        step are whole: they are handed over, `norm` is theirs, and it is returned on every rank,
        for the update in the new generation. Raises `PeerLostError` if a rank is lost on the way:
        the survivors then agree on which generation holds; and `StateLostError` on all ranks if
        state is gone and no checkpoint can be used.
        """
        assert self.pending is not None
        pending, prepared = self.pending, self.pending.wait(self._rendezvous.broken)
        start = self.paused_at or time.perf_counter()
        was_training = self._present.engine is not None
        self._enter(Phase.STREAMING)
        if pending.target.gone:
            prepared = self._carrier.take_back(prepared, pending.target.gone)
            carried = Carried()
        else:
            prepared, carried = self._carrier.carry_over(prepared, kept)
        self._enter(Phase.VOTING)
        self.doubt = prepared
        self._rendezvous.alive = pending.target.participants  # whichever generation holds
        assert prepared.transit is not None
        vote = torch.tensor([-1.0, -1.0] if norm is None else [1.0, norm], dtype=torch.float64)
        is_owed, norm = prepared.transit.all_reduce_max(vote).tolist()
        extra_bytes = carried.buffer_bytes + self._carrier.held_twice(prepared)
        self.adopt(prepared)
        pause_ms = (time.perf_counter() - start) * 1e3 if was_training else 0.0
        switch = LayoutChange(
            plan=prepared.plan,
            step=self._present.completed + (is_owed > 0),
            pause_ms=pause_ms,
            prepare_ms=pending.took_s * 1e3,
            received_bytes=carried.received_bytes,
            handed_bytes=carried.handed_bytes,
            extra_bytes=extra_bytes,
            spilled_bytes=prepared.draft.room.bytes if prepared.draft is not None else 0,
            lost=lost,
            kept=spans(index for one in kept or () for index in indices(one.finished)),
            is_rewound=prepared.rewound is not None,
        )
        self._callbacks.on_layout_change(switch)
        return norm if is_owed > 0 else None

    def adopt(self, prepared: Generation) -> None:
        """Take on a generation; only now is the old state let go."""
        present = self._present
        present.generation, present.plan = prepared.generation, prepared.plan
        if prepared.rewound is not None:
            present.completed, present.norm = prepared.rewound, None
        alive = self._rendezvous.alive
        self._rendezvous.alive = tuple(rank for rank in prepared.staying if rank in alive)
        old, present.engine = present.engine, None
        if prepared.transit is None and old is not None:
            prepared = replace(prepared, total=old.total)
        if prepared.transit is not None:
            unused = prepared.passage
            if old is not None:
                unused += old.groups.all
                old.release()
            close_groups(unused)
        if prepared.groups is not None:
            present.engine = self._builder.engine(prepared)
        self.pending = self.doubt = self.paused_at = None
        self._carrier.done()

    def forget(self) -> None:
        """Let go of a next generation that was given up."""
        self._carrier.stop()
        if self.pending is not None:
            self.pending.give_up()
        self.pending = self.doubt = None

    # Inside.

    def _requota(self, prepared: Generation) -> None:
        start = time.perf_counter()
        was_training = self._present.engine is not None
        self.adopt(prepared)
        pause_ms = (time.perf_counter() - start) * 1e3 if was_training else 0.0
        self._callbacks.on_layout_change(
            LayoutChange(
                plan=prepared.plan,
                step=self._present.completed,
                pause_ms=pause_ms,
            )
        )
