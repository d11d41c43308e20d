"""Cost of each cause in a recorded job: the job is replayed with that cause removed.

device      every pass takes the time of the same work on the peers of its stage
workload    every pass takes the mean of its device, for the mean work of all replicas
stage       every stage takes as long as the median one
comm        every transfer and collective is as fast as in its best cases, and at most a fair
            share of the step is exposed communication
host        no garbage collection, no stalled pass, and no launch later than usual for its operation
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import Cause

from ..arrays import mean, quantile
from .analysis import WhatIf
from .effects import EFFECTS, SETS, Effects, fair_costs, without_stalls
from .operations import COLLECTIVE, COMPUTE, P2P, Floats, Ints, OpKind
from .places import SlowDevice, known_factor

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
        whatif = self.whatif
        silent = whatif.recording.of_kind(*P2P, *COLLECTIVE)[:, None, None]
        without = np.where(silent, 0.0, whatif.ideal_own_s)
        communication = (whatif.own_s, self._quick, whatif.ideal_own_s, without)
        delay, usual = self._delays
        best = whatif.step_s(self._undisturbed_s, usual)
        return lost_by_cause(
            self.effects,
            lambda times: float(self._step_s(times).mean()),
            communication=[float(whatif.step_s(own).mean()) for own in communication],
            host=float((whatif.step_s(whatif.own_s, delay) - best).mean()),
        )

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

    @cached_property
    def _delays(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Launch delays as recorded, and limited to what is usual for the operation."""
        delay = _launch_delays(self.whatif)
        return delay, np.minimum(delay, quantile(delay, USUAL, axis=(1, 2)))


def lost_by_cause(
    effects: Effects,
    step: Callable[[Floats], float],
    *,
    communication: Sequence[float],
    host: float,
) -> dict[Cause, float]:
    """Mean time per step that each cause costs; 0 or more.

    step           mean step with these compute times
    communication  mean step as it was, and with the quickest communication; the ideal one, and
                   that without any communication
    host           cost of the host
    """
    lost = fair_costs({gone: step(effects.without(gone)) for gone in SETS})
    lost[Cause.SEQUENCE_IMBALANCE] *= effects.shared_work
    actual, quick, ideal, silent = communication
    excess = ideal - (1.0 + FAIR_COMMUNICATION) * silent
    lost[Cause.COMMUNICATION] = max(actual - quick, 0.0) + max(excess, 0.0)
    lost[Cause.HOST] = host
    return {cause: max(cost, 0.0) for cause, cost in lost.items()}


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


_LEAST = 1.02  # least ratio to the rest that is reported
_MOST = 0.5  # share from which a place has most of something


def in_passes(effects: Effects, stages: int) -> dict[Cause, str]:
    """Sentences on the heaviest stage and on uneven microbatches."""
    alike = effects.of_equal_parts
    found = {}
    if stages > 1 and (words := _heavy_stage(alike, stages)):
        found[Cause.STAGE_IMBALANCE] = words
    if words := _uneven_work(alike):
        found[Cause.SEQUENCE_IMBALANCE] = words
    return found


def _heavy_stage(alike: NDArray[np.float64], stages: int) -> str:
    """Sentence on the heaviest stage, by the median replica's mean time over all its chunks."""
    passes = quantile(mean(alike, axis=(3, 4)), 0.5, axis=2)[:, :, 0, 0, 0]
    weight = np.nansum(passes, axis=0).reshape(-1, stages).sum(axis=0)
    heavy = int(np.argmax(weight))
    others = float(np.delete(weight, heavy).mean())
    ratio = float(weight[heavy]) / others if others > 0 else 1.0
    if ratio < _LEAST:
        return ""
    rest = "the others" if stages > 2 else "the other one"
    return f"stage {heavy} takes {ratio:.2f}x as long as {rest}, whatever the devices"


def _uneven_work(alike: NDArray[np.float64]) -> str:
    """Sentence on the largest work of a microbatch relative to the mean of its step."""
    relative = alike / mean(alike, axis=(2, 3, 4))
    work = mean(relative, axis=(0, 1))[0, 0]
    of_step = mean(work, axis=(0, 2))
    longest = _usual_most(work / of_step, (0, 2))
    fullest = _usual_most(mean(work, axis=2) / of_step, 0)
    if longest < _LEAST:
        return ""
    words = f"the longest one of a step has {longest:.2f}x the mean work"
    if work.shape[0] > 1 and fullest >= _LEAST:
        words += f", the fullest replica {fullest:.2f}x"
    return words


def _usual_most(values: Floats, axis: int | tuple[int, ...]) -> float:
    return float(np.nan_to_num(mean(quantile(values, 1.0, axis), axis=(0, 1, 2)), nan=1.0).item())


def most_of(lost: Mapping[str, Floats], replicas: Ints | None = None) -> tuple[str, str]:
    """The kind with most of the lost time [S, D], and where it is; empty where none is lost.

    `replicas` [D] are their numbers, if they are not counted from 0.
    """
    kind = max(lost, key=lambda name: float(lost[name].sum()))
    return (kind, _place(lost[kind], replicas)) if lost[kind].any() else ("", "")


def _place(lost: Floats, replicas: Ints | None) -> str:
    """The stage and replica with most of the lost time, as words; empty where none has."""
    total = float(lost.sum())
    if total <= 0:
        return ""
    stage, replica = np.unravel_index(int(np.argmax(lost)), lost.shape)
    if lost.size > 1 and float(lost[stage, replica]) > _MOST * total:
        number = replica if replicas is None else replicas[replica]
        return f" of stage {stage} in replica {number}"
    heavy = int(np.argmax(lost.sum(axis=1)))
    if lost.shape[0] > 1 and float(lost[heavy].sum()) > _MOST * total:
        return f" of stage {heavy}"
    return ""
