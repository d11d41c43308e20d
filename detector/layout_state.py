"""Everything that belongs to one layout of a job; a plan with another layout begins a new one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from resihp.contracts import Job, LinkVerdict, Op, Status, TelemetryBatch

from .arrays import Bools, Floats, Ints
from .evidence.correlated_ranks import CorrelatedRanks
from .evidence.intermittent import recent_level, with_intermittent
from .evidence.pass_tests import PassTests
from .evidence.rank_tests import RankTests
from .evidence.status import FAIL_SLOW, FAIL_STOP, HEALTHY, SUSPECT, StatusTable
from .evidence.whole_replicas import ReplicaTest
from .expectation.cross_stage import CrossStageModel
from .expectation.length_model import LengthModel, knows_lengths
from .expectation.predictor import LearnedCorrection
from .links_and_hosts import CollectiveTest, HostTest, LinkTest
from .persistence import Persistent
from .probes import ProbeResult, probe_gain
from .rank_table import RankTable
from .settings import DetectorSettings
from .step_time import StepTimeModel
from .steps.assembler import StepAssembler
from .transfers import TransferTimes
from .verdict_text import REPLICA, SILENT, Annotations

_FEW_KNOWN, _MANY_KNOWN = 0.4, 0.6
"""Shares of records with lengths below which they are no longer used, and above which they are."""
_OTHER_STEPS = 3
"""Steps running with such a share before the way of comparison changes."""


class LayoutState(Persistent):
    """Step assembly, expectation, tests and statuses of the ranks of one layout."""

    _saved = (
        "assembler", "model", "cross_stage", "_by_lengths", "_other_steps", "correlated",
        "replicas", "hosts", "transfers", "links", "tensor_groups", "data_groups", "tests",
        "passes", "status_table", "annotations", "step_times", "last_step",
    )  # fmt: skip

    def __init__(self, job: Job, settings: DetectorSettings, correction: LearnedCorrection) -> None:
        self._job, self._settings = job, settings
        self._least = float(np.log(settings.min_slowdown))
        self.places = RankTable.of(job.layout)
        self.assembler = StepAssembler(self.places, job.quotas, job.chunks)
        self.model = LengthModel(job, self.places, correction)
        self.cross_stage = CrossStageModel(job, self.places)
        self.tests = RankTests(self.places.peers, settings)
        self.passes = PassTests(self.places.peers, settings)
        self.correlated = CorrelatedRanks(self.places)
        self.replicas = ReplicaTest(self.places, settings)
        self.hosts = HostTest(self.places, settings)
        self.transfers = TransferTimes(self.places)
        self.links = LinkTest(self.places, settings)
        self.tensor_groups = CollectiveTest(self.places, settings, within_microbatches=True)
        self.data_groups = CollectiveTest(self.places, settings, within_microbatches=False)
        self._by_lengths: bool | None = None
        self._other_steps = 0
        self.status_table = StatusTable(self.places.size, settings)
        self.annotations = Annotations(self.places, self.status_table)
        self.step_times = StepTimeModel(job, self.places)
        self.last_step: int | None = None
        self._link_verdicts: tuple[int | None, list[LinkVerdict] | None] = None, None

    def snapshot(self) -> tuple[Ints, Floats]:
        """Statuses and factors, to find later what changed."""
        return self.status_table.status.copy(), self.status_table.factor.copy()

    def decide(self, step: TelemetryBatch) -> None:
        """Updates all statuses by one whole step, whose records are in canonical order."""
        if not len(step):
            return
        number = self.last_step = int(step.step[0])
        self._date_back(number)
        everyone = self.places.index(step.rank)
        for test in self._link_tests:
            test.observe(step, everyone, number)
        slow_hosts = self.hosts.observe(step, everyone, number)
        self.annotations.note_hosts(slow_hosts, self.hosts.test.factor)
        compute = (step.op == Op.FORWARD) | (step.op == Op.BACKWARD)
        compute &= step.compute_ms > 0  # a time of 0 is not a measurement
        records = step if compute.all() else step.select(compute)
        if len(records):
            self._decide(records, self.places.index(records.rank), number)

    def _decide(self, records: TelemetryBatch, index: Ints, step: int) -> None:
        table, annotations = self.status_table, self.annotations
        self._revive_working(index)
        known = self._with_known_work(records)
        if not len(known):
            return
        model = self.model if self._by_lengths else self.cross_stage
        residual = model.residuals(known, self.places.index(known.rank), table.trusted())
        if not self._by_lengths and self.cross_stage.misfits:
            self._discard_maps()
            return
        named, healthy = table.status == FAIL_SLOW, table.status == HEALTHY
        trusted, representative = table.trusted(), healthy
        able = verifiable = self._able()
        if not self._by_lengths:
            verifiable = self.cross_stage.verifiable(trusted)
            trusted, verifiable = trusted & verifiable, able & verifiable
            representative = trusted  # one slow rank puts all that it is compared with in doubt
        self.correlated.observe(records, index)
        lags = self.correlated.lags
        now = self.tests.observe(step, residual, trusted, able, lags, representative)
        now = self.passes.joined(step, residual, trusted, now, representative)
        now = with_intermittent(self.tests, now, verifiable, self._least, table.fresh)
        if residual.fixed is None:  # lengths tell more work from slower devices
            annotations.mark(REPLICA, np.zeros(self.places.size, bool), step)
            annotations.explained = np.zeros(self.places.size, bool)
        else:
            slow = self.replicas.observe(records, index, step, residual.fixed)
            annotations.mark(REPLICA, slow, step)
            excess = recent_level(self.tests, now, 3)
            annotations.explained = self.replicas.explains(now, excess, table.slow_run + 1)
            now = replace(now, able=now.able & ~annotations.explained)
        now, waits_for = self.correlated.attribute(self.tests, now)
        table.update(self.tests, now, annotations.annotated)
        annotations.forget_probes(healthy & (table.status == HEALTHY))
        self.passes.clear(named & (table.status == HEALTHY))
        annotations.note_waiting(waits_for)
        annotations.mark(SILENT, self.assembler.silent, step)
        self._expect(known, residual.expected_ms)

    def _expect(self, records: TelemetryBatch, expected_ms: Floats | None) -> None:
        """Gives the predicted passes of a step to the model of its time. Of a rank that nothing
        predicts, or only ranks that may be slow, the records count, without its known slowdown."""
        if expected_ms is None:
            return
        table, index = self.status_table, self.places.index(records.rank)
        slow = np.flatnonzero(table.status == FAIL_SLOW)
        factor = np.ones(self.places.size)
        factor[slow] = np.maximum(table.factor[slow], 1.0)
        own_ms = records.compute_ms / factor[index]
        predicted = np.isfinite(expected_ms)
        if not self._by_lengths:
            predicted &= self.cross_stage.verifiable(table.trusted())[index]
        slowdowns = dict(zip(self.places.ranks[slow].tolist(), factor[slow].tolist(), strict=True))
        self.step_times.expect(records, np.where(predicted, expected_ms, own_ms), slowdowns)

    def _with_known_work(self, records: TelemetryBatch) -> TelemetryBatch:
        """The records with lengths, if most have them; else all, without regard to lengths.

        Most of the first step decide; later, few or many in several steps running.
        """
        known = knows_lengths(records)
        share = float(np.count_nonzero(known) / len(records))
        if self._by_lengths is None:
            self._by_lengths = share > 0.5
        other = share < _FEW_KNOWN if self._by_lengths else share > _MANY_KNOWN
        self._other_steps = self._other_steps + 1 if other else 0
        if self._other_steps >= _OTHER_STEPS:
            self._by_lengths, self._other_steps = not self._by_lengths, 0
            self._restart_tests()
        return records.select(known) if self._by_lengths and not known.all() else records

    def _discard_maps(self) -> None:
        """The maps between stages no longer fit. One such step is skipped; after two running, the
        maps are learned anew, and named ranks are measured again."""
        if self.cross_stage.misfits > 1:
            self.cross_stage = CrossStageModel(self._job, self.places)
            self._restart_tests()

    def _restart_tests(self) -> None:
        """Begins all tests anew; named ranks are measured again."""
        self.tests = RankTests(self.places.peers, self._settings)
        self.passes = PassTests(self.places.peers, self._settings)
        self.replicas = ReplicaTest(self.places, self._settings)
        self.status_table.carried |= self.status_table.status == FAIL_SLOW

    def _able(self) -> Bools:
        """Ranks with enough others to compare with to be named: by lengths, all of them; else
        those with three replicas, or two reference ranks of the same microbatches."""
        if self._by_lengths:
            return np.ones(self.places.size, bool)
        references = (self.cross_stage.references >= 0).sum(axis=1)
        many = self.places.class_sizes[self.places.peers] >= 3
        able: Bools = many & (references >= 1) | (references >= 2)
        return able

    @property
    def _link_tests(self) -> tuple[LinkTest, CollectiveTest, CollectiveTest]:
        return self.links, self.tensor_groups, self.data_groups

    def link_verdicts(self) -> list[LinkVerdict]:
        """The verdicts on links and groups that are slow or suspected, by their ranks. They are
        made once a step: they are asked for with each message."""
        step, made = self._link_verdicts
        if made is None or step != self.last_step:
            found = [verdict for test in self._link_tests for verdict in test.verdicts()]
            made = sorted(found, key=lambda link: (link.rank, link.peer, link.group))
            self._link_verdicts = self.last_step, made
        return list(made)

    def link_counts(self) -> Counter[Status]:
        """Number of links and groups that are compared, by status."""
        return sum((test.counts() for test in self._link_tests), Counter[Status]())

    def slow_links(self) -> list[LinkVerdict]:
        """The verdicts on links and groups that are slow."""
        return [link for link in self.link_verdicts() if link.status is Status.FAIL_SLOW]

    def fail(self, ranks: list[int], step: int | None) -> list[int]:
        """Marks ranks as dead, since `step` or the last one; returns those of the layout."""
        table, known = self.status_table, step if step is not None else self.last_step
        at = self.places.index(np.array(ranks, np.int64))
        at = at[at >= 0]
        fresh = at[table.status[at] != FAIL_STOP]
        table.status[fresh], table.since[fresh] = FAIL_STOP, -1 if known is None else known
        table.carried[fresh] = False  # its last records on this layout bring it not back
        found: list[int] = self.places.ranks[at].tolist()
        return found

    def stopped(self) -> set[int]:
        """Ranks that are held for dead."""
        return set(self.places.ranks[self.status_table.status == FAIL_STOP].tolist())

    def revive(self, rank: int) -> None:
        """Marks a rank that was held for dead as healthy."""
        at, table = self._position(rank), self.status_table
        if at >= 0 and table.status[at] == FAIL_STOP:
            table.status[at], table.since[at] = HEALTHY, self.last_step or 0

    def _revive_working(self, index: Ints) -> None:
        """Ranks dead on an older layout that send records on this one are alive."""
        table = self.status_table
        back = (table.status == FAIL_STOP) & table.carried
        back &= np.bincount(index, minlength=self.places.size) > 0
        table.status[back], table.carried[back] = HEALTHY, False

    def suspects(self) -> list[tuple[int, int]]:
        """Ranks under suspicion, each with a healthy rank to compare it with, a peer if any is."""
        status, places = self.status_table.status, self.places
        healthy = np.flatnonzero(status == HEALTHY)
        pairs = []
        for at in np.flatnonzero(status == SUSPECT).tolist() if healthy.size else ():
            reference = healthy[np.argmax(places.peers[healthy] == places.peers[at])]
            pairs.append((int(places.ranks[at]), int(places.ranks[reference])))
        return pairs

    def leaving(self, staying: Iterable[int]) -> list[tuple[int, float, int]]:
        """Slow ranks that are not among `staying`: rank, slowdown and onset (-1: the start)."""
        table, ranks = self.status_table, self.places.ranks
        gone = (table.status == FAIL_SLOW) & ~np.isin(ranks, list(staying))
        return [
            (int(ranks[at]), float(table.factor[at]), int(table.since[at]))
            for at in np.flatnonzero(gone).tolist()
        ]

    def carry(self, rank: int, slowdown: float, since: int) -> None:
        """A rank that joins the layout is known to be slow."""
        at, table = self._position(rank), self.status_table
        table.status[at], table.since[at], table.carried[at] = FAIL_SLOW, since, True
        table.factor[at] = table.low[at] = table.high[at] = slowdown

    def take_probe(self, result: ProbeResult) -> None:
        """Adds the answer to a probe to the evidence on its rank."""
        at = self._position(result.rank)
        if at < 0:
            return
        self.annotations.note_probe(at, result.kind.value, result.words)
        slowdown = max(float(self.status_table.factor[at]), self._settings.min_slowdown)
        gain = probe_gain(result, slowdown)
        # A processor slowed by heat shows in GEMM, a memory fault in bandwidth, so that a clean
        # probe of one kind counts only half against the suspicion.
        self.tests.add(at, gain if gain > 0 else 0.5 * gain)

    def _date_back(self, step: int) -> None:
        """Sets the onsets that are known from before this layout no later than a step of it: the
        job may have gone back."""
        table = self.status_table
        table.since[table.carried] = np.minimum(table.since[table.carried], step)

    def _position(self, rank: int) -> int:
        return int(self.places.index(np.array([rank]))[0])

    def successor(self, job: Job) -> LayoutState:
        """The state on the layout of `job`, with what is kept from one layout to the next."""
        after = LayoutState(job, self._settings, self.model.correction)
        after.model.start_from(self.model)
        after.step_times.start_from(self.step_times)
        after.last_step = self.last_step
        at = after.places.index(self.places.ranks)
        keep = (at >= 0) & np.isin(self.status_table.status, (FAIL_SLOW, FAIL_STOP))
        for name in ("status", "since", "factor", "low", "high"):
            getattr(after.status_table, name)[at[keep]] = getattr(self.status_table, name)[keep]
        after.status_table.carried[at[keep]] = True
        return after
