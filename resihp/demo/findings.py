"""Findings of a run: its phases and their step times, detections, recovered time, checks.

Pure functions of a `DemoRecord`, shared by the terminal and the report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from resihp.contracts import Plan, Status
from resihp.formatting import duration, percent, plural, rank_list

from .record import Check, DemoRecord, LayoutChangeRecord, VerdictRecord

WARM_UP_STEPS = 3
PHASES: Mapping[str, str] = {
    "healthy": "healthy",
    "slow": "one slow device",
    "resized": "after the live resize",
    "after_loss": "after the loss",
}
"""Phases of a run, in words."""
_MEASURABLE = 0.03
_LOSS_TOLERANCE = 1e-3


@dataclass(frozen=True, kw_only=True)
class LossDifference:
    """Largest distance between the loss of the run and of its undisturbed reference."""

    largest: float
    at_step: int
    steps: int


def first_resize(record: DemoRecord) -> LayoutChangeRecord | None:
    """The first plan applied while every rank was alive."""
    return next((switch for switch in record.switches if not switch.lost), None)


def first_loss(record: DemoRecord) -> LayoutChangeRecord | None:
    """The first plan applied because ranks had died."""
    return next((switch for switch in record.switches if switch.lost), None)


def phase_spans(record: DemoRecord) -> dict[str, tuple[int, int]]:
    """Half-open range of steps of each phase that the run had.

    The first `WARM_UP_STEPS` steps, the step in which a fault sets in and the step before which a
    plan is applied belong to no phase: they are partly of both.
    """
    end = 1 + max((seen.step for seen in record.steps), default=-1)
    slow_at, dead_at = scripted(record, "slow_at"), scripted(record, "dead_at")
    resize, loss = first_resize(record), first_loss(record)
    death = min(
        (at for at in (dead_at, loss.step if loss else None) if at is not None), default=end
    )
    spans: dict[str, tuple[int, int]] = {}
    faults = [at for at in (slow_at, resize.step if resize else None) if at is not None]
    spans["healthy"] = (WARM_UP_STEPS, min([*faults, death]))
    if slow_at is not None:
        spans["slow"] = (slow_at + 1, min(resize.step if resize else end, death))
    if resize is not None:
        spans["resized"] = (resize.step + 1, death)
    if loss is not None:
        spans["after_loss"] = (loss.step + 1, end)
    return {name: span for name, span in spans.items() if span[0] < span[1]}


def step_times(record: DemoRecord) -> dict[str, float | None]:
    """Median step time in ms, at the pace of the first step, of each of `PHASES`.

    None where no step was completed in it.
    """
    times = dict[str, float | None].fromkeys(PHASES)
    for name, (start, stop) in phase_spans(record).items():
        measured = [seen.paced_ms for seen in record.steps if start <= seen.step < stop]
        times[name] = median(measured) if measured else None
    return times


def pace_changes(record: DemoRecord) -> list[tuple[int, float]]:
    """Steps with another pace than the step before, and the pace over that of the first step."""
    return [
        (seen.step, seen.pace)
        for before, seen in pairwise(record.steps)
        if seen.pace != before.pace
    ]


def loss_difference(record: DemoRecord) -> LossDifference | None:
    """The largest difference of the loss from the reference; None without a common step."""
    pairs = [
        (abs(seen.loss - record.reference[seen.step]), seen.step)
        for seen in record.steps
        if 0 <= seen.step < len(record.reference)
    ]
    if not pairs:
        return None
    largest, at_step = max(pairs)
    return LossDifference(largest=largest, at_step=at_step, steps=len(pairs))


def scripted(record: DemoRecord, name: str) -> int | None:
    """`slow_rank`, `slow_at`, `dead_rank` or `dead_at`; None where that fault was left out."""
    rank = record.script.get(f"{name.split('_', maxsplit=1)[0]}_rank", -1)
    value = int(record.script.get(name, -1))
    return value if value >= 0 and rank >= 0 else None


@dataclass(frozen=True, kw_only=True)
class Detection:
    """The first firm verdict on a slow rank.

    delay_steps  from the start of the fault to the verdict; None where the script slowed another
                 rank or none: then it is a false alarm
    """

    seen: VerdictRecord
    delay_steps: int | None


@dataclass(frozen=True, kw_only=True)
class PlanPeriod:
    """A span of steps [start, stop) under one plan; `switch` is None for the first one."""

    start: int
    stop: int
    plan: Plan
    switch: LayoutChangeRecord | None


def detections(record: DemoRecord) -> tuple[Detection, ...]:
    """The first FAIL_SLOW verdict on each rank that got one."""
    firsts: dict[int, VerdictRecord] = {}
    for seen in record.verdicts:
        if seen.verdict.status is Status.FAIL_SLOW:
            firsts.setdefault(seen.verdict.rank, seen)
    at, slow = scripted(record, "slow_at"), scripted(record, "slow_rank")
    return tuple(
        Detection(
            seen=seen,
            delay_steps=seen.at_step - at if at is not None and rank == slow else None,
        )
        for rank, seen in firsts.items()
    )


def plan_periods(record: DemoRecord) -> tuple[PlanPeriod, ...]:
    """The start layout and every plan applied, in order, each until the next."""
    end = 1 + max((seen.step for seen in record.steps), default=-1)
    starts = [0, *(switch.step for switch in record.switches)]
    stops = [*starts[1:], max(end, starts[-1])]
    first = Plan(version=0, layout=record.layout, quotas=record.quotas)
    plans = [(first, None), *((switch.plan, switch) for switch in record.switches)]
    return tuple(
        PlanPeriod(start=start, stop=stop, plan=plan, switch=switch)
        for (plan, switch), start, stop in zip(plans, starts, stops, strict=True)
    )


def period_ms(record: DemoRecord, period: PlanPeriod) -> float | None:
    """Median step time of a period without its first step; None where there is no such step."""
    times = [seen.paced_ms for seen in record.steps if period.start < seen.step < period.stop]
    return median(times) if times else None


def time_recovered(record: DemoRecord) -> float | None:
    """Share of the time lost to the slow device that the resize brought back, in [0, 1].

    1 also where the new layout is faster than the first one was without the fault. None where
    it cannot be measured: the slow device cost less than `_MEASURABLE` of a healthy step.
    """
    times = step_times(record)
    healthy, slow, resized = times["healthy"], times["slow"], times["resized"]
    if healthy is None or slow is None or resized is None or slow < (1 + _MEASURABLE) * healthy:
        return None
    return min(max((slow - resized) / (slow - healthy), 0.0), 1.0)


def recovered_sentence(record: DemoRecord) -> str:
    """The share of the lost time that came back, in words; empty without a resize."""
    share = time_recovered(record)
    if share is None:
        measured = step_times(record)["slow"] and first_resize(record)
        return "the slow device cost too little time to measure what came back" if measured else ""
    if share in (0.0, 1.0):
        return f"{'all' if share else 'none'} of the time lost to the slow device came back"
    return f"{percent(share)} of the time lost to the slow device came back"


def outcome(record: DemoRecord) -> str:
    """The outcome of the checks in a few words."""
    if not record.checks:
        return "Nothing was checked"
    failed = sum(not check.passed for check in record.checks)
    if not failed:
        return "All that was promised happened"
    return f"{failed} of {plural(len(record.checks), 'check')} failed"


def headline(record: DemoRecord) -> str:
    """The run in two or three sentences."""
    return " ".join(
        sentence
        for sentence in (_found_words(record), _resize_words(record), _loss_words(record))
        if sentence
    )


def _found_words(record: DemoRecord) -> str:
    sentences = []
    for item in detections(record):
        verdict = item.seen.verdict
        when = (
            f" {plural(item.delay_steps, 'step')} after it slowed down"
            if item.delay_steps is not None
            else ", a false alarm"
        )
        sentences.append(
            f"Rank {verdict.rank} was found to take {verdict.slowdown:.2f}x its normal time{when}."
        )
    if not sentences and scripted(record, "slow_rank") is not None:
        return "The slow rank was not found."
    return " ".join(sentences)


def _resize_words(record: DemoRecord) -> str:
    resize, times = first_resize(record), step_times(record)
    if resize is None:
        return ""
    sentence = f"The job changed its layout live, with a pause of {duration(resize.pause_ms)}"
    if times["slow"] is not None and times["resized"] is not None:
        sentence += (
            f", and its step time went from {duration(times['slow'])} to"
            f" {duration(times['resized'])} (healthy: {duration(times['healthy'])})"
        )
    return sentence + "."


def _loss_words(record: DemoRecord) -> str:
    loss, difference = first_loss(record), loss_difference(record)
    sentence = ""
    if loss is not None:
        left = len(loss.plan.layout.ranks)
        lost = rank_list(loss.lost)
        sentence = f"{lost[0].upper()}{lost[1:]} died, and {plural(left, 'rank')} trained on."
    if difference is not None:
        sentence += (
            f" The loss never strayed more than {difference.largest:.1g} from the undisturbed run."
        )
    return sentence.strip()


def check(record: DemoRecord) -> DemoRecord:
    """`record` with its checks."""
    return replace(
        record,
        checks=(
            _only_the_slow_rank_was_named(record),
            _plan_was_applied_live(record),
            _kill_was_survived(record),
            _faster_than_while_slow(record),
            _loss_falls_and_follows(record),
        ),
    )


def _only_the_slow_rank_was_named(record: DemoRecord) -> Check:
    slow = int(record.script["slow_rank"])
    named = [seen for seen in record.verdicts if seen.verdict.status is Status.FAIL_SLOW]
    ranks = {seen.verdict.rank for seen in named}
    passed = ranks == ({slow} if slow >= 0 else set())
    if not named:
        return Check(name="slow rank named", passed=passed, detail="no rank was named")
    first = named[0]
    detail = (
        f"named {sorted(ranks)}; first at step {first.at_step}, factor "
        f"{first.verdict.slowdown:.2f}, since step {first.verdict.since_step}"
    )
    return Check(name="slow rank named, and no other", passed=passed, detail=detail)


def _plan_was_applied_live(record: DemoRecord) -> Check:
    live = [switch for switch in record.switches if not switch.lost]
    passed = bool(live) == (record.script["slow_rank"] >= 0)
    detail = "; ".join(
        f"plan {s.plan.version} before step {s.step}, pause {s.pause_ms:.0f} ms" for s in live
    )
    return Check(name="plan applied live", passed=passed, detail=detail or "no plan was applied")


def _kill_was_survived(record: DemoRecord) -> Check:
    dead = int(record.script["dead_rank"])
    if dead < 0:
        return Check(name="kill survived", passed=True, detail="no rank was killed")
    after = [switch for switch in record.switches if dead in switch.lost]
    last = record.steps[-1].step if record.steps else -1
    passed = bool(after) and last > record.script["dead_at"]
    pause = f", pause {after[0].pause_ms:.0f} ms" if after else ""
    detail = f"rank {dead} died in step {record.script['dead_at']:.0f}; went on to {last}{pause}"
    return Check(name="kill survived", passed=passed, detail=detail)


def _faster_than_while_slow(record: DemoRecord) -> Check:
    times = step_times(record)
    slow, resized = times["slow"], times["resized"]
    if slow is None or resized is None:
        passed = record.script["slow_rank"] < 0
        return Check(name="faster after the resize", passed=passed, detail="not measured")
    detail = f"{slow:.0f} ms while slow, {resized:.0f} ms after ({slow / resized:.2f}x)"
    return Check(name="faster after the resize", passed=resized < slow, detail=detail)


def _loss_falls_and_follows(record: DemoRecord) -> Check:
    """The parallel run is the same training: it differs by the order of fp32 sums only."""
    if not record.steps:
        return Check(name="loss follows the undisturbed run", passed=False, detail="no step")
    apart = max(abs(seen.loss - record.reference[seen.step]) for seen in record.steps)
    first, last = record.steps[0].loss, record.steps[-1].loss
    passed = apart < _LOSS_TOLERANCE and last < first
    detail = f"{first:.2f} -> {last:.2f}, at most {apart:.1e} from the undisturbed run"
    return Check(name="loss falls, as undisturbed", passed=passed, detail=detail)
