"""Everything that belongs to one layout of a job: it ends when a plan changes the layout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from resihp.contracts import Job, Op, TelemetryBatch

from ._remarks import REPLICA, SILENT, Remarks
from .base.arrays import Bools, Floats, Ints, State
from .base.places import places_of
from .evidence.judge import FAIL_SLOW, FAIL_STOP, HEALTHY, SUSPECT, Book, Judge
from .evidence.replicas import Replicas
from .evidence.together import Together
from .evidence.turns import by_turns, lately
from .evidence.watch import Watch
from .expectation.correction import Correction
from .expectation.lengths import LengthModel
from .expectation.residual import StepResidual
from .expectation.witnesses import WitnessModel
from .expectation.workload import knows_lengths
from .probes import ProbeKind, ProbeResult, probe_evidence
from .records.intake import Intake
from .settings import DetectorSettings
from .surroundings.collectives import CollectiveLinks
from .surroundings.hosts import Hosts
from .surroundings.links import Links, LinkVerdict


class Epoch:
    """Intake, expectation, tests and statuses on one layout."""

    def __init__(
        self, job: Job, settings: DetectorSettings, correction: Correction | None = None
    ) -> None:
        self._job, self._settings = job, settings
        self._least = float(np.log(settings.min_slowdown))
        self.places = places_of(job.layout)
        self.intake = Intake(self.places, job.quotas, job.chunks, settings)
        self.model = LengthModel(job, self.places, correction or Correction(settings))
        self.witness_model = WitnessModel(job, self.places)
        self.watch = Watch(self.places, settings)
        self.together = Together(self.places)
        self.replicas = Replicas(self.places, settings)
        self.hosts = Hosts(self.places, settings)
        self.links = Links(self.places, settings)
        self.collectives = CollectiveLinks(self.places, settings)
        self._by_lengths: bool | None = None
        self.judge = Judge(self.places.size, settings)
        self.remarks = Remarks(self.places)
        self.last_step: int | None = None

    @property
    def book(self) -> Book:
        """What is said of every rank."""
        return self.judge.book

    @property
    def suspect_at(self) -> float:
        """Evidence (log) from which a rank is suspect."""
        return self.judge.suspect_at

    def snapshot(self) -> tuple[Ints, Floats]:
        """Statuses and factors, to tell later what changed."""
        return self.book.status.copy(), self.book.factor.copy()

    def decide(self, step: TelemetryBatch) -> None:
        """Judges one step, whose records are in canonical order."""
        if not len(step):
            return
        self.last_step = int(step.step[0])
        everyone = self.places.index(step.rank.astype(np.int64))
        self.links.observe(step, everyone, self.last_step)
        self.collectives.observe(step, everyone, self.last_step)
        slow_hosts = self.hosts.observe(step, everyone, self.last_step)
        self.remarks.tell_hosts(slow_hosts, self.hosts.test.factor)
        compute = (step.op == Op.FORWARD) | (step.op == Op.BACKWARD)
        records = step if compute.all() else step.select(compute)
        if not len(records):
            return
        index = self.places.index(records.rank.astype(np.int64))
        self._welcome(index)
        residual = self._residual(records)
        if not self._by_lengths and self.witness_model.misfits:
            self._doubt_maps()
            return
        trusted = self.judge.trusted()
        able = vouched = self._able()
        if not self._by_lengths:
            vouched = self.witness_model.vouched(trusted)
            trusted, vouched = trusted & vouched, able & vouched
        now = self.watch.observe(self.last_step, residual, trusted, able)
        now = by_turns(self.watch, now, vouched, self._least, self.book.fresh)
        if residual.fixed is not None:
            slow = self.replicas.observe(records, index, self.last_step, residual.fixed)
            self.remarks.mark(REPLICA, slow, self.book, self.last_step)
            excess, run = lately(self.watch, now, 3), self.book.slow_run + 1
            self.remarks.explained = self.replicas.explains(now, excess, run)
            now = replace(now, able=now.able & ~self.remarks.explained)
        self.together.observe(records, index)
        shared = self.together.settle(self.watch, now, self.suspect_at)
        self.judge.rule(self.watch, shared.standing, self.remarks.noted)
        self.remarks.blame(shared.blames)
        silent = self.intake.silent >= self._settings.silent_steps
        self.remarks.mark(SILENT, silent, self.book, self.last_step)

    def _residual(self, records: TelemetryBatch) -> StepResidual:
        known = knows_lengths(records)
        by_lengths = 2 * int(np.count_nonzero(known)) > len(records)
        if self._by_lengths is not None and by_lengths != self._by_lengths:
            self._watch_anew()
        self._by_lengths = by_lengths
        if by_lengths and not known.all():
            records = records.select(known)
        index = self.places.index(records.rank.astype(np.int64))
        model = self.model if by_lengths else self.witness_model
        return model.residuals(records, index, self.judge.trusted())

    def _doubt_maps(self) -> None:
        """The maps between stages fit no longer: one such step is passed over, after two running
        all is learned anew, and who is named is measured again."""
        if self.witness_model.misfits > 1:
            self.witness_model = WitnessModel(self._job, self.places)
            self._watch_anew()
            self.book.carried |= self.book.status == FAIL_SLOW

    def _watch_anew(self) -> None:
        self.watch = Watch(self.places, self._settings)
        self.replicas = Replicas(self.places, self._settings)

    def _able(self) -> Bools:
        """Ranks that enough others vouch against to be named: by lengths, all of them; else those
        with three replicas to compare, or two witnesses of the same microbatches."""
        if self._by_lengths:
            return np.ones(self.places.size, bool)
        witnesses = (self.witness_model.witnesses >= 0).sum(axis=1)
        many = self.places.class_sizes[self.places.peers] >= 3
        able: Bools = many & (witnesses >= 1) | (witnesses >= 2)
        return able

    def words(self, at: int) -> tuple[str, ...]:
        """What is to be told of a rank beside its own slowness."""
        return self.remarks.words(at, self.book, self.slow_links())

    def slow_links(self) -> list[LinkVerdict]:
        """Links and groups whose transfers take longer than their like."""
        one = self.links.verdicts() if self.links.any_slow else []
        return [*one, *(self.collectives.verdicts() if self.collectives.any_slow else [])]

    def fail(self, at: int, step: int | None) -> None:
        """A rank is gone."""
        if self.book.status[at] != FAIL_STOP:
            self.book.status[at] = FAIL_STOP
            known = step if step is not None else self.last_step
            self.book.since[at] = -1 if known is None else known

    def _welcome(self, index: Ints) -> None:
        """Ranks dead on an older layout that work on this one are alive."""
        book = self.book
        back = (book.status == FAIL_STOP) & book.carried
        back &= np.bincount(index, minlength=self.places.size) > 0
        book.status[back], book.carried[back] = HEALTHY, False

    def revive(self, rank: int) -> None:
        """A rank that was taken for dead is not."""
        at = int(self.places.index(np.array([rank]))[0])
        if at >= 0 and self.book.status[at] == FAIL_STOP:
            self.book.status[at], self.book.since[at] = HEALTHY, self.last_step or 0

    def suspects(self) -> list[tuple[int, int]]:
        """Ranks under suspicion, each with a healthy rank to compare it with."""
        healthy = np.flatnonzero(self.book.status == HEALTHY)
        pairs = []
        for at in np.flatnonzero(self.book.status == SUSPECT).tolist():
            alike = healthy[self.places.peers[healthy] == self.places.peers[at]]
            choice = alike if alike.size else healthy
            if choice.size:
                pairs.append((int(self.places.ranks[at]), int(self.places.ranks[choice[0]])))
        return pairs

    def healthy(self) -> list[int]:
        """Ranks that are healthy."""
        ranks: list[int] = self.places.ranks[self.book.status == HEALTHY].tolist()
        return ranks

    def leaving(self, staying: Iterable[int]) -> list[tuple[int, float, int]]:
        """Slow ranks that are not among `staying`: rank, slowdown and onset (-1: the start)."""
        book = self.book
        gone = (book.status == FAIL_SLOW) & ~np.isin(self.places.ranks, list(staying))
        return [
            (int(self.places.ranks[at]), float(book.factor[at]), int(book.since[at]))
            for at in np.flatnonzero(gone).tolist()
        ]

    def carry(self, rank: int, slowdown: float, since: int) -> None:
        """A rank that comes from outside the layout is known to be slow."""
        at, book = int(self.places.index(np.array([rank]))[0]), self.book
        book.status[at], book.since[at], book.carried[at] = FAIL_SLOW, since, True
        book.factor[at] = book.low[at] = book.high[at] = slowdown

    def take_probe(self, result: ProbeResult) -> None:
        """Adds the answer to a probe to the evidence on its rank."""
        at = int(self.places.index(np.array([result.rank]))[0])
        if at < 0:
            return
        self.remarks.tell_probe(at, result)
        if result.kind is not ProbeKind.LINK:
            slowdown = max(float(self.book.factor[at]), self._settings.min_slowdown)
            self.watch.add(at, probe_evidence(result, slowdown))

    def successor(self, job: Job) -> Epoch:
        """The epoch on the layout of `job`, with what outlives a layout."""
        after = Epoch(replace(job), self._settings, self.model.correction)
        after.model.inherit(self.model)
        after.last_step = self.last_step
        at = after.places.index(self.places.ranks)
        keep = (at >= 0) & np.isin(self.book.status, (FAIL_SLOW, FAIL_STOP))
        for name in ("status", "since", "factor", "low", "high"):
            getattr(after.book, name)[at[keep]] = getattr(self.book, name)[keep]
        after.book.carried[at[keep]] = True
        return after

    def state(self) -> State:
        """What `load` needs."""
        return {
            "intake": self.intake.state(),
            "model": self.model.state(),
            "witnesses": self.witness_model.state(),
            "by_lengths": self._by_lengths,
            "together": self.together.state(),
            "replicas": self.replicas.state(),
            "hosts": self.hosts.test.state(),
            "links": self.links.state(),
            "collectives": self.collectives.state(),
            "watch": self.watch.state(),
            "book": self.book.state(),
            **self.remarks.state(),
            "last_step": self.last_step,
        }

    def load(self, state: State) -> None:
        """Takes up what `state` returned."""
        self.intake.load(state["intake"])
        self.model.load(state["model"])
        self.witness_model.load(state["witnesses"])
        self._by_lengths = state["by_lengths"]
        self.together.load(state["together"])
        self.replicas.load(state["replicas"])
        self.hosts.test.load(state["hosts"])
        self.links.load(state["links"])
        self.collectives.load(state["collectives"])
        self.watch.load(state["watch"])
        self.book.load(state["book"])
        self.remarks.load(state)
        self.last_step = state["last_step"]
