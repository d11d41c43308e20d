"""Callbacks of a training job, and the events that they receive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from resihp.contracts import Plan

from ..microbatches.ledger import Spans
from ..step import ReducedStep
from .phases import Phase


@dataclass(frozen=True, kw_only=True)
class LayoutChange:
    """A committed change of layout, as one rank measured it.

    step            the step in progress, or the next one between two steps
    pause_ms        from summed gradients (or a failure) until the commit
    prepare_ms      build of the new generation in the background
    copy_ms         copy of parameters and optimizer state, beside a step where there was no failure
    copy_steps      over which it was spread
    received_bytes  of parameters and optimizer state
    gradient_bytes  of summed gradients received, from the last passes of the step on
    extra_bytes     buffers, and state held in memory for both generations until the commit; at most
                    the limit, except after a failure without a folder to spill to
    spilled_bytes   state held in files instead
    lost            ranks of the old layout that were lost
    kept            microbatches of `step` whose gradients survive; the others are computed again
    is_rewound      the state is that of a checkpoint, so `step` may have been made before
    """

    plan: Plan
    step: int
    pause_ms: float
    prepare_ms: float = 0.0
    copy_ms: float = 0.0
    copy_steps: int = 0
    received_bytes: int = 0
    gradient_bytes: int = 0
    extra_bytes: int = 0
    spilled_bytes: int = 0
    lost: tuple[int, ...] = ()
    kept: Spans = ()
    is_rewound: bool = False


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """Functions called during training, for progress displays and for faults in tests.

    The training thread calls them, except `on_transfer`, which the thread that transfers state may
    call.

    on_phase          with the new phase and the completed steps
    on_step           after an update, with the step, its duration in ms and its plan
    on_transfer       with a running number, for each bucket and each slice that this rank transfers
    on_layout_change  after the commit, before the update that the new generation makes
    on_idle           repeatedly while this rank has no work (`resihp.Monitor.while_idle`)
    """

    on_phase: Callable[[Phase, int], None] = field(default=lambda phase, step: None)
    on_step: Callable[[ReducedStep, float, Plan], None] = field(default=lambda step, ms, plan: None)
    on_transfer: Callable[[int], None] = field(default=lambda number: None)
    on_layout_change: Callable[[LayoutChange], None] = field(default=lambda change: None)
    on_idle: Callable[[], None] = field(default=lambda: None)
