"""Timelines: what every rank did when, as recorded and as it ideally would have been."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detector.whatif import Causes
from detector.whatif.effects import Effects
from detector.whatif.operations import COLLECTIVE, LABELS, P2P, OpKind
from detector.whatif.step_replay import SPAN_NAMES, TRANSFERS, StepReplay
from resihp.contracts import TelemetryBatch

from ._analysis import Analysis


@dataclass(frozen=True, kw_only=True, eq=False)
class Spans:
    """Operations of one step as columns of equal length; times in seconds from its start.

    `name` indexes `names`; `transfer` marks transfers and collectives.
    """

    names: tuple[str, ...]
    name: NDArray[np.integer]
    replica: NDArray[np.integer]
    stage: NDArray[np.integer]
    microbatch: NDArray[np.integer]
    transfer: NDArray[np.bool_]
    start_s: NDArray[np.floating]
    duration_s: NDArray[np.floating]

    def select(self, rows: NDArray[Any]) -> Spans:
        """The spans that a mask or an index picks."""
        columns = {name: column[rows] for name, column in vars(self).items() if name != "names"}
        return Spans(names=self.names, **columns)


@dataclass(frozen=True, eq=False)
class DeviceFactors:
    """Slowdown of every device against its peers, step by step.

    A tensor-parallel group computes as one: its row is that of the slowest member.

    groups    the recorded ranks of each of R rows
    steps     number of each of T columns, in order of time: a step that was redone comes twice
    factor    [R, T]; NaN where the ranks of a row had no part in the step
    replanned columns with which another plan took effect
    """

    groups: tuple[tuple[int, ...], ...]
    steps: tuple[int, ...]
    factor: NDArray[np.float64]
    replanned: tuple[int, ...] = ()

    def column(self, rank: int, step: int) -> int | None:
        """Column of a step in which the rank took part, under the last plan if it was redone; the
        next one where there is none. None if that comes no more."""
        (row,) = (row for row, group in enumerate(self.groups) if rank in group)
        there = np.flatnonzero(np.isfinite(self.factor[row]))
        steps = np.array(self.steps)[there]
        same, later = there[steps == step], there[steps > step]
        return int(same[-1]) if same.size else next(iter(later.tolist()), None)

    @classmethod
    def joined(cls, parts: Sequence[DeviceFactors]) -> DeviceFactors:
        """Successive stretches as one. Ranks share a row if they do so in all of them."""
        rows: dict[int, list[int]] = {}
        for at, part in enumerate(parts):
            for row, group in enumerate(part.groups):
                for rank in group:
                    rows.setdefault(rank, [-1] * len(parts))[at] = row
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in sorted(rows):
            groups.setdefault(tuple(rows[rank]), []).append(rank)
        among = np.array(list(groups), np.intp)
        absent = np.where(among < 0, np.nan, 1.0)
        factors = [part.factor[among[:, at]] * absent[:, at, None] for at, part in enumerate(parts)]
        ends = np.cumsum([len(part.steps) for part in parts]).tolist()
        return cls(
            tuple(map(tuple, groups.values())),
            tuple(step for part in parts for step in part.steps),
            np.concatenate(factors, axis=1),
            tuple(ends[:-1]),
        )


@dataclass(frozen=True, eq=False)
class TraceTimeline:
    """The timelines of an analyzed recording, step by step."""

    analysis: Analysis

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps that can be shown: all, or those under the last plan that ran passes; none if no
        passes were recorded."""
        if self.analysis.whatif is not None:
            return self.analysis.trace.steps
        return tuple(self._stretches[-1][1].cubes.steps.tolist()) if self._stretches else ()

    def actual(self, step: int) -> Spans:
        """One step as it was; without recorded start times, as replayed from the durations."""
        at = self.steps.index(step)
        whatif = self.analysis.whatif
        if whatif is None:
            return self._replayed_spans(ideal=False, at=at)
        rec = whatif.recording
        return self._recorded_spans(rec.start_s[:, :, at], rec.duration_s[:, :, at])

    def ideal(self, step: int) -> Spans:
        """The same step with the average duration of every operation."""
        whatif = self.analysis.whatif
        if whatif is None:
            return self._replayed_spans(ideal=True, at=self.steps.index(step))
        ideal = np.broadcast_to(whatif.ideal_own_s, whatif.own_s.shape)
        own = ideal[:, :, [self.steps.index(step)]]
        start, end = whatif.found.graph.replay(own)
        return self._recorded_spans(start[:, :, 0], (end - start)[:, :, 0])

    def _recorded_spans(self, start: NDArray[np.floating], duration: NDArray[np.floating]) -> Spans:
        assert self.analysis.whatif is not None
        rec = self.analysis.whatif.recording
        op, replica = np.nonzero(np.isfinite(start) & (duration > 0))
        return Spans(
            names=tuple(LABELS[kind] for kind in OpKind),
            name=rec.kind[op].astype(np.int64),
            replica=rec.replicas[replica].astype(np.int64),
            stage=rec.stage[op].astype(np.int64),
            microbatch=rec.microbatch[op].astype(np.int64),
            transfer=rec.of_kind(*P2P, *COLLECTIVE)[op],
            start_s=start[op, replica],
            duration_s=duration[op, replica],
        )

    @cached_property
    def devices(self) -> DeviceFactors:
        """Slowdown of every device against its peers, step by step, under all plans. Requires
        `steps`."""
        whatif = self.analysis.whatif
        if whatif is None:
            parts = [
                self._factors(
                    version,
                    range(len(replayed.cubes.quotas)),
                    replayed.effects,
                    replayed.cubes.steps.tolist(),
                )
                for version, replayed in self._stretches
            ]
            return DeviceFactors.joined(parts)
        effects = Causes(whatif, self.analysis.slow[0]).effects
        replicas = whatif.recording.replicas.tolist()
        return self._factors(0, replicas, effects, self.analysis.trace.steps)

    def _factors(
        self, version: int, replicas: Sequence[int], effects: Effects, steps: Sequence[int]
    ) -> DeviceFactors:
        """Slowdowns under one plan; `replicas` are the numbers of the columns of `effects`."""
        recorded = set(self.analysis.trace.ranks)
        layout = self.analysis.trace.layouts[version]
        found = {
            tuple(sorted(recorded.intersection(stage.ranks))): effects.device[0, pp, at, :, 0]
            for at, dp in enumerate(replicas)
            for pp, stage in enumerate(layout.replicas[dp].stages)
        }
        groups = tuple(sorted(group for group in found if group))
        return DeviceFactors(groups, tuple(steps), np.stack([found[group] for group in groups]))

    @cached_property
    def _stretches(self) -> list[tuple[int, StepReplay]]:
        """Each plan version under which passes were recorded, and its steps, ready to be replayed;
        empty if the recording itself can be replayed."""
        if self.analysis.whatif is not None:
            return []
        trace = self.analysis.trace
        of_version: dict[int, list[TelemetryBatch]] = {}
        for batch in trace.batches():
            of_version.setdefault(batch.plan_version, []).append(batch)
        found = []
        for version, batches in sorted(of_version.items()):
            job, layout = trace.job_under(version), trace.layouts[version]
            slow = self.analysis.slow[version]
            if (replayed := StepReplay.of(job, layout, batches, slow)) is not None:
                found.append((version, replayed))
        return found

    def _replayed_spans(self, *, ideal: bool, at: int) -> Spans:
        replayed = self._stretches[-1][1]
        graph, (start, end) = replayed.graph, replayed.spans_ms(ideal=ideal)
        duration = (end - start)[:, :, at]
        op, column = np.nonzero(duration > 0)
        name, stage, microbatch = graph.places[:, op]
        return Spans(
            names=SPAN_NAMES,
            name=name,
            replica=column if graph.alike else graph.replica[op],
            stage=stage,
            microbatch=microbatch,
            transfer=np.isin(name, TRANSFERS),
            start_s=start[op, column, at] * 1e-3,
            duration_s=duration[op, column] * 1e-3,
        )
