"""What the live display, the summary and the report say: the same facts in the same words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from resihp.contracts import Layout, Plan, Stage, Status, Verdict

from .phases import PHASES, pace_changes
from .record import DemoRecord, LayoutChangeRecord

STATUS_WORDS: Mapping[Status, str] = {
    Status.HEALTHY: "healthy",
    Status.SUSPECT: "suspect",
    Status.FAIL_SLOW: "slow",
    Status.FAIL_STOP: "dead",
    Status.INCONCLUSIVE: "inconclusive",
}
PHASE_WORDS: Mapping[str, str] = dict(
    zip(
        PHASES,
        ("healthy", "one slow device", "after the live resize", "after the loss"),
        strict=True,
    )
)


def duration(ms: float | None) -> str:
    """Milliseconds with three figures: `4.17 ms`, `417 ms`, `4.17 s`; a dash for None."""
    if ms is None:
        return "–"
    if ms < 1000:
        return f"{ms:.0f} ms" if ms >= 100 else f"{ms:.3g} ms"
    return f"{ms / 1000:.1f} s" if ms >= 100_000 else f"{ms / 1000:.3g} s"


def size(count: float) -> str:
    """Bytes in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


def percent(share: float) -> str:
    """A probability; one that is not certain is not shown as 100%."""
    return (
        f"{share * 100:.0f}%"
        if share in (0.0, 1.0) or 0.01 <= share <= 0.99
        else (">99%" if share > 0.5 else "<1%")
    )


def plural(count: int, noun: str) -> str:
    """`1 step`, `3 steps`, `2 microbatches`."""
    if count == 1:
        return f"{count} {noun}"
    return f"{count} {noun}{'es' if noun.endswith('ch') else 's'}"


def ranks(numbers: Iterable[int]) -> str:
    """`rank 5`, `ranks 2 and 3`, `ranks 1, 2 and 3`; `no rank` for none."""
    names = [str(number) for number in sorted(numbers)]
    if len(names) < 2:
        return f"rank {names[0]}" if names else "no rank"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def layer_range(stage: Stage) -> str:
    """Layers as people count them: both ends belong to it; of each model chunk."""
    held = [(start, stop) for start, stop in stage.chunks if stop > start]
    told = [f"{start}–{stop - 1}" if stop - start > 1 else f"{start}" for start, stop in held]
    if not told:
        return "no layers"
    return f"layer{'' if stage.layer_count == 1 else 's'} {', '.join(told)}"


def grid(layout: Layout) -> str:
    """`DP2 × PP2 × TP2`, the largest of each where replicas differ."""
    return f"DP{layout.dp} × PP{layout.pp} × TP{layout.tp}"


def verdict_line(verdict: Verdict) -> str:
    """One verdict as a sentence without its full stop."""
    line = f"rank {verdict.rank} is {STATUS_WORDS[verdict.status]}"
    if verdict.status in (Status.SUSPECT, Status.FAIL_SLOW, Status.INCONCLUSIVE):
        line += f", {verdict.slowdown:.2f}× its normal time"
    if verdict.since_step is not None:
        line += f", since step {verdict.since_step}"
    return line


def switch_line(switch: LayoutChangeRecord) -> str:
    """One change of plan as a sentence without its full stop."""
    why = f" without {ranks(switch.lost)}" if switch.lost else ""
    return (
        f"plan {switch.plan.version} taken on live{why} before step {switch.step}: "
        f"{duration(switch.pause_ms)} pause, {size(switch.received_bytes)} moved"
    )


def plan_line(plan: Plan) -> str:
    """What the scheduler promised of a plan; empty where it promised nothing."""
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
    lines += [pace_change(at, record.flops_per_ms * pace) for at, pace in pace_changes(record)]
    if len(lines) > 1:
        lines.append("step times are given at the pace of the first step")
    return lines


def pace_change(step: int, flops_per_ms: float) -> str:
    """A change of the pace as a sentence without its full stop."""
    return (
        f"this machine became busy: all devices alike paced to {flops_per_ms / 1e6:.2g} GFLOP/s "
        f"from step {step} on"
    )


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
