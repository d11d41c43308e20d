"""Phases of a rank: the state machine of the runtime as one table of allowed transitions."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """Activity of a rank."""

    STARTING = "starting"
    ACCUMULATING = "accumulating"  # passes of the step's microbatches
    REDUCING = "reducing"  # sum of gradients over replicas; the step may still be abandoned
    UPDATING = "updating"  # every rank has the summed gradients; the step will be completed
    IDLE = "idle"  # alive, without a place in the layout
    STREAMING = "streaming"  # transfer of state to the next generation; the old state is intact
    VOTING = "voting"  # the new state is complete here; other ranks may have committed it
    RECOVERING = "recovering"  # a rank was lost; the survivors agree on the state
    STOPPED = "stopped"


ALLOWED: dict[Phase, frozenset[Phase]] = {
    Phase.STARTING: frozenset({Phase.ACCUMULATING, Phase.IDLE, Phase.RECOVERING, Phase.STOPPED}),
    Phase.ACCUMULATING: frozenset({Phase.REDUCING, Phase.RECOVERING, Phase.STOPPED}),
    Phase.REDUCING: frozenset({Phase.UPDATING, Phase.STREAMING, Phase.RECOVERING, Phase.STOPPED}),
    # Recovering after the last step: another rank may need what this one knows of it.
    Phase.UPDATING: frozenset({Phase.ACCUMULATING, Phase.IDLE, Phase.RECOVERING, Phase.STOPPED}),
    Phase.IDLE: frozenset({Phase.STREAMING, Phase.RECOVERING, Phase.STOPPED}),
    Phase.STREAMING: frozenset({Phase.VOTING, Phase.RECOVERING, Phase.STOPPED}),
    Phase.VOTING: frozenset(
        {Phase.ACCUMULATING, Phase.UPDATING, Phase.IDLE, Phase.RECOVERING, Phase.STOPPED}
    ),
    # Idle after a recovery: not a member yet.
    Phase.RECOVERING: frozenset({Phase.STREAMING, Phase.RECOVERING, Phase.IDLE, Phase.STOPPED}),
    Phase.STOPPED: frozenset(),
}
