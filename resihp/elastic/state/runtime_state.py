"""Mutable state of one rank: generation, progress, phase, and the change in progress."""

from __future__ import annotations

import time
from collections.abc import Callable

from resihp.contracts import Plan

from ..reshard.build import Generation
from ..step import Engine
from .phases import ALLOWED, Phase


class RuntimeState:
    """State of one rank, changed by the training thread through the methods below only.

    Other threads may read it. The life of a generation: `prepare` (it is built in the background),
    `vote` (other ranks may commit it from now on), and then `commit` or `abort`.

    plan        of the committed generation
    generation  its number; 0 is the first
    completed   steps whose update has been made
    norm        last known gradient norm, with its step
    engine      None while this rank has no place in the layout
    phase       activity of this rank
    preparing   the next generation, built or not
    in_doubt    generation that other ranks may have committed already
    paused_at   `time.perf_counter` when a failure stopped training; None without one

    on_phase    called after each change of phase, with the completed steps
    """

    def __init__(
        self, plan: Plan, on_phase: Callable[[Phase, int], None] = lambda phase, step: None
    ) -> None:
        self.plan = plan
        self.generation = self.completed = 0
        self.norm: tuple[int, float] | None = None
        self.engine: Engine | None = None
        self.phase = Phase.STARTING
        self.preparing: Generation | None = None
        self.in_doubt: Generation | None = None
        self.paused_at: float | None = None
        self._on_phase = on_phase

    @property
    def prepared(self) -> Generation | None:
        """The next generation, once it is built."""
        return self.preparing if self.preparing is not None and self.preparing.is_built else None

    def enter(self, phase: Phase) -> None:
        """Change the phase; a transition that the table does not allow is a bug."""
        assert phase in ALLOWED[self.phase], f"{self.phase} -> {phase}"
        self.phase = phase
        self._on_phase(phase, self.completed)

    # The generation.

    def prepare(self, generation: Generation) -> None:
        """Note that the next generation is being built."""
        self.preparing = generation

    def vote(self, generation: Generation | None) -> None:
        """Note that other ranks may commit `generation` from now on; None: none has."""
        self.in_doubt = generation

    def commit(self, generation: Generation, engine: Engine | None) -> None:
        """Continue in `generation`."""
        self.follow(generation.number, generation.plan)
        if generation.rewound is not None:
            self.completed, self.norm = generation.rewound, None
        self.engine = engine
        self.preparing = self.in_doubt = self.paused_at = None

    def abort(self) -> None:
        """Stay in the committed generation."""
        if self.preparing is not None:
            self.preparing.cancel()
        self.preparing = self.in_doubt = None

    def follow(self, generation: int, plan: Plan) -> None:
        """Note a generation that the working ranks committed without this rank."""
        self.generation, self.plan = generation, plan

    # Progress.

    def reduced(self, step: int, norm: float) -> None:
        """Note that the gradients of `step` are summed on every rank."""
        self.norm = (step, norm)

    def update(self, step: int, norm: float) -> None:
        """Make the update of `step`, whose gradients are summed on every rank."""
        if self.engine is not None:
            self.engine.update(norm, step)
        self.completed, self.norm = step + 1, (step, norm)

    def resume(self, completed: int) -> None:
        """Continue after `completed` steps, as other ranks or a checkpoint say."""
        self.completed = completed

    def pause(self) -> None:
        """Note that a failure has stopped training."""
        self.paused_at = self.paused_at or time.perf_counter()

    def rejoin(self) -> None:
        """Note that this rank waits outside the job for an invitation."""
        self.paused_at = None
