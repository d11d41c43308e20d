"""Who watches a rank train: its records go there, and what it asks for is done between steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from resihp.contracts import ContractError, Plan

from .state.events import Callbacks, LayoutChange
from .step import ReducedStep, Setup
from .step.setup import Recorder, record_nothing


class TrainingMonitor(Protocol):
    """`resihp.Monitor` is one. No method of it raises or waits."""

    plan_version: int
    """The plan that later records are made under."""

    @property
    def record(self) -> Recorder:
        """Takes a record of what this rank did."""
        ...

    @property
    def between_steps(self) -> Callable[[], None]:
        """Run the probes that the sidecar asks for."""
        ...

    @property
    def while_idle(self) -> Callable[[], None]:
        """The same for a rank without work, which says now and then that it is there."""
        ...


def with_monitor(
    setup: Setup, callbacks: Callbacks, watch: TrainingMonitor
) -> tuple[Setup, Callbacks]:
    """The same job with every rank's records under `watch`; the callbacks given are called as
    before.

    Raises `ContractError` where the records go somewhere else already.
    """
    if setup.record is not record_nothing:
        raise ContractError("monitor", "Setup.record takes the records already: give one of them")

    def on_step(reduced: ReducedStep, ms: float, plan: Plan) -> None:
        callbacks.on_step(reduced, ms, plan)
        watch.between_steps()

    def on_layout_change(switch: LayoutChange) -> None:
        watch.plan_version = switch.plan.version
        callbacks.on_layout_change(switch)

    def on_idle() -> None:
        callbacks.on_idle()
        watch.while_idle()

    observed = replace(
        callbacks, on_step=on_step, on_layout_change=on_layout_change, on_idle=on_idle
    )
    return replace(setup, record=watch.record), observed
