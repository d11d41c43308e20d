"""The published what-if quantities of a recorded job.

Definitions: "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI'25):
slowdown S (equation 1), by kind of operation (2), by worker (4), M_W (5), and M_S (section 5.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..arrays import median
from .dependencies import Dependencies, dependencies, transfer_seconds
from .operations import COLLECTIVE, COMPUTE, LABELS, P2P, Floats, OpGrid, OpKind

_PIPELINE_COMM = {
    OpKind.FORWARD_SEND: "forward-pp-comm",
    OpKind.FORWARD_RECV: "forward-pp-comm",
    OpKind.BACKWARD_SEND: "backward-pp-comm",
    OpKind.BACKWARD_RECV: "backward-pp-comm",
}
_NOTHING = 1e-6
"""Least lost share of the step: recordings hold times of 7 digits."""


@dataclass(frozen=True, eq=False)
class WhatIf:
    """A recording, ready to be replayed with other durations.

    `own_s` [N, D, T] are the durations without waiting for others; `ideal_s` [N] the average
    of every kind of operation: the mean of compute, the median of communication.
    `absent` [N, D, T] marks what belongs to microbatches that a replica did not have in a step;
    None where all had the same number.
    """

    recording: OpGrid
    found: Dependencies
    own_s: Floats
    ideal_s: Floats
    absent: NDArray[np.bool_] | None = None

    @classmethod
    def of(
        cls,
        recording: OpGrid,
        found: Dependencies | None = None,
        own_s: Floats | None = None,
    ) -> WhatIf:
        """Prepares a recording. What was not recorded counts as usual for its place."""
        found = found or dependencies(recording)
        own = _without_gaps(transfer_seconds(recording, found) if own_s is None else own_s)
        absent = _absent(recording, found)
        if absent is None:
            return cls(recording, found, own, _ideal(recording, own))
        ideal = _ideal(recording, np.where(absent, np.nan, own))
        return cls(recording, found, np.where(absent, 0.0, own), ideal, absent)

    @cached_property
    def ideal_own_s(self) -> Floats:
        """Ideal durations that broadcast to [N, D, T]; nothing for what is absent."""
        ideal = self.ideal_s[:, None, None]
        return ideal if self.absent is None else np.where(self.absent, 0.0, ideal)

    def step_s(self, own_s: Floats, delay_s: Floats | None = None) -> NDArray[np.float64]:
        """Duration [T] of every step with these durations [N, D, T]."""
        return np.asarray(self.found.graph.makespan(own_s, delay_s), np.float64)

    def trained_s(self, own_s: Floats) -> NDArray[np.float64]:
        """Duration [T] of every step up to its last optimizer; where none was recorded, of all.

        A send may outlast its receive, and the step, without any operation waiting for it.
        """
        last = np.flatnonzero(self.recording.of_kind(OpKind.OPTIMIZER))
        until = last if last.size else None
        return np.asarray(self.found.graph.makespan(own_s, until=until), np.float64)

    @cached_property
    def recorded_s(self) -> NDArray[np.float64]:
        """Recorded duration [T] of every step."""
        end = self.recording.start_s + self.recording.duration_s
        return np.asarray(np.nanmax(end, axis=(0, 1)), np.float64)

    @cached_property
    def no_delay_s(self) -> NDArray[np.float64]:
        """Steps [T] as recorded, but every operation starts as soon as it can."""
        return self.step_s(self.own_s)

    @cached_property
    def ideal_step_s(self) -> float:
        """The mean step when every operation takes its ideal time."""
        return float(self.step_s(self.ideal_own_s).mean())

    @cached_property
    def slowdown(self) -> float:
        """S: mean step without launch delays over the ideal one; 1 where that takes no time."""
        return float(self.slowdown_of(self.no_delay_s))

    @cached_property
    def _ideal_trained_s(self) -> float:
        return float(self.trained_s(self.ideal_own_s).mean())

    @cached_property
    def launch_slowdown(self) -> float:
        """Mean recorded step over the same without launch delays."""
        undelayed = float(self.no_delay_s.mean())
        return float(self.recorded_s.mean()) / undelayed if undelayed > 0 else 1.0

    def slowdown_of(self, step_s: Floats) -> NDArray[np.float64]:
        """Mean over the steps (the last axis), as a multiple of the ideal step."""
        mean = np.asarray(step_s.mean(axis=-1), np.float64)
        ideal = self._ideal_trained_s
        return mean / ideal if ideal > 0 else np.ones_like(mean)

    @cached_property
    def by_replica_s(self) -> NDArray[np.float64]:
        """Steps [D, T] where one replica is as recorded and all else is ideal.

        All ideal replicas of as many microbatches run alike, so that one of them represents the
        rest. A job of one replica has none, and is as recorded.
        """
        operations, replicas, steps = self.own_s.shape
        if replicas == 1:
            return self.trained_s(self.own_s)[None]
        if self.absent is not None:
            one = np.eye(replicas, dtype=bool)[:, None, :, None]
            return np.stack([self._only(replica) for replica in one])
        pair = np.empty((operations, 2, steps))
        pair[:, 1] = self.ideal_s[:, None]
        found = np.empty((replicas, steps))
        for replica in range(replicas):
            pair[:, 0] = self.own_s[:, replica]
            found[replica] = self.trained_s(pair)
        return found

    @cached_property
    def by_stage_s(self) -> NDArray[np.float64]:
        """Steps [S, T] where one stage is as recorded and all else is ideal."""
        stages = range(self.recording.stages)
        here = self.recording.stage[:, None, None]
        return np.stack([self._only(here == stage) for stage in stages])

    @cached_property
    def by_kind_s(self) -> Mapping[str, NDArray[np.float64]]:
        """Steps [T] where one kind of operation is as recorded and all else is ideal."""
        labels = [
            _PIPELINE_COMM.get(OpKind(kind), LABELS[OpKind(kind)]) for kind in self.recording.kind
        ]
        names = np.array(labels)
        return {str(name): self._only((names == name)[:, None, None]) for name in np.unique(names)}

    @cached_property
    def by_worker(self) -> NDArray[np.float64]:
        """Slowdown [D, S] of every worker: the lesser of its replica's and its stage's."""
        replica, stage = self.slowdown_of(self.by_replica_s), self.slowdown_of(self.by_stage_s)
        return np.minimum.outer(replica, stage)

    @cached_property
    def m_w(self) -> float | None:
        """M_W: share of the lost time that the worst 3% of the workers explain; None: none lost."""
        dp, stage = np.nonzero(self.recording.rank >= 0)
        ranks = self.recording.rank[dp, stage]
        worst = np.lexsort((ranks, -self.by_worker[dp, stage]))[: -(-ranks.size * 3 // 100)]
        chosen = np.zeros(self.recording.rank.shape, bool)
        chosen[dp[worst], stage[worst]] = True
        return self.explained(chosen[:, self.recording.stage].T[:, :, None])

    @cached_property
    def m_s(self) -> float | None:
        """M_S: share of the lost time that the last stage explains; None where none is lost."""
        last = self.recording.stage == self.recording.stages - 1
        return self.explained(last[:, None, None])

    def explained(self, cells: NDArray[np.bool_]) -> float | None:
        """Share of the lost time that is recovered when these cells take their ideal time."""
        fixed = np.where(cells, self.ideal_own_s, self.own_s)
        return self.recovered(self.step_s(fixed))

    def recovered(self, step_s: Floats) -> float | None:
        """Share of the lost time that steps of these durations recover."""
        actual = float(self.no_delay_s.mean())
        lost = actual - self.ideal_step_s
        return (actual - float(step_s.mean())) / lost if lost > _NOTHING * actual else None

    def _only(self, cells: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Steps [T] where some cells are as recorded and all else is ideal."""
        return self.trained_s(np.where(cells, self.own_s, self.ideal_own_s))


