"""Findings of a run: detections and their delay, recovered time, periods under one plan.

Pure functions of a `DemoRecord`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from resihp.contracts import Layout, Status, Verdict, even_quotas
from resihp.formatting import duration, percent, plural, rank_list

from .phases import first_loss, first_resize, loss_difference, scripted, step_times
from .record import DemoRecord, LayoutChangeRecord, VerdictRecord

_MEASURABLE = 0.03


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
    """A span of steps [start, stop) under one plan; `switch` is None for the start layout.

    `quotas` empty means not known.
    """

    version: int
    start: int
    stop: int
    layout: Layout
    quotas: tuple[int, ...]
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
    switches: list[LayoutChangeRecord | None] = [None, *record.switches]
    return tuple(
        PlanPeriod(
            version=switch.plan.version if switch else 0,
            start=start,
            stop=stop,
            layout=switch.plan.layout if switch else record.layout,
            quotas=switch.plan.quotas if switch else _start_quotas(record),
            switch=switch,
        )
        for switch, start, stop in zip(switches, starts, stops, strict=True)
    )


def _start_quotas(record: DemoRecord) -> tuple[int, ...]:
    """The sum of the quotas never changes, so that any plan gives the one at the start."""
    if record.quotas or not record.switches:
        return record.quotas
    return even_quotas(record.switches[0].plan.microbatches, record.layout.dp)


def period_ms(record: DemoRecord, period: PlanPeriod) -> float | None:
    """Median step time of a period without its first step; None where there is no such step."""
    times = [seen.paced_ms for seen in record.steps if period.start < seen.step < period.stop]
    return median(times) if times else None


def known_at(record: DemoRecord, step: int) -> Mapping[int, Verdict]:
    """The last verdict on each rank up to and including `step`."""
    return {seen.verdict.rank: seen.verdict for seen in record.verdicts if seen.at_step <= step}


def lost_by(record: DemoRecord, step: int) -> frozenset[int]:
    """Ranks that had died before `step` was completed."""
    return frozenset(
        rank for switch in record.switches if switch.step <= step for rank in switch.lost
    )


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
