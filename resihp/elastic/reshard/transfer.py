"""Fills the next generation's shard while the present one trains."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from resihp.contracts import CheckpointError, PeerLostError, StateLostError
from resihp.layout import Param, Range

from ..checkpointing.protocol import StateManager
from ..microbatches.ledger import SurvivingSum
from ..state.runtime_state import RuntimeState
from ..step import Setup
from ..step.gradient_accumulation import Gradients, StepRemainder
from ..step.replicated_state import distribute_replicated_state
from ..step.shard import Shard, rows
from .buffers import ReshardBudget, held_twice, unshared
from .build import Generation
from .exchange import GradientParts, TensorExchange, state_view
from .gradient_migration import GradientMigration

_NICENESS = 5


@dataclass(frozen=True)
class Carried:
    """Bytes of state and of gradients that one rank received, and of the buffers for both."""

    received_bytes: int = 0
    handed_bytes: int = 0
    buffer_bytes: int = 0


class StateTransfer:
    """Brings a prepared shard to the state of the present step, leaving the old one whole.

    Parameters and moments do not change between two updates, so they can be copied while the
    passes of a step run (LiveR, arXiv 2605.22014; DataStates-LLM, arXiv 2406.10707). The update
    at the step's end is not copied: `hand_over` gives each new holder the summed
    gradients of its ranges, and it makes the same elementwise update itself. Collective over
    the ranks alive: all call `start` (or `fill`) before the same step.
    """

    def __init__(
        self,
        setup: Setup,
        prepared: Generation,
        old: Shard | None,
        rank: int,
        completed: int,
        *,
        buffer_bytes: int,
        on_transfer: Callable[[int], None],
    ) -> None:
        self.completed = completed
        self._received_bytes = self._handed_bytes = 0
        self._setup, self._prepared = setup, prepared
        self._old, self._new = old, prepared.draft
        self._rank, self._buffer_bytes, self._on_transfer = rank, buffer_bytes, on_transfer
        self._courier: TensorExchange | None = None
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    @property
    def courier(self) -> TensorExchange:
        """What has filled the shard; it can carry more between the same ranks."""
        assert self._courier is not None
        return self._courier

    @property
    def carried(self) -> Carried:
        """What has been received so far, and the memory of the exchange's buffers."""
        return Carried(self._received_bytes, self._handed_bytes, self.courier.held_bytes)

    def start(self) -> None:
        """Fill in the background; `wait` for it before the update."""
        # A thread that is never started would keep this, and the generation, until cycles are
        # collected.
        self._thread = threading.Thread(target=self._run, name="resihp-staging", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the shard is filled. Raises `PeerLostError` if it will never be."""
        assert self._thread is not None
        self._thread.join()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Give it up; no state is read or written any more afterwards."""
        self._prepared.cancelled.set()
        if self._thread is not None:
            self._thread.join()

    def fill(self) -> None:
        """Bring parameters, moments and the count of updates to where the old generation is."""
        old, new = self._old, self._new
        assert self._prepared.transit is not None
        self.completed = distribute_replicated_state(
            self._prepared.transit,
            self._setup,
            self.completed,
            old=old,
            new=new.shard if new is not None else None,
            source=self._prepared.source,
        )
        self._courier = TensorExchange(
            self._prepared.pairs,
            self._rank,
            buffer_bytes=self._buffer_bytes,
            on_transfer=self._on_transfer,
        )
        for param, span, origin in self._kept():
            assert old is not None
            assert new is not None
            for source, target in zip(old.state(param), new.state(param), strict=True):
                _copy(source, target, param, span, origin)
        # Most optimizers make their moments at the first update.
        is_new = self.completed == 0 and not self._setup.optimizer.form.eager
        copies = 1 if is_new else self._setup.optimizer.copies
        self._received_bytes = self._courier.carry(
            self._prepared.planned, copies, state_view(old), state_view(new)
        )

    def hand_over(self, total: Gradients | None) -> Gradients | None:
        """Give the new holders the whole gradients of this step; the old generation keeps its own.

        `total` is what this rank has in the old generation; returns what it has in the new one.
        """
        old, new = self._old, self._new
        gradients = new.gradients if new is not None else {}

        def own() -> Iterator[None]:
            for param, span, origin in self._kept():
                assert total is not None
                _copy(total[param], gradients[param], param, span, origin)
                yield

        self._handed_bytes = self.courier.carry(
            self._prepared.planned,
            1,
            state_view(GradientParts(old.ranges, [total]) if old is not None and total else None),
            state_view(GradientParts(new.ranges, [gradients]) if new is not None else None),
            meanwhile=own(),
        )
        if new is None:
            return None
        whole = {**(total or {}), **gradients}
        return {param: whole[param] for param in new.shard.tensors}

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            self.fill()
        except PeerLostError as error:
            self._error = PeerLostError(str(error))  # a traceback would keep all of this
        except Exception as error:  # noqa: BLE001 what is not filled must not be taken on
            self._error = error

    def _kept(self) -> list[tuple[Param, Range, tuple[int, int]]]:
        """What this rank holds in both layouts, but in different ranges; where these begin."""
        old, new = self._old, self._new
        if old is None or new is None:
            return []
        kept = []
        for param in unshared(new.shard, old):
            if param in old.ranges:
                before, after = old.ranges[param], new.ranges[param]
                span = (max(before[0], after[0]), min(before[1], after[1]))
                if span[0] < span[1]:
                    kept.append((param, span, (before[0], after[0])))
        return kept


def _copy(
    source: torch.Tensor, target: torch.Tensor, param: Param, span: Range, origin: tuple[int, int]
) -> None:
    rows(target, param, span, origin[1]).copy_(rows(source, param, span, origin[0]))


class Carrier:
    """One rank's part of it; what is collective is so over the ranks of both generations."""

    def __init__(
        self,
        setup: Setup,
        present: RuntimeState,
        rank: int,
        keeper: StateManager,
        memory: ReshardBudget,
        on_transfer: Callable[[int], None],
    ) -> None:
        self._setup, self._present, self._rank = setup, present, rank
        self._keeper, self._memory, self._on_transfer = keeper, memory, on_transfer
        self._staging: StateTransfer | None = None

    @property
    def is_filling(self) -> bool:
        """Whether state moves in the background."""
        return self._staging is not None

    def start(self, prepared: Generation) -> None:
        """Begin to fill `prepared` while the present generation makes a step."""
        self._staging = self._stage(prepared)
        self._staging.start()

    def stop(self) -> None:
        """No state is read or written any more."""
        if self._staging is not None:
            self._staging.stop()
        self._staging = None

    def done(self) -> None:
        """The generation that was filled is taken on."""
        self._staging = None

    def carry_over(
        self, prepared: Generation, kept: Sequence[SurvivingSum] | None
    ) -> tuple[Generation, Carried]:
        """The state of the old generation, and what there is of the present step's gradients."""
        staging = self._filled(prepared)
        self._present.completed = staging.completed
        if kept is not None:
            rest = self._succession(prepared, kept, staging.courier)
            prepared = replace(prepared, rest=rest)
        else:
            engine = self._present.engine
            total = staging.hand_over(engine.total if engine is not None else None)
            prepared = replace(prepared, total=total)
        return prepared, staging.carried

    def take_back(self, prepared: Generation, gone: str) -> Generation:
        """The state of the newest checkpoint, as `gone` is held by nobody.

        What the old generation still has of its own is lost. Tensors that both generations share
        are overwritten: where state is gone, no agreement that comes later can go on with the old
        generation.
        """
        assert prepared.transit is not None
        try:
            completed = self._keeper.restore(prepared.transit, prepared.shard)
        except CheckpointError as error:
            raise StateLostError(f"{gone}; {error}") from error
        return replace(prepared, rewound=completed)

    def held_twice(self, prepared: Generation) -> int:
        """Bytes in memory that this rank holds of both generations, when nothing is let go yet."""
        engine, draft = self._present.engine, prepared.draft
        if engine is None or draft is None:
            return 0
        copies = self._setup.optimizer.copies + 1
        twice = held_twice(engine.shard.ranges, draft.shard.ranges, copies)
        return max(0, twice - draft.room.bytes)

    def _stage(self, prepared: Generation) -> StateTransfer:
        engine = self._present.engine
        return StateTransfer(
            self._setup,
            prepared,
            engine.shard if engine is not None else None,
            self._rank,
            self._present.completed,
            buffer_bytes=self._memory.buffer_bytes,
            on_transfer=self._on_transfer,
        )

    def _succession(
        self, prepared: Generation, kept: Sequence[SurvivingSum], courier: TensorExchange
    ) -> StepRemainder:
        """Bring the sums of the step in progress to those who go on with them."""
        present = self._present
        assert prepared.transit is not None
        succession = GradientMigration(
            self._setup,
            prepared.transit,
            courier,
            self._rank,
            present.plan,
            prepared.plan,
        )
        return succession.settle(kept, present.engine, prepared.shard)

    def _filled(self, prepared: Generation) -> StateTransfer:
        """What was filled in the background, or else what is filled now."""
        if self._staging is not None:
            self._staging.wait()
            return self._staging
        staging = self._stage(prepared)
        staging.fill()
        return staging
