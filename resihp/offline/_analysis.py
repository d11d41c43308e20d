"""A recorded job judged: verdicts on its devices, and why it is slow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from math import isfinite
from typing import Any

import numpy as np

from detector import Detector
from detector.diagnosis import WORTH_NAMING, Costs, conclude, costs_of
from detector.whatif import Causes, SlowDevice, WhatIf
from resihp.contracts import (
    ContractError,
    Diagnosis,
    Layout,
    Status,
    TelemetryBatch,
    TraceError,
    Verdict,
    to_json,
)

from ._trace import Trace


@dataclass(frozen=True, eq=False)
class Change:
    """A verdict that changed, and the step and plan version whose records changed it."""

    step: int
    verdict: Verdict
    plan_version: int


@dataclass(frozen=True, eq=False)
class Analysis:
    """Findings from a recording.

    verdicts   the last verdict on every recorded rank, by rank
    changes    every change of a verdict, in order
    diagnosis  why the job is slow
    costs      what each cause costs, per step: seconds with `whatif`, else milliseconds
    slow       the devices that were named, also if they became healthy again, in the layout of each
               plan version
    ended      the last step of the ranks whose records end early, by rank; of what came after, the
               detector knows nothing
    whatif     the published what-if quantities; None where the format lacks start times
    """

    trace: Trace
    verdicts: tuple[Verdict, ...]
    changes: tuple[Change, ...]
    diagnosis: Diagnosis
    costs: Costs
    slow: Mapping[int, tuple[SlowDevice, ...]]
    whatif: WhatIf | None
    ended: Mapping[int, int]

    @cached_property
    def layout(self) -> Layout:
        """The last layout of the job."""
        plans = self.trace.plans
        return plans[-1].layout if plans else self.trace.job.layout

    @property
    def tp(self) -> int:
        """The tensor-parallel degree of the last layout."""
        return self.layout.tp if self.trace.plans else self.trace.tp

    def to_json(self) -> dict[str, Any]:
        """The object that `resihp analyze --json` prints."""
        layout, diagnosis, ended = self.layout, self.diagnosis, sorted(self.ended.items())
        untimed = self.trace.untimed_ms
        return {
            "trace": str(self.trace.path),
            "format": self.trace.format,
            "layout": {"dp": layout.dp, "pp": layout.pp, "tp": self.tp},
            "steps": len(self.trace.steps),
            **({"untimed_ms": round(untimed, 3)} if isfinite(untimed) else {}),
            "slowdown": round(diagnosis.slowdown, 6),
            "root_cause": diagnosis.root_cause.value,
            "attribution": {
                cause: round(share, 6) for cause, share in to_json(diagnosis.attribution).items()
            },
            "devices": self.devices(),
            **({"ended": [{"rank": r, "last_step": s} for r, s in ended]} if ended else {}),
        }

    def devices(self) -> list[dict[str, Any]]:
        """One entry for every recorded rank, by rank, with its place in the last layout.

        A rank outside the last layout has its place in the last one that held it.
        """
        layouts = self.trace.layouts
        place = {p.rank: p for version in sorted(layouts) for p in layouts[version].places()}
        return [
            {
                "rank": verdict.rank,
                "dp": place[verdict.rank].dp,
                "pp": place[verdict.rank].pp,
                "verdict": verdict.status.value,
                "slowdown": round(verdict.slowdown, 4),
                "since_step": verdict.since_step,
            }
            for verdict in self.verdicts
        ]

    def unwell(self) -> list[tuple[Verdict, dict[str, Any]]]:
        """The verdicts that are not healthy with their entries of `devices`, the slowest first."""
        pairs = zip(self.verdicts, self.devices(), strict=True)
        unwell = [pair for pair in pairs if pair[0].status is not Status.HEALTHY]
        return sorted(unwell, key=lambda pair: -pair[0].slowdown)


def analyze(trace: Trace) -> Analysis:
    """Runs the detector over a recording and replays it. Raises `TraceError` if that fails."""
    try:
        judge, seen = TraceJudge(trace), LastSteps(trace)
        changes = tuple(judge.changes(seen.of(trace.batches())))
        verdicts = tuple(judge.verdicts[rank] for rank in trace.ranks if rank in judge.verdicts)
        whatif = None
        if trace.grid is not None:
            whatif = WhatIf.of(trace.recording, trace.dependencies, trace.own_s)
        layouts = trace.layouts
        stretches = _stretches(judge.verdicts, changes)
        slow = {v: _named(v, layout, stretches, judge.recorded) for v, layout in layouts.items()}
        costs = _costs(trace, slow) if whatif is None else _replayed(whatif, slow[0])
    except ContractError as error:
        raise TraceError(f"{trace.path}: {error}") from None
    last = {device.rank: version for version in sorted(slow) for device in slow[version]}
    diagnosis = conclude(
        costs,
        None if whatif is None else max(whatif.slowdown, 1.0),
        slow=[one for v in sorted(slow, reverse=True) for one in slow[v] if last[one.rank] == v],
    )
    if whatif is not None and (words := unexplained(whatif, costs)):
        diagnosis = replace(diagnosis, detail=(words, *diagnosis.detail[1:]))
    return Analysis(trace, verdicts, changes, diagnosis, costs, slow, whatif, seen.ended)


class TraceJudge:
    """Feeds a trace to the detector: plans take effect, and the last steps under each are judged
    though records of them are missing.

    Both are complete after `changes`:
    verdicts  the last verdict on every rank of any layout, by rank
    recorded  the first to the last step recorded under each plan version
    """

    def __init__(self, trace: Trace) -> None:
        self._trace, self._detector = trace, Detector(trace.job)
        self.verdicts: dict[int, Verdict] = {}
        self.recorded: dict[int, range] = {}

    def changes(self, batches: Iterable[TelemetryBatch]) -> Iterator[Change]:
        """The changes of verdicts over all batches of the trace."""
        detector, plans = self._detector, {plan.version: plan for plan in self._trace.plans}
        step = 0
        for batch in batches:
            if batch.plan_version > detector.plan_version and batch.plan_version in plans:
                yield from self._end_of_plan(step)
                detector.apply_plan(plans[batch.plan_version])
            step, version = int(batch.step[0]), batch.plan_version
            first = self.recorded.get(version, range(step, step)).start
            self.recorded[version] = range(first, step + 1)
            yield from self._changed(step, detector.update(batch))
        yield from self._end_of_plan(step)

    def _end_of_plan(self, step: int) -> Iterator[Change]:
        """Judges the steps up to `step` that still wait for records, and keeps the verdicts."""
        yield from self._changed(step, self._detector.finish())
        self.verdicts.update({verdict.rank: verdict for verdict in self._detector.verdicts()})

    def _changed(self, step: int, verdicts: Iterable[Verdict]) -> Iterator[Change]:
        yield from (Change(step, verdict, self._detector.plan_version) for verdict in verdicts)


class LastSteps:
    """Last step in which each rank of a recording has records."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._last: dict[int, int] = {}

    def of(self, batches: Iterable[TelemetryBatch]) -> Iterator[TelemetryBatch]:
        """The batches, which are noted as they pass."""
        for batch in batches:
            step = int(batch.step[0])  # lower than before where the job went back
            ranks = np.unique(batch.rank).tolist()
            self._last.update({rank: max(step, self._last.get(rank, 0)) for rank in ranks})
            yield batch

    @property
    def ended(self) -> dict[int, int]:
        """Last steps of the ranks whose records end early."""
        latest = min(self._trace.steps[-2:], default=0)  # the last step may have been cut off
        return {rank: step for rank, step in sorted(self._last.items()) if step < latest}


