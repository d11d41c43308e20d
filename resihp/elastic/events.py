"""What a rank tells those who watch it: phases, steps and changes of layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from resihp.contracts import Plan

from .engine import Reduced
from .instep.ledger import Spans
from .membership.phases import Phase


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A change of layout, as one rank saw it.

    step  the one in progress, or the next one between two steps
    kept  microbatches of that step whose gradients stay; the others are computed from here on
    """

    plan: Plan
    step: int
    pause_ms: float
    received_bytes: int
    lost: tuple[int, ...] = ()
    kept: Spans = ()


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """For progress displays and scripted faults.

    Called by the training thread, but `on_parcel` by the one that fills the next world, before
    each parcel that this rank sends or receives. `on_switch` comes before the update that the
    new world makes.
    """

    on_phase: Callable[[Phase, int], None] = field(default=lambda phase, step: None)
    on_step: Callable[[Reduced, float, Plan], None] = field(default=lambda step, ms, plan: None)
    on_parcel: Callable[[int], None] = field(default=lambda number: None)
    on_switch: Callable[[Switch], None] = field(default=lambda switch: None)
