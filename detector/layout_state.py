"""Everything that belongs to one layout of a job: it ends when a plan changes the layout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from resihp.contracts import Job, Op, TelemetryBatch

from .arrays import Bools, Floats, Ints
from .evidence.correlated_ranks import CorrelatedRanks
from .evidence.intermittent import by_turns, lately
from .evidence.rank_tests import RankTests
from .evidence.status import FAIL_SLOW, FAIL_STOP, HEALTHY, SUSPECT, StatusMachine, StatusTable
from .evidence.whole_replicas import ReplicaTest
from .expectation.cross_stage import CrossStageModel
from .expectation.length_model import LengthModel, knows_lengths
from .expectation.predictor import LearnedCorrection
from .links_and_hosts import CollectiveTest, HostTest, LinkTest, LinkVerdict
from .persistence import Persistent
from .probes import ProbeKind, ProbeResult, probe_evidence
from .rank_table import RankTable
from .residuals import StepResidual
from .settings import DetectorSettings
from .step_assembler import StepAssembler
from .verdict_text import REPLICA, SILENT, Annotations


class LayoutState(Persistent):
    """Intake, expectation, tests and statuses on one layout."""

    _saved = (
        "assembler",
        "model",
        "cross_stage",
        "_by_lengths",
        "correlated",
        "replicas",
        "hosts",
        "links",
        "collectives",
        "tests",
        "status_machine",
        "annotations",
        "last_step",
    )

    def __init__(
        self, job: Job, settings: DetectorSettings, correction: LearnedCorrection | None = None
    ) -> None:
        self._job, self._settings = job, settings
        self._least = float(np.log(settings.min_slowdown))
        self.places = RankTable.of(job.layout)
        self.assembler = StepAssembler(self.places, job.quotas, job.chunks)
        self.model = LengthModel(job, self.places, correction or LearnedCorrection(settings))
        self.cross_stage = CrossStageModel(job, self.places)
        self.tests = RankTests(self.places, settings)
        self.correlated = CorrelatedRanks(self.places)
        self.replicas = ReplicaTest(self.places, settings)
        self.hosts = HostTest(self.places, settings)
        self.links = LinkTest(self.places, settings)
        self.collectives = CollectiveTest(self.places, settings)
        self._by_lengths: bool | None = None
        self.status_machine = StatusMachine(self.places.size, settings)
        self.annotations = Annotations(self.places)
        self.last_step: int | None = None

    @property
    def status_table(self) -> StatusTable:
        """What is said of every rank."""
        return self.status_machine.status_table

    @property
    def suspect_at(self) -> float:
        """Evidence (log) from which a rank is suspect."""
        return self.status_machine.suspect_at

    def snapshot(self) -> tuple[Ints, Floats]:
        """Statuses and factors, to tell later what changed."""
        return self.status_table.status.copy(), self.status_table.factor.copy()

    def decide(self, step: TelemetryBatch) -> None:
        """Judges one step, whose records are in canonical order."""
        if not len(step):
            return
        self.last_step = int(step.step[0])
        everyone = self.places.index(step.rank)
        self.links.observe(step, everyone, self.last_step)
        self.collectives.observe(step, everyone, self.last_step)
        slow_hosts = self.hosts.observe(step, everyone, self.last_step)
        self.annotations.note_hosts(slow_hosts, self.hosts.test.factor)
        compute = (step.op == Op.FORWARD) | (step.op == Op.BACKWARD)
        records = step if compute.all() else step.select(compute)
        if not len(records):
            return
        index = self.places.index(records.rank)
        self._revive_working(index)
        residual = self._residual(records)
        if not self._by_lengths and self.cross_stage.misfits:
            self._discard_maps()
            return
        trusted = self.status_machine.trusted()
        able = verifiable = self._able()
        if not self._by_lengths:
            verifiable = self.cross_stage.verifiable(trusted)
            trusted, verifiable = trusted & verifiable, able & verifiable
        now = self.tests.observe(self.last_step, residual, trusted, able)
        now = by_turns(self.tests, now, verifiable, self._least, self.status_table.fresh)
        if residual.fixed is not None:
            slow = self.replicas.observe(records, index, self.last_step, residual.fixed)
            self.annotations.mark(REPLICA, slow, self.status_table, self.last_step)
            excess, run = lately(self.tests, now, 3), self.status_table.slow_run + 1
            self.annotations.explained = self.replicas.explains(now, excess, run)
            now = replace(now, able=now.able & ~self.annotations.explained)
        self.correlated.observe(records, index)
        shared = self.correlated.attribute(self.tests, now, self.suspect_at)
        self.status_machine.update(self.tests, shared.standing, self.annotations.annotated)
        self.annotations.note_waiting(shared.waits_for)
        silent = self.assembler.silent
        self.annotations.mark(SILENT, silent, self.status_table, self.last_step)

    def _residual(self, records: TelemetryBatch) -> StepResidual:
        known = knows_lengths(records)
        by_lengths = 2 * int(np.count_nonzero(known)) > len(records)
        if self._by_lengths is not None and by_lengths != self._by_lengths:
            self._restart_tests()
        self._by_lengths = by_lengths
        if by_lengths and not known.all():
            records = records.select(known)
        index = self.places.index(records.rank)
        model = self.model if by_lengths else self.cross_stage
        return model.residuals(records, index, self.status_machine.trusted())

    def _discard_maps(self) -> None:
        """The maps between stages fit no longer: one such step is passed over, after two running
        all is learned anew, and who is named is measured again."""
        if self.cross_stage.misfits > 1:
            self.cross_stage = CrossStageModel(self._job, self.places)
            self._restart_tests()
            self.status_table.carried |= self.status_table.status == FAIL_SLOW

    def _restart_tests(self) -> None:
        self.tests = RankTests(self.places, self._settings)
        self.replicas = ReplicaTest(self.places, self._settings)

    def _able(self) -> Bools:
        """Ranks that enough others vouch against to be named: by lengths, all of them; else those
        with three replicas to compare, or two witnesses of the same microbatches."""
        if self._by_lengths:
            return np.ones(self.places.size, bool)
        references = (self.cross_stage.references >= 0).sum(axis=1)
        many = self.places.class_sizes[self.places.peers] >= 3
        able: Bools = many & (references >= 1) | (references >= 2)
        return able

    def words(self, at: int) -> tuple[str, ...]:
        """What is to be told of a rank beside its own slowness."""
        return self.annotations.words(at, self.status_table, self.slow_links())

    def slow_links(self) -> list[LinkVerdict]:
        """Links and groups whose transfers take longer than their like."""
        one = self.links.verdicts() if self.links.any_slow else []
        return [*one, *(self.collectives.verdicts() if self.collectives.any_slow else [])]

    def fail(self, at: int, step: int | None) -> None:
        """A rank is gone."""
        if self.status_table.status[at] != FAIL_STOP:
            self.status_table.status[at] = FAIL_STOP
            known = step if step is not None else self.last_step
            self.status_table.since[at] = -1 if known is None else known

    def _revive_working(self, index: Ints) -> None:
        """Ranks dead on an older layout that work on this one are alive."""
        status_table = self.status_table
        back = (status_table.status == FAIL_STOP) & status_table.carried
        back &= np.bincount(index, minlength=self.places.size) > 0
        status_table.status[back], status_table.carried[back] = HEALTHY, False

    def revive(self, rank: int) -> None:
        """A rank that was taken for dead is not."""
        at = int(self.places.index(np.array([rank]))[0])
        if at >= 0 and self.status_table.status[at] == FAIL_STOP:
            self.status_table.status[at], self.status_table.since[at] = HEALTHY, self.last_step or 0

    def suspects(self) -> list[tuple[int, int]]:
        """Ranks under suspicion, each with a healthy rank to compare it with."""
        healthy = np.flatnonzero(self.status_table.status == HEALTHY)
        pairs = []
        for at in np.flatnonzero(self.status_table.status == SUSPECT).tolist():
            alike = healthy[self.places.peers[healthy] == self.places.peers[at]]
            choice = alike if alike.size else healthy
            if choice.size:
                pairs.append((int(self.places.ranks[at]), int(self.places.ranks[choice[0]])))
        return pairs

    def healthy(self) -> list[int]:
        """Ranks that are healthy."""
        ranks: list[int] = self.places.ranks[self.status_table.status == HEALTHY].tolist()
        return ranks

    def leaving(self, staying: Iterable[int]) -> list[tuple[int, float, int]]:
        """Slow ranks that are not among `staying`: rank, slowdown and onset (-1: the start)."""
        status_table = self.status_table
        gone = (status_table.status == FAIL_SLOW) & ~np.isin(self.places.ranks, list(staying))
        return [
            (
                int(self.places.ranks[at]),
                float(status_table.factor[at]),
                int(status_table.since[at]),
            )
            for at in np.flatnonzero(gone).tolist()
        ]

    def carry(self, rank: int, slowdown: float, since: int) -> None:
        """A rank that comes from outside the layout is known to be slow."""
        at, status_table = int(self.places.index(np.array([rank]))[0]), self.status_table
        status_table.status[at], status_table.since[at], status_table.carried[at] = (
            FAIL_SLOW,
            since,
            True,
        )
        status_table.factor[at] = status_table.low[at] = status_table.high[at] = slowdown

    def take_probe(self, result: ProbeResult) -> None:
        """Adds the answer to a probe to the evidence on its rank."""
        at = int(self.places.index(np.array([result.rank]))[0])
        if at < 0:
            return
        self.annotations.note_probe(at, result)
        if result.kind is not ProbeKind.LINK:
            slowdown = max(float(self.status_table.factor[at]), self._settings.min_slowdown)
            self.tests.add(at, probe_evidence(result, slowdown))

    def successor(self, job: Job) -> LayoutState:
        """The epoch on the layout of `job`, with what outlives a layout."""
        after = LayoutState(replace(job), self._settings, self.model.correction)
        after.model.start_from(self.model)
        after.last_step = self.last_step
        at = after.places.index(self.places.ranks)
        keep = (at >= 0) & np.isin(self.status_table.status, (FAIL_SLOW, FAIL_STOP))
        for name in ("status", "since", "factor", "low", "high"):
            getattr(after.status_table, name)[at[keep]] = getattr(self.status_table, name)[keep]
        after.status_table.carried[at[keep]] = True
        return after
