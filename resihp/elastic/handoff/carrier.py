"""Brings what training knows to the world that is taken on: state, gradients, or a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from resihp.contracts import CheckpointError, StateLostError

from ..checkpoints.contract import Keeper
from ..engine import Setup
from ..engine.sums import Rest
from ..instep.ledger import Kept
from ..present import Present
from .courier import Courier
from .inherit import Succession
from .memory import Memory, held_twice
from .prepare import Prepared
from .staging import Carried, Staging


class Carrier:
    """One rank's part of it; what is collective is so over the ranks of both worlds."""

    def __init__(
        self,
        setup: Setup,
        present: Present,
        rank: int,
        keeper: Keeper,
        memory: Memory,
        on_parcel: Callable[[int], None],
    ) -> None:
        self._setup, self._present, self._rank = setup, present, rank
        self._keeper, self._memory, self._on_parcel = keeper, memory, on_parcel
        self._staging: Staging | None = None

    @property
    def is_filling(self) -> bool:
        """Whether state moves in the background."""
        return self._staging is not None

    def start(self, prepared: Prepared) -> None:
        """Begin to fill `prepared` while the present world makes a step."""
        self._staging = self._stage(prepared)
        self._staging.start()

    def stop(self) -> None:
        """No state is read or written any more."""
        if self._staging is not None:
            self._staging.stop()
        self._staging = None

    def done(self) -> None:
        """The world that was filled is taken on."""
        self._staging = None

    def carry_over(
        self, prepared: Prepared, kept: Sequence[Kept] | None
    ) -> tuple[Prepared, Carried]:
        """The state of the old world, and what there is of the present step's gradients."""
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

    def take_back(self, prepared: Prepared, gone: str) -> Prepared:
        """The state of the newest checkpoint, as `gone` is held by nobody.

        What the old world still has of its own is lost. Tensors that both worlds share are
        overwritten: where state is gone, no agreement that comes later can go on with the old
        world.
        """
        assert prepared.transit is not None
        try:
            completed = self._keeper.restore(prepared.transit, prepared.shard)
        except CheckpointError as error:
            raise StateLostError(f"{gone}; {error}") from error
        return replace(prepared, rewound=completed)

    def held_twice(self, prepared: Prepared) -> int:
        """Bytes in memory that this rank holds of both worlds, when nothing is let go yet."""
        engine, draft = self._present.engine, prepared.draft
        if engine is None or draft is None:
            return 0
        copies = self._setup.optimizer.copies + 1
        twice = held_twice(engine.shard.ranges, draft.shard.ranges, copies)
        return max(0, twice - draft.room.bytes)

    def _stage(self, prepared: Prepared) -> Staging:
        engine = self._present.engine
        return Staging(
            self._setup,
            prepared,
            engine.shard if engine is not None else None,
            self._rank,
            self._present.completed,
            buffer_bytes=self._memory.buffer_bytes,
            on_parcel=self._on_parcel,
        )

    def _succession(self, prepared: Prepared, kept: Sequence[Kept], courier: Courier) -> Rest:
        """Bring the sums of the step in progress to those who go on with them."""
        present = self._present
        assert prepared.transit is not None
        succession = Succession(
            self._setup,
            prepared.transit,
            courier,
            self._rank,
            present.plan,
            prepared.plan,
        )
        return succession.settle(kept, present.engine, prepared.shard)

    def _filled(self, prepared: Prepared) -> Staging:
        """What was filled in the background, or else what is filled now."""
        if self._staging is not None:
            self._staging.wait()
            return self._staging
        staging = self._stage(prepared)
        staging.fill()
        return staging