def _absent(recording: OpGrid, found: Dependencies) -> NDArray[np.bool_] | None:
    """Mask [N, D, T] of operations of microbatches beyond the last one that a replica ran in a
    step.

    A replica without records in a step is assumed to have run as many as it usually does. None
    where nothing is absent.
    """
    passes = recording.of_kind(*COMPUTE)
    seen = np.isfinite(recording.start_s[passes])
    number = recording.microbatch[passes][:, None, None] + 1
    count = np.where(seen, number, 0).max(axis=0)
    if (count == count.max()).all():
        return None
    served = np.where(found.serves >= 0, recording.microbatch[found.serves], -1)
    own = np.where(passes, recording.microbatch, served)
    absent = (own[:, None, None] >= count) & (count > 0)
    return absent if absent.any() else None


def _without_gaps(own_s: Floats) -> Floats:
    """Missing cells at the median of their operation and replica; where that has none, at the
    median of the other replicas at the same step, or at 0."""
    missing = np.isnan(own_s)
    if not missing.any():
        return own_s
    rows = np.asarray(missing.any(axis=2))
    some = rows & ~np.asarray(missing.all(axis=2))
    usual = np.zeros(own_s.shape[:2])
    usual[some] = np.nanmedian(own_s[some], axis=1)
    filled = np.where(missing & some[:, :, None], usual[:, :, None], own_s)
    if not some[rows].all():
        filled = np.where(np.isnan(filled), median(own_s, 1), filled)
    return np.nan_to_num(filled)


def _ideal(recording: OpGrid, own_s: Floats) -> Floats:
    communication = recording.of_kind(*P2P, *COLLECTIVE)
    ideal = np.empty(recording.kind.size)
    for kind in np.unique(recording.kind):
        rows = recording.kind == kind
        values = own_s[rows]
        values = values[np.isfinite(values)]
        ideal[rows] = np.median(values) if communication[rows].all() else values.mean()
    return ideal