@dataclass(frozen=True, eq=False)
class _Stretch:
    """Steps in which a device was named: the change that named it, the last verdict on it, and the
    change that took the name back, None if none did."""

    named: Change
    verdict: Verdict
    ended: Change | None = None

    def under(
        self, version: int, layout: Layout, recorded: Mapping[int, range]
    ) -> tuple[SlowDevice, ...]:
        """The device as it was under a plan, none if it was not slow then. A job that went back
        under another plan took some steps again, so that their numbers alone do not tell."""
        first, since = self.named.plan_version, self.named.verdict.since_step
        if since is not None:
            if version < first and since >= recorded[first].start:
                return ()
            later = [steps.start for plan, steps in recorded.items() if first < plan <= version]
            since = min([since, *later])
        until = None
        if self.ended is not None:
            last, healthy = self.ended.plan_version, self.ended.verdict.since_step
            until = self.ended.step if healthy is None else healthy
            if version in recorded and version < last:
                until = max(until, recorded[version].stop)
            elif version in recorded and version > last and until > recorded[version].start:
                return ()
            if since is not None and until <= since:
                return ()
        found = SlowDevice.named([self.verdict], layout)
        return tuple(replace(device, since=since, until=until) for device in found)


def _stretches(verdicts: Mapping[int, Verdict], changes: Iterable[Change]) -> list[_Stretch]:
    """The stretches that are over, in order, and those of the devices that are named at the end,
    the slowest first."""
    past: list[_Stretch] = []
    now: dict[int, _Stretch] = {}
    for change in changes:
        verdict = change.verdict
        if verdict.status is Status.FAIL_SLOW:
            named = now[verdict.rank].named if verdict.rank in now else change
            now[verdict.rank] = _Stretch(named, verdict)
        elif verdict.rank in now:
            past.append(replace(now.pop(verdict.rank), ended=change))
    current = [replace(stretch, verdict=verdicts[rank]) for rank, stretch in now.items()]
    return [*past, *sorted(current, key=lambda one: (-one.verdict.slowdown, one.verdict.rank))]


