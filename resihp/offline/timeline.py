"""Timelines: what every rank did when, as recorded and as it ideally would have been."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detector.whatif import Causes, SlowDevice
from detector.whatif.operations import COLLECTIVE, LABELS, P2P, OpKind
from detector.whatif.step_replay import SPAN_NAMES, TRANSFERS, StepReplay

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
class TraceTimeline:
    """The timelines of an analyzed recording, step by step."""

    analysis: Analysis

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps that can be shown; none if no passes were recorded."""
        if self.analysis.whatif is not None:
            return self.analysis.trace.steps
        return () if self._stretch is None else tuple(self._stretch[1].cubes.steps.tolist())

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
    def device_factor(self) -> tuple[tuple[tuple[int, ...], ...], NDArray[np.float64]]:
        """The recorded ranks of each of R stages, and the factor [R, steps] by which the slowest of
        them was slower than its peers. A tensor-parallel group computes as one. Requires `steps`.
        """
        recorded = set(self.analysis.trace.ranks)
        layout = self.analysis.trace.layouts[self._version]
        if self.analysis.whatif is not None:
            effects = Causes(self.analysis.whatif, self.slow).effects
            replicas = self.analysis.whatif.recording.replicas.tolist()
        else:
            assert self._stretch is not None
            effects = self._stretch[1].effects
            replicas = list(range(layout.dp))
        found = {
            tuple(sorted(recorded.intersection(stage.ranks))): effects.device[0, pp, at, :, 0]
            for at, dp in enumerate(replicas)
            for pp, stage in enumerate(layout.replicas[dp].stages)
        }
        groups = tuple(sorted(group for group in found if group))
        return groups, np.stack([found[group] for group in groups])

    @property
    def slow(self) -> tuple[SlowDevice, ...]:
        """The devices in the layout of these steps that were named, also if they became healthy
        again. Requires `steps`."""
        return self.analysis.slow[self._version]

    @property
    def _version(self) -> int:
        return 0 if self._stretch is None else self._stretch[0]

    @cached_property
    def _stretch(self) -> tuple[int, StepReplay] | None:
        """The newest plan version under which passes were recorded, and its steps, ready to be
        replayed; None if there are none, or if the recording itself can be replayed."""
        if self.analysis.whatif is not None:
            return None
        trace = self.analysis.trace
        batches = list(trace.batches())
        for version in sorted({batch.plan_version for batch in batches}, reverse=True):
            layout, slow = trace.layouts[version], self.analysis.slow[version]
            own = [batch for batch in batches if batch.plan_version == version]
            if (replayed := StepReplay.of(trace.job, layout, own, slow)) is not None:
                return version, replayed
        return None

    def _replayed_spans(self, *, ideal: bool, at: int) -> Spans:
        assert self._stretch is not None
        replayed = self._stretch[1]
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
