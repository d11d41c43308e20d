"""The demo while it runs: a live screen on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.live import Live

from resihp.contracts import Plan, Status
from resihp.formatting import duration

from ..descriptions import pace_change, plan_line, switch_line, verdict_line
from ..record import LayoutChangeRecord, SlowdownRecord, StepRecord, VerdictRecord
from .screen import Event, Screen, ViewModel

REFRESHES_PER_SECOND = 3
PLAIN_EVERY_STEPS = 10


class LiveDisplay:
    """Display of a running demo; a context manager with methods for any thread.

    On a terminal the screen is drawn `REFRESHES_PER_SECOND` times a second, whatever the rate of
    the calls, to leave the cores to the job. Elsewhere each event prints one line at once, and
    every `PLAIN_EVERY_STEPS`th step prints a line of progress.
    """

    def __init__(
        self,
        plan: Plan,
        steps: int,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console()
        self._drawn = self._console.is_terminal and not self._console.is_dumb_terminal
        self._clock = clock
        self._start = clock()
        self._lock = threading.RLock()
        self.view = ViewModel(plan=plan, steps=steps)
        self.screen = Screen(self.view, self._seconds, self._lock)
        self._live: Live | None = None

    def __enter__(self) -> LiveDisplay:
        self._start = self._clock()
        if self._drawn:
            self._live = Live(
                self.screen, console=self._console, refresh_per_second=REFRESHES_PER_SECOND
            )
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def phase(self, text: str) -> None:
        """Show the current activity, e.g. "Starting the sidecar…"."""
        with self._lock:
            self.view.phase = text
            self._log("phase", text)

    def links(self, dashboard_url: str, docs_url: str, report_path: object) -> None:
        """Show the addresses of dashboard, API and report."""
        with self._lock:
            targets = (dashboard_url, docs_url, str(report_path))
            self.view.links = dict(zip(("dashboard", "API", "report"), targets, strict=True))
            for name, target in self.view.links.items():
                self._plain(f"{name}: {target}")

    def step(self, seen: StepRecord) -> None:
        """Show a completed step."""
        with self._lock:
            self.view.seen.append(seen)
            if seen.step % PLAIN_EVERY_STEPS == 0 or seen.step == self.view.steps - 1:
                self._plain(
                    f"step {seen.step + 1}/{self.view.steps}: {duration(seen.paced_ms)}, "
                    f"loss {seen.loss:.4f}, plan {seen.plan_version}"
                )

    def verdict(self, seen: VerdictRecord) -> None:
        """Log a changed verdict."""
        with self._lock:
            verdict = seen.verdict
            device = self.view.devices[verdict.rank]
            device.status, device.slowdown = verdict.status, verdict.slowdown
            self._log("verdict", verdict_line(verdict), seen.at_step)

    def switch(self, seen: LayoutChangeRecord) -> None:
        """Log a change of layout and, below it, the reasons of its plan."""
        with self._lock:
            self.view.plan, self.view.plan_step = seen.plan, seen.step
            for rank in seen.lost:
                self.view.devices[rank].status = Status.FAIL_STOP
            self._log("plan", switch_line(seen), seen.step)
            for reason in (*seen.plan.reason, plan_line(seen.plan)):
                if reason:
                    self._log("why", reason, seen.step)

    def health(self, seen: Sequence[SlowdownRecord]) -> None:
        """Update slowdowns and statuses of living ranks, without a line in the log."""
        with self._lock:
            for item in seen:
                device = self.view.devices[item.rank]
                if device.status is not Status.FAIL_STOP:
                    device.slowdown, device.status = item.slowdown, Status(item.status)

    def fault(self, text: str) -> None:
        """Log a fault that was injected into the job."""
        with self._lock:
            at = self.view.next_step
            if self.view.first_fault is None:
                self.view.first_fault = at
            self._log("fault", text, at)

    def pace(self, step: int, flops_per_ms: float) -> None:
        """Log that all devices are paced to another speed from a step on."""
        with self._lock:
            self._log("phase", pace_change(step, flops_per_ms), step)

    def dead(self, rank: int) -> None:
        """Log the end of a rank."""
        with self._lock:
            self.view.devices[rank].status = Status.FAIL_STOP
            self._log("lost", f"rank {rank} is gone", self.view.next_step)

    def reference(self, step: int, steps: int) -> None:
        """Show the progress of the undisturbed reference run."""
        with self._lock:
            is_new, self.view.reference = self.view.reference != (step, steps), (step, steps)
            if step == steps and is_new:
                self._plain(f"reference run: {steps} steps done")

    def _seconds(self) -> float:
        return self._clock() - self._start

    def _log(self, kind: str, text: str, step: int | None = None) -> None:
        event = Event(seconds=self._seconds(), step=step, kind=kind, text=text)
        self.view.events.append(event)
        where = "" if step is None else f"step {step}: "
        self._plain(f"{where}{text}")

    def _plain(self, text: str) -> None:
        if not self._drawn:
            line = f"[{self._seconds():6.1f} s] {text}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