def _named(
    version: int, layout: Layout, stretches: Iterable[_Stretch], recorded: Mapping[int, range]
) -> tuple[SlowDevice, ...]:
    """The devices of a layout that were named: those that are at the end come first, and a stretch
    within a later one of the same device is left out."""
    found = [device for one in stretches for device in one.under(version, layout, recorded)]
    last = [
        device
        for at, device in enumerate(found)
        if not any(_covers(later, device) for later in found[at + 1 :])
    ]
    return tuple(sorted(last, key=lambda device: device.until is not None))


def _covers(one: SlowDevice, other: SlowDevice) -> bool:
    """Test if a device was slow for all of another stretch of its own."""
    since = one.since is None or (other.since is not None and one.since <= other.since)
    until = one.until is None or (other.until is not None and other.until <= one.until)
    return one.rank == other.rank and since and until


def _replayed(whatif: WhatIf, slow: tuple[SlowDevice, ...]) -> Costs:
    causes = Causes(whatif, slow)
    return Costs(
        step=float(whatif.recorded_s.mean()),
        ideal=whatif.ideal_step_s,
        lost=causes.lost_s,
        steps=int(whatif.recording.steps.size),
        separates_devices=causes.effects.separates_devices,
        where=causes.where,
    )


def _costs(trace: Trace, slow: Mapping[int, tuple[SlowDevice, ...]]) -> Costs:
    """The mean over the stretches under one plan each."""
    parts = [
        costs_of(trace.job_under(version), trace.layouts[version], stretch, slow[version])
        for version, stretch in groupby(trace.batches(), key=lambda batch: batch.plan_version)
    ]
    return Costs.mean(parts)


_WORTH = 1.05
"""Slowdown from which a loss wants an explanation."""
_MOST = 0.5
"""Share of the loss from which most of it is somewhere."""


def unexplained(whatif: WhatIf, costs: Costs) -> str | None:
    """With which operations, and on which rank, most of the published loss goes; None where a cause
    is worth naming or the loss is small."""
    costly = max(costs.lost.values()) >= WORTH_NAMING * costs.step
    if costly or whatif.slowdown < _WORTH:
        return None
    said = f"Steps take {whatif.slowdown:.2f}x the ideal, and none of the causes explains it"
    by_kind = {kind: float(whatif.slowdown_of(step)) for kind, step in whatif.by_kind_s.items()}
    kind = max(by_kind, key=lambda name: by_kind[name])
    share = (by_kind[kind] - 1.0) / (whatif.slowdown - 1.0)
    if share < _MOST:
        return f"{said}: no kind of operation has most of it."
    return f"{said}: {min(share, 1.0):.0%} of the loss goes with {kind}{_place(whatif)}."


def _place(whatif: WhatIf) -> str:
    """The one rank that most of the loss goes with."""
    rec = whatif.recording
    slowdown = np.where(rec.rank >= 0, whatif.by_worker, 0.0)
    dp, stage = np.unravel_index(int(np.argmax(slowdown)), slowdown.shape)
    here = (rec.stage == stage)[:, None, None] & (np.arange(rec.replicas.size) == dp)[:, None]
    if rec.rank.size == 1 or (whatif.explained(here) or 0.0) < _MOST:
        return ""
    return f", most of it on rank {rec.rank[dp, stage]} (replica {rec.replicas[dp]}, stage {stage})"
