"""Cost of each cause in a recorded job: the job is replayed with that cause removed.

device      every pass takes the time of the same work on the peers of its stage
workload    every pass takes the mean of its device
stage       every stage takes as long as the median one
comm        every transfer and collective is as fast as in its best cases, and at most a fair
            share of the step is exposed communication
host        no garbage collection, no stalled pass, and no launch later than usual for its operation
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import Cause

from ..arrays import quantile
from .analysis import WhatIf
from .effects import EFFECTS, SETS, Effects, fair_costs, without_stalls
from .known_slow import SlowDevice, known_factor
from .localize import in_passes, most_of
from .operations import COLLECTIVE, COMPUTE, P2P, Floats, OpKind

_ALONE = (OpKind.FORWARD, OpKind.BACKWARD, OpKind.OPTIMIZER, OpKind.GC)
USUAL = 0.1
"""Quantile of communication and launch times that counts as achievable."""
UNEVEN = 2.0
"""Tolerated ratio of the parameters of two stages."""
FAIR_COMMUNICATION = 0.15
"""Exposed communication that counts as normal, as a share of the step without it."""


@dataclass(frozen=True, eq=False)
class Causes:
    """The causes in one recording; the devices in `slow` are known to be slow."""

    whatif: WhatIf
    slow: tuple[SlowDevice, ...] = ()

    @cached_property
    def cells(self) -> NDArray[np.intp]:
        """Operation [2, C, M] of every forward and backward pass; -1 where there is none."""
        rec = self.whatif.recording
        chunks = max(int(rec.chunk.max(initial=0)), 0) + 1
        passes = rec.of_kind(OpKind.FORWARD, OpKind.BACKWARD)
        count = int(rec.microbatch[passes].max(initial=0)) + 1
        cells = np.full((2, rec.stages * chunks, count), -1, np.intp)
        direction = (rec.kind[passes] == OpKind.BACKWARD).astype(np.intp)
        place = np.maximum(rec.chunk[passes], 0) * rec.stages + rec.stage[passes]
        cells[direction, place, rec.microbatch[passes]] = np.flatnonzero(passes)
        return cells

    @cached_property
    def times(self) -> NDArray[np.float64]:
        """Compute times [2, C, D, T, M] as recorded; NaN where there are none."""
        missing = (self.cells < 0)[:, :, :, None, None]
        times = np.where(missing, np.nan, self.whatif.own_s[self.cells])
        times = np.where(times > 0, times, np.nan)
        return np.ascontiguousarray(times.transpose(0, 1, 3, 4, 2))

    @cached_property
    def effects(self) -> Effects:
        """The effects in the compute times without stalls."""
        return Effects(without_stalls(self.times), known=self._known)

    @cached_property
    def _known(self) -> NDArray[np.float64]:
        """Factors [1, C, D, T, 1] of the known slow devices."""
        rec = self.whatif.recording
        chunks = self.times.shape[1] // rec.stages
        return known_factor(self.slow, rec.steps, rec.replicas, stages=rec.stages, chunks=chunks)

    @cached_property
    def removed(self) -> dict[Cause, float]:
        """Share of the lost time that is recovered without each effect in the compute times.

        Shares of the published lost time; they need not sum to 1, and the share of the stages
        is above 1 where one stage is so heavy that the ideal, an average, contains it.
        """
        effects = Effects(self.times, known=self._known)
        steps = {cause: self._step_s(effects.without([cause])) for cause in EFFECTS}
        return {cause: self.whatif.recovered(step_s) or 0.0 for cause, step_s in steps.items()}

    @cached_property
    def lost_s(self) -> dict[Cause, float]:
        """Mean seconds per step that each cause costs; 0 or more."""
        steps = {gone: float(self._step_s(self.effects.without(gone)).mean()) for gone in SETS}
        lost = fair_costs(steps)
        lost[Cause.SEQUENCE_IMBALANCE] *= self.effects.shared_work
        lost[Cause.COMMUNICATION] = self._communication(float(self.whatif.no_delay_s.mean()))
        delay, usual = self._delays
        best = self.whatif.step_s(self._undisturbed_s, usual)
        lost[Cause.HOST] = float((self.whatif.step_s(self.whatif.own_s, delay) - best).mean())
        return {cause: max(seconds, 0.0) for cause, seconds in lost.items()}

    def _step_s(self, times: Floats) -> NDArray[np.float64]:
        """Steps [T] with these compute times."""
        return self.whatif.step_s(self._own_s(times))

    def _own_s(self, times: Floats) -> NDArray[np.float64]:
        """All durations [N, D, T] with these compute times; as recorded where they are NaN."""
        own = self.whatif.own_s.copy()
        there = self.cells >= 0
        passes = times.transpose(0, 1, 4, 2, 3)[there]
        own[self.cells[there]] = np.where(np.isnan(passes), own[self.cells[there]], passes)
        return np.asarray(own, np.float64)

    @cached_property
    def _undisturbed_s(self) -> NDArray[np.float64]:
        """Durations [N, D, T] without garbage collection and without stalls."""
        own = self._own_s(self.effects.times)
        own[self.whatif.recording.of_kind(OpKind.GC)] = 0.0
        return own

    @cached_property
    def where(self) -> dict[Cause, str]:
        """Sentence on the place at which each cause is largest."""
        rec, own = self.whatif.recording, self.whatif.own_s
        found = in_passes(self.effects, rec.stages)
        wasted = (own - self._quick).sum(axis=2)
        waste = {
            "transfers between stages": self._by_place(wasted, *P2P),
            "collectives": self._by_place(wasted, *COLLECTIVE),
        }
        kind, place = most_of(waste, rec.replicas)
        if kind:
            found[Cause.COMMUNICATION] = f"most is in {kind}{place}"
        late, usual = self._delays
        held_up = (own - self._undisturbed_s).sum(axis=2)
        host = {
            "garbage collection": self._by_place(held_up, OpKind.GC),
            "pauses within passes": self._by_place(held_up, *COMPUTE),
            "late launches": self._by_place((late - usual).sum(axis=2), *_ALONE),
        }
        kind, place = most_of(host, rec.replicas)
        if kind:
            found[Cause.HOST] = f"most is {kind} on the ranks{place}"
        return found

    def _by_place(self, seconds: Floats, *kinds: OpKind) -> NDArray[np.float64]:
        """Sum [S, D] over the operations of some kinds, from seconds [N, D]."""
        rec = self.whatif.recording
        rows = rec.of_kind(*kinds)
        total = np.zeros((rec.stages, seconds.shape[1]))
        np.add.at(total, rec.stage[rows], seconds[rows])
        return total

    @cached_property
    def _quick(self) -> NDArray[np.float64]:
        """Durations [N, D, T] with communication as fast as in its best cases."""
        rec, own = self.whatif.recording, self.whatif.own_s
        quick = np.array(own, np.float64)
        if self.whatif.absent is not None:
            own = np.where(self.whatif.absent, np.nan, own)
        for kind in (*P2P, *COLLECTIVE):
            rows = (rec.kind == kind) & ~(self.whatif.found.idle | self.whatif.found.lone)
            if rows.any():
                usual = quantile(own[rows], USUAL, axis=(0, 1, 2))
                if kind in COLLECTIVE:  # stages hold parameters of different sizes
                    of_stage = quantile(own[rows], USUAL, axis=(1, 2))
                    usual = np.minimum(of_stage, UNEVEN * usual)
                quick[rows] = np.minimum(quick[rows], usual)
        return quick

    def _communication(self, actual: float) -> float:
        rec = self.whatif.recording
        uneven = actual - float(self.whatif.step_s(self._quick).mean())
        silent = rec.of_kind(*P2P, *COLLECTIVE)[:, None, None]
        without = float(self.whatif.step_s(np.where(silent, 0.0, self.whatif.ideal_own_s)).mean())
        excess = self.whatif.ideal_step_s - (1.0 + FAIR_COMMUNICATION) * without
        return max(uneven, 0.0) + max(excess, 0.0)

    @cached_property
    def _delays(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Launch delays as recorded, and limited to what is usual for the operation."""
        delay = _launch_delays(self.whatif)
        return delay, np.minimum(delay, quantile(delay, USUAL, axis=(1, 2)))


def _launch_delays(whatif: WhatIf) -> NDArray[np.float64]:
    """Seconds [N, D, T] from when an operation could have started until it did; 0 or more.

    Only of operations of one rank alone: a transfer that starts late may have waited for another.
    """
    start = whatif.recording.start_s
    end = start + whatif.recording.duration_s
    delay = np.zeros_like(start)
    for op in np.flatnonzero(whatif.recording.of_kind(*_ALONE)).tolist():
        before = whatif.found.predecessors[op]
        if before:
            delay[op] = start[op] - np.fmax.reduce(end[before], axis=0)
    return np.maximum(np.nan_to_num(delay), 0.0)
