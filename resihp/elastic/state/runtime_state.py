"""Where a rank stands: the generation it works in, its plan, and the steps behind it."""

from __future__ import annotations

from dataclasses import dataclass

from resihp.contracts import Plan

from ..step import Engine


@dataclass
class RuntimeState:
    """Changed by the training thread alone; others may read it.

    plan       that of the generation taken on
    generation      counts the generations; 0 is the first
    completed  steps whose update has been made
    norm       that of the last step for which it was learned, with that step
    engine     None while this rank has no place in the layout
    """

    plan: Plan
    generation: int = 0
    completed: int = 0
    norm: tuple[int, float] | None = None
    engine: Engine | None = None
