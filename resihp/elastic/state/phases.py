"""What a rank is doing, and what it may do next: the runtime's state machine as one table."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """What a rank is doing."""

    STARTING = "starting"
    ACCUMULATING = "accumulating"  # passes of the step's microbatches
    REDUCING = "reducing"  # gradients summed; the step may still be given up
    UPDATING = "updating"  # every rank holds whole gradients; the step will be completed
    IDLE = "idle"  # alive, no place in the present layout
    STREAMING = "streaming"  # state moves to the new layout; the old state is intact
    VOTING = "voting"  # new state complete here; old or new generation, whichever the others took
    RECOVERING = "recovering"  # a rank was lost; survivors agree on what holds
    STOPPED = "stopped"


ALLOWED: dict[Phase, frozenset[Phase]] = {
    Phase.STARTING: frozenset({Phase.ACCUMULATING, Phase.IDLE, Phase.RECOVERING, Phase.STOPPED}),
    Phase.ACCUMULATING: frozenset({Phase.REDUCING, Phase.RECOVERING, Phase.STOPPED}),
    Phase.REDUCING: frozenset({Phase.UPDATING, Phase.STREAMING, Phase.RECOVERING, Phase.STOPPED}),
    Phase.UPDATING: frozenset({Phase.ACCUMULATING, Phase.IDLE, Phase.STOPPED}),
    Phase.IDLE: frozenset({Phase.STREAMING, Phase.RECOVERING, Phase.STOPPED}),
    Phase.STREAMING: frozenset({Phase.VOTING, Phase.RECOVERING, Phase.STOPPED}),
    Phase.VOTING: frozenset(
        {Phase.ACCUMULATING, Phase.UPDATING, Phase.IDLE, Phase.RECOVERING, Phase.STOPPED}
    ),
    Phase.RECOVERING: frozenset(
        {Phase.STREAMING, Phase.RECOVERING, Phase.IDLE, Phase.STOPPED}  # idle: not yet let in
    ),
    Phase.STOPPED: frozenset(),
}


class PhaseMachine:
    """Holds the phase; a transition that the table does not allow is a bug of ours."""

    def __init__(self) -> None:
        self.phase = Phase.STARTING

    def enter(self, phase: Phase) -> None:
        """Go to `phase`."""
        assert phase in ALLOWED[self.phase], f"{self.phase} -> {phase}"
        self.phase = phase
