"""Verdicts, plans and layouts as text, for the live display, the summary and the report."""

from __future__ import annotations

from collections.abc import Mapping

from resihp.contracts import Layout, Plan, Stage, Status, Verdict
from resihp.formatting import (
    byte_size,
    duration,
    grid,
    inclusive_ranges,
    noun_for,
    plural,
    rank_list,
    ratio,
)

from .findings import pace_changes
from .record import DemoRecord, LayoutChangeRecord

STATUS_WORDS: Mapping[Status, str] = {
    Status.HEALTHY: "healthy",
    Status.SUSPECT: "suspect",
    Status.FAIL_SLOW: "slow",
    Status.FAIL_STOP: "dead",
    Status.INCONCLUSIVE: "inconclusive",
}


def layer_range(stage: Stage) -> str:
    """The layers of a stage, both ends included, of each model chunk."""
    if not stage.layer_count:
        return "no layers"
    return f"{noun_for(stage.layer_count, 'layer')} {inclusive_ranges(stage.chunks)}"


def grid_of(layout: Layout) -> str:
    """The degrees of parallelism, the largest of each if replicas differ."""
    return grid(layout.dp, layout.pp, layout.tp)


def verdict_line(verdict: Verdict) -> str:
    """One verdict as a sentence without its full stop."""
    line = f"rank {verdict.rank} is {STATUS_WORDS[verdict.status]}"
    if verdict.status in (Status.SUSPECT, Status.FAIL_SLOW, Status.INCONCLUSIVE):
        line += f", {ratio(verdict.slowdown)} its normal time"
    if verdict.since_step is not None:
        line += f", since step {verdict.since_step}"
    return line


def switch_line(switch: LayoutChangeRecord) -> str:
    """One change of plan as a sentence without its full stop."""
    why = f" without {rank_list(switch.lost)}" if switch.lost else ""
    return (
        f"plan {switch.plan.version} applied live{why} before step {switch.step}: "
        f"{duration(switch.pause_ms)} pause, {byte_size(switch.received_bytes)} moved"
    )


def plan_line(plan: Plan) -> str:
    """The predicted step time of a plan and its gap; empty without a prediction."""
    if plan.step_ms <= 0:
        return ""
    line = f"predicted {duration(plan.step_ms)} a step"
    if plan.bound_ms > 0:
        line += f", {plan.gap * 100:.0f}% above the certified bound"
    return line


def paced(flops_per_ms: float, wanted: float) -> str:
    """The pace of the emulated devices, and why it is not the wanted one."""
    pace = f"devices paced to {flops_per_ms / 1e6:.2g} GFLOP/s"
    if flops_per_ms >= wanted:
        return pace
    return f"{pace}, not {wanted / 1e6:.2g}: this machine computes no faster for all of them"


def pace_lines(record: DemoRecord) -> list[str]:
    """The pace of the emulated devices at the start of a run and each change of it."""
    if record.flops_per_ms is None:
        return []
    lines = [paced(record.flops_per_ms, record.wanted_flops_per_ms or 0.0)]
    lines += [pace_change(step, record.flops_per_ms * pace) for step, pace in pace_changes(record)]
    if len(lines) > 1:
        lines.append("step times are given at the pace of the first step")
    return lines


def pace_change(step: int, flops_per_ms: float) -> str:
    """A lowered pace as a sentence without its full stop."""
    pace = f"{flops_per_ms / 1e6:.2g} GFLOP/s"
    return f"this machine became busy: all devices alike paced to {pace} from step {step} on"


def layout_lines(layout: Layout, quotas: tuple[int, ...]) -> list[str]:
    """A line a replica: `replica 0: ranks 0+1 (2:2) layers 0–4 → ranks 4+5 (3:1) layers 5–7, …`."""
    return [
        f"replica {index}: {' → '.join(_stage(stage) for stage in replica.stages)}, "
        + plural(quota, "microbatch")
        for index, (replica, quota) in enumerate(zip(layout.replicas, quotas, strict=True))
    ]


def _stage(stage: Stage) -> str:
    if stage.tp == 1:
        return f"rank {stage.ranks[0]} {layer_range(stage)}"
    names, shares = "+".join(map(str, stage.ranks)), ":".join(map(str, stage.shares))
    return f"ranks {names} ({shares}) {layer_range(stage)}"
