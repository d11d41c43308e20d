"""What a rank tells those who watch it: phases, steps and changes of layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from resihp.contracts import Plan

from ..microbatches.ledger import Spans
from ..step import ReducedStep
from .phases import Phase


@dataclass(frozen=True, kw_only=True)
class LayoutChange:
    """A change of layout, as one rank saw it.

    step            the one in progress, or the next one between two steps
    pause_ms        from whole gradients (or a loss) until the new generation holds
    prepare_ms      the building of the new generation in the background
    received_bytes  of parameters and optimizer state
    handed_bytes    of gradients, in the pause
    extra_bytes     held in memory for both generations at once until the new one was taken on, and
                    buffers; at most the limit, but after a loss without a folder to spill to
    spilled_bytes   held in files instead
    kept            microbatches of `step` whose gradients stay; the others are computed from here
    is_rewound      the state is that of a checkpoint, so that `step` may have been made before
    """

    plan: Plan
    step: int
    pause_ms: float
    prepare_ms: float = 0.0
    received_bytes: int = 0
    handed_bytes: int = 0
    extra_bytes: int = 0
    spilled_bytes: int = 0
    lost: tuple[int, ...] = ()
    kept: Spans = ()
    is_rewound: bool = False


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """For progress displays and scripted faults.

    Called by the training thread, but `on_transfer` by the one that fills the next generation,
    before each parcel that this rank sends or receives. `on_layout_change` comes before the update
    that the new generation makes, `on_idle` again and again while this rank has no work
    (`resihp.Monitor.while_idle`).
    """

    on_phase: Callable[[Phase, int], None] = field(default=lambda phase, step: None)
    on_step: Callable[[ReducedStep, float, Plan], None] = field(default=lambda step, ms, plan: None)
    on_transfer: Callable[[int], None] = field(default=lambda number: None)
    on_layout_change: Callable[[LayoutChange], None] = field(default=lambda switch: None)
    on_idle: Callable[[], None] = field(default=lambda: None)
