"""Adapter from a monitor to the setup and the callbacks of an elastic job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from resihp.contracts import ContractError, Plan

from .state.events import Callbacks, LayoutChange
from .step import ReducedStep, Setup
from .step.setup import Recorder, record_nothing


class TrainingMonitor(Protocol):
    """The part of `resihp.Monitor` that the runtime uses. No method raises or waits."""

    plan_version: int
    """The plan of later records."""

    @property
    def record(self) -> Recorder:
        """Take a microbatch record."""
        ...

    @property
    def between_steps(self) -> Callable[[], None]:
        """Run the probes that the sidecar has requested."""
        ...

    @property
    def while_idle(self) -> Callable[[], None]:
        """The same on a rank without work, which also sends heartbeats."""
        ...


@dataclass(frozen=True)
class MonitorAdapter:
    """Connects `monitor` to a job. The given `callbacks` are called before the monitor."""

    monitor: TrainingMonitor
    callbacks: Callbacks

    def setup(self, setup: Setup) -> Setup:
        """The setup whose records go to the monitor.

        Raises `ContractError` if it has another recorder.
        """
        if setup.record is not record_nothing:
            raise ContractError("monitor", "Setup.record is set already: give one of them")
        return replace(setup, record=self.monitor.record)

    def adapted(self) -> Callbacks:
        """Callbacks that also inform the monitor."""
        return replace(
            self.callbacks,
            on_step=self._on_step,
            on_layout_change=self._on_layout_change,
            on_idle=self._on_idle,
        )

    def _on_step(self, reduced: ReducedStep, ms: float, plan: Plan) -> None:
        self.callbacks.on_step(reduced, ms, plan)
        self.monitor.between_steps()

    def _on_layout_change(self, change: LayoutChange) -> None:
        self.monitor.plan_version = change.plan.version
        self.callbacks.on_layout_change(change)

    def _on_idle(self) -> None:
        self.callbacks.on_idle()
        self.monitor.while_idle()
