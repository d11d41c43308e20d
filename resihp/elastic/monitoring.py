"""Adapter from a monitor to the setup and the callbacks of an elastic job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from resihp.contracts import ContractError, Op, Plan

from .state.events import Callbacks, LayoutChange
from .step import ReducedStep, Setup
from .step.setup import record_nothing


class TrainingMonitor(Protocol):
    """The part of `resihp.Monitor` that the runtime uses. No method raises or waits."""

    plan_version: int
    """The plan of later records."""

    def record(self, *, op: Op, step: int, compute_ms: float, **fields: Any) -> None:
        """Take a record of a microbatch or of a transfer."""

    def between_steps(self) -> None:
        """Run the probes that the sidecar has requested."""

    def while_idle(self) -> None:
        """Do the same on a rank without work, which also sends heartbeats."""


def attach_monitor(
    monitor: TrainingMonitor, setup: Setup, callbacks: Callbacks
) -> tuple[Setup, Callbacks]:
    """Return the setup whose records go to `monitor`, and callbacks that also inform it.

    The given `callbacks` are called before the monitor. Raises `ContractError` if the setup has
    another recorder.
    """
    if setup.record is not record_nothing:
        raise ContractError("monitor", "Setup.record is set already: give one of them")
    if setup.record_transfer is not None:
        raise ContractError("monitor", "Setup.record_transfer is set already: give one of them")

    def on_step(reduced: ReducedStep, ms: float, plan: Plan) -> None:
        callbacks.on_step(reduced, ms, plan)
        monitor.between_steps()

    def on_layout_change(change: LayoutChange) -> None:
        monitor.plan_version = change.plan.version
        callbacks.on_layout_change(change)

    def on_idle() -> None:
        callbacks.on_idle()
        monitor.while_idle()

    return replace(setup, record=monitor.record, record_transfer=monitor.record), replace(
        callbacks, on_step=on_step, on_layout_change=on_layout_change, on_idle=on_idle
    )
