"""Small stand-ins for detector and scheduler, whose behaviour a test can foretell.

The detector calls a rank slow when a forward record of it took 20 ms or more (10 ms is healthy),
a link when a transfer took 4 ms or more (2 ms is healthy), suspect from 3 ms on,
and counts every record exactly, so that a test sees one that was lost or applied twice.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from detector import ProbeRequest, ProbeResult, VerdictSummary
from detector.step_time import StepExpectation
from resihp.contracts import (
    Cause,
    Diagnosis,
    Heartbeat,
    InfeasibleError,
    Job,
    Layout,
    LinkVerdict,
    Op,
    Plan,
    Replica,
    Stage,
    Status,
    TelemetryBatch,
    Verdict,
)
from scheduler import ReplanDecision, SwitchCandidate
from scheduler import replan as real_replan
from service import Settings
from service.worker.adapters import Adapters

HEARTBEAT_TIMEOUT_S = 2.0


class FakeDetector:
    """Slow is 20 ms or more; every record counts."""

    padding = 0  # bytes by which a saved state is larger than it need be
    predictor = None

    def __init__(self, job: Job, predictor: bytes | None = None) -> None:
        if job.device == "refused":
            raise ValueError("this device is refused")
        self.job = job
        self.records = 0
        self.checksum = 0
        self.plan_version = 0
        self.known: dict[int, Verdict] = {}
        self.beats: dict[int, float] = {}
        self.transfers: dict[tuple[int, int], tuple[float, int]] = {}
        self.counters = {"restarts": 0}
        self.begun: list[int] = []

    def update(self, batch: TelemetryBatch) -> list[Verdict]:
        if 666 in batch.microbatch:
            raise RuntimeError("a poisonous record")
        self.records += len(batch)
        self.checksum = int(self.checksum + batch.tokens.sum()) % (1 << 40)
        changed = []
        sent = batch.select(batch.op == Op.P2P)
        ends = zip(sent.rank.tolist(), sent.peer.tolist(), strict=True)
        times = zip(sent.compute_ms.tolist(), sent.step.tolist(), strict=True)
        self.transfers.update(zip(ends, times, strict=True))
        for rank in np.unique(batch.rank).tolist():
            rows = (batch.rank == rank) & (batch.op != Op.P2P)
            slowdown = float(batch.compute_ms[rows].mean()) / 10.0
            slow = slowdown >= 2.0
            status = Status.FAIL_SLOW if slow else Status.HEALTHY
            step = int(batch.step[rows].max())
            changed += self._set(rank, status, slowdown if slow else 1.0, step)
        return changed

    def _set(self, rank: int, status: Status, slowdown: float, step: int) -> list[Verdict]:
        old = self.known.get(rank)
        if old is not None and old.status is Status.FAIL_STOP:
            return []
        evidence = (f"records={self.records}", f"checksum={self.checksum}")
        new = Verdict(rank=rank, status=status, slowdown=slowdown, evidence=evidence, step=step)
        self.known[rank] = new
        return [] if old is not None and old.status is status else [new]

    def step_time(self, step: int, measured_ms: float) -> StepExpectation:
        return StepExpectation(step, measured_ms)

    def links(self) -> list[LinkVerdict]:
        return [
            LinkVerdict(
                rank=rank, peer=peer, slowdown=ms / 2.0, since_step=step,
                status=Status.FAIL_SLOW if ms >= 4.0 else Status.SUSPECT,
            )
            for (rank, peer), (ms, step) in sorted(self.transfers.items())
            if ms >= 3.0
        ]  # fmt: skip

    def link_counts(self) -> dict[Status, int]:
        found = Counter(link.status for link in self.links())
        return dict(+Counter({Status.HEALTHY: len(self.transfers) - found.total(), **found}))

    def verdicts(self) -> list[Verdict]:
        evidence = (f"records={self.records}", f"checksum={self.checksum}")
        return [replace(verdict, evidence=evidence) for _, verdict in sorted(self.known.items())]

    def summary(self) -> VerdictSummary:
        none = np.empty(0, np.int64)
        return VerdictSummary(none, none, 1.0, None, self.verdicts())

    def unhealthy(self) -> list[Verdict]:
        return [v for _, v in sorted(self.known.items()) if v.status is not Status.HEALTHY]

    def diagnosis(self) -> Diagnosis:
        return Diagnosis(slowdown=1.25, root_cause=Cause.DEVICE, attribution={Cause.DEVICE: 1.0})

    def apply_plan(self, plan: Plan) -> None:
        if plan.version != self.plan_version:
            self.transfers = {}
        self.plan_version = plan.version

    def take_heartbeats(self, heartbeats: Iterable[Heartbeat], now: float) -> list[Verdict]:
        for heartbeat in heartbeats:
            self.beats.update(dict.fromkeys(heartbeat.ranks, now))
            if heartbeat.left:
                self.beats = {r: s for r, s in self.beats.items() if r not in heartbeat.ranks}
        return []

    def heard(
        self, ranks: Iterable[int], now: float, records: TelemetryBatch | None = None
    ) -> list[Verdict]:
        self.beats.update((rank, now) for rank in ranks if rank in self.beats)
        return []

    def check_alive(self, now: float) -> list[Verdict]:
        silent = [r for r, seen in self.beats.items() if now - seen > HEARTBEAT_TIMEOUT_S]
        return self.report_failure(silent, step=0, detail="silent")

    def report_failure(
        self, ranks: Iterable[int], *, step: int | None, detail: str
    ) -> list[Verdict]:
        changed: list[Verdict] = []
        for rank in ranks:
            self.beats.pop(rank, None)
            changed += self._set(rank, Status.FAIL_STOP, 1.0, step)
        return changed

    def asked_stacks(self) -> tuple[int, ...]:
        return ()

    def probe_requests(self, now: float) -> list[ProbeRequest]:
        return []

    def probe_result(self, result: ProbeResult) -> list[Verdict]:
        return []

    def save(self, arrays: dict[str, bytes] | None = None) -> bytes:
        if self.job.device == "never saved":
            raise OverflowError("this device is never saved")
        known = {str(r): [v.status.value, v.slowdown, v.step] for r, v in self.known.items()}
        sent = [[*ends, *what] for ends, what in self.transfers.items()]
        beats = list(self.beats.items())
        saved = [self.records, self.checksum, self.plan_version, known, sent, beats]
        return json.dumps(saved).encode() + b" " * self.padding

    @classmethod
    def restore(
        cls, job: Job, state: bytes, arrays: Mapping[str, bytes] | None = None
    ) -> FakeDetector:
        detector = cls(job)
        *counts, known, sent, beats = json.loads(state)
        detector.records, detector.checksum, detector.plan_version = counts
        detector.beats = dict(map(tuple, beats))
        detector.transfers = {(rank, peer): (ms, step) for rank, peer, ms, step in sent}
        for rank, (status, slowdown, step) in known.items():
            detector.known[int(rank)] = Verdict(
                rank=int(rank), status=Status(status), slowdown=slowdown, step=step
            )
        return detector


def make_plan(
    job: Job, speeds: Mapping[int, float], layout: Layout | None = None, **given: Any
) -> Plan:
    """Leave out the ranks that are dead or slow; infeasible when a stage would be empty."""
    replicas = []
    for replica in job.layout.replicas:
        stages = []
        for stage in replica.stages:
            ranks = tuple(rank for rank in stage.ranks if speeds.get(rank, 1.0) >= 1.0)
            if not ranks:
                raise InfeasibleError("devices", f"no device is left for layers {stage.layers}")
            stages.append(Stage(ranks, stage.layers))
        replicas.append(Replica(tuple(stages)))
    reason = tuple(f"rank {rank} runs at {speed:.2f}" for rank, speed in sorted(speeds.items()))
    return Plan(
        layout=Layout(tuple(replicas)), quotas=job.quotas, step_ms=80.0, bound_ms=64.0,
        reason=reason, version=given.get("version", 1), from_step=given.get("from_step", 0),
    )  # fmt: skip


def replan(
    job: Job, current: Plan, speeds: Mapping[int, float], *, step: int, **given: Any
) -> ReplanDecision:
    """Worth it only when a rank of the present layout is not at full speed.

    Moves are dear for a job whose device is called "dear": they cost five steps' gain, which pays
    over a horizon of more than five steps. A job that takes on no layout gets what it really gets.
    """
    if not job.takes_layouts:
        return real_replan(job, current, speeds, step=step, **given)
    if all(speeds.get(rank, 1.0) >= 1.0 for rank in current.layout.ranks):
        return ReplanDecision(plan=None)
    plan = make_plan(job, speeds, from_step=step)
    if job.device == "dear" and (given.get("horizon_steps") or 0) <= 5:
        offer = SwitchCandidate(plan=plan, saved_ms=10.0, cost_ms=50.0)
        return ReplanDecision(plan=None, rental=given["rental"].with_candidate(offer))
    return ReplanDecision(plan=plan)


def fake_adapters(settings: Settings | None = None) -> Adapters:
    return Adapters(FakeDetector, FakeDetector.restore, replan)
