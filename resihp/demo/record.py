"""The record of a demo run: the data of the terminal summary, the report and `--json`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from resihp.contracts import Layout, Plan, Verdict


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One completed step, as one rank measured it.

    pace  of the emulated devices in this step over that of the first step
    """

    step: int
    loss: float
    step_ms: float
    plan_version: int
    pace: float = 1.0

    @property
    def paced_ms(self) -> float:
        """Step time as it would be at the pace of the first step."""
        return self.step_ms * self.pace


@dataclass(frozen=True, kw_only=True)
class LayoutChangeRecord:
    """A plan applied before step `step`, without the `lost` ranks."""

    step: int
    pause_ms: float
    received_bytes: int
    lost: tuple[int, ...]
    plan: Plan


@dataclass(frozen=True, kw_only=True)
class VerdictRecord:
    """A verdict that changed; `at_step` is the newest step that was complete by then."""

    at_step: int
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class SlowdownRecord:
    """The slowdown of a device by the detector at a step."""

    step: int
    rank: int
    slowdown: float
    status: str


@dataclass(frozen=True, kw_only=True)
class Check:
    """The outcome of one promise of the demo."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, kw_only=True)
class DemoRecord:
    """One demo run.

    reference    loss of each step of the undisturbed run
    script       what was done to the job: {"slow_rank", "slow_factor", "slow_at", "dead_rank",
                 "dead_at"}; -1 where a fault was left out
    emulated     sentences that say what was not real
    quotas       microbatches of each replica at the start
    trained      a sentence on the model, the data and the optimizer
    flops_per_ms  pace of a healthy emulated device in the first step; None: not paced
    wanted_flops_per_ms  the pace that the settings asked for
    """

    machine: str
    seconds: float
    layout: Layout
    quotas: tuple[int, ...]
    script: dict[str, float]
    steps: tuple[StepRecord, ...]
    reference: tuple[float, ...]
    switches: tuple[LayoutChangeRecord, ...]
    verdicts: tuple[VerdictRecord, ...]
    health: tuple[SlowdownRecord, ...]
    checks: tuple[Check, ...]
    emulated: tuple[str, ...]
    trained: str = ""
    flops_per_ms: float | None = None
    wanted_flops_per_ms: float | None = None

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans applied, each from its step."""
        return tuple(replace(switch.plan, from_step=switch.step) for switch in self.switches)

    @property
    def passed(self) -> bool:
        """True when all checks passed."""
        return all(check.passed for check in self.checks)
