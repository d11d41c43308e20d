"""The detector: telemetry in, verdicts out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from resihp.contracts import (
    ContractError,
    Diagnosis,
    Heartbeat,
    Job,
    Layout,
    LinkVerdict,
    Plan,
    Schedule,
    Status,
    TelemetryBatch,
    Verdict,
    from_json,
    to_json,
)

from .arrays import Ints
from .diagnosis import diagnose
from .evidence.status import FAIL_SLOW, FAIL_STOP, HEALTHY, beliefs
from .expectation.predictor import LearnedCorrection, Predictor
from .layout_state import LayoutState
from .persistence import Persistent, pack, unpack
from .probes import Probation, ProbeBudget, ProbeKind, ProbeRequest, ProbeResult
from .rank_processes import RankProcesses
from .recent_steps import RecentSteps
from .settings import DetectorSettings
from .step_time import StepExpectation
from .verdict_text import VerdictSummary, verdict_of
from .whatif.places import SlowDevice

_MOST_AHEAD, _MOST_AHEAD_RECORDS = 64, 2**20
"""Messages of a newer plan than the known one that are kept, and records in them."""
_WORTH_TELLING = 0.05
"""Change of a named device's slowdown (log) from which the verdict is returned again."""
_ORDINARY_DOUBT = 0.01
"""Probability of slowness below which a healthy rank is one like all others."""
_LONE_PROBES = (ProbeKind.GEMM, ProbeKind.MEMORY)
"""Probes that a rank runs alone."""
_COUNTERS = ("older_plan", "ahead", "late", "astray", "excess", "restarts", "unknown_ranks")
"""Records of older and of newer plans, of steps that were closed before, of steps too far ahead of
all others and of microbatches far beyond those of a step; restarts; heartbeats of unknown ranks."""
_SILENCE = "its heartbeats have stopped"
_ENDED = "its process ended with "


class Detector(Persistent):
    """Verdicts on every rank of one job, from the records of its microbatches.

    Call `update` with each batch as it arrives: whole steps, single ranks, late, repeated and out
    of order records are all right, and the outcome is the same. Verdicts change when a step is
    whole. A job that goes back to an earlier step, as from a checkpoint, starts afresh; names
    stay until records say otherwise. Everything is deterministic: no clock, no thread, no
    randomness but `settings.seed`. One object serves one job and is not thread-safe.

    predictor   a fitted `detector.Predictor` of an earlier job of the same model and device type;
                without one the job trains its own
    begun       ranks as which other processes began by the heartbeats taken last
    """

    _saved = (
        "plan_version", "counters", "_probe_budget", "_probation", "_layout_state", "_processes",
        "_notes", "_recent", "_ahead", "_pending",
    )  # fmt: skip
    _notes: dict[int, tuple[str, ...]]
    _ahead: deque[TelemetryBatch]
    _pending: dict[int, Verdict]

    def __init__(
        self,
        job: Job,
        *,
        settings: DetectorSettings | None = None,
        predictor: Predictor | None = None,
    ) -> None:
        self.job = self._original_job = job
        self.settings = settings or DetectorSettings()
        self.plan_version = 0
        self.counters = dict.fromkeys(_COUNTERS, 0)
        correction = LearnedCorrection(self.settings, predictor)
        self._layout_state = LayoutState(job, self.settings, correction)
        self._processes = RankProcesses(self._layout_state.places)
        self._probe_budget = ProbeBudget(self.settings.probes_per_minute)
        self._probation = Probation(self.settings)
        self._pending, self._notes = {}, {}
        self._recent = RecentSteps()
        self._ahead = deque(maxlen=_MOST_AHEAD)
        self.begun: list[int] = []

    @property
    def predictor(self) -> Predictor | None:
        """The learned cost of work, for the next job; None before the training. It corrects
        analytic times, and predicts none by itself."""
        return self._layout_state.model.correction.predictor

    def update(self, batch: TelemetryBatch) -> list[Verdict]:
        """Takes records; returns the verdicts that they changed."""
        if batch.plan_version < self.plan_version:
            self.counters["older_plan"] += len(batch)
            return []
        if batch.plan_version > self.plan_version:
            self.counters["ahead"] += len(batch)
            self._ahead.append(batch)
            while sum(map(len, self._ahead)) > _MOST_AHEAD_RECORDS:
                self._ahead.popleft()
            return []
        before = self._layout_state.snapshot()
        self._take(batch)
        messages = self._layout_state.assembler.progress.restart()
        if messages:
            self.counters["restarts"] += 1
            self._layout_state = self._layout_state.successor(self.job)
            self._recent.clear()
            self._processes.sensors.clear()
            for message in messages:
                self._take(message)
        return self._told(before)

    def finish(self) -> list[Verdict]:
        """Judges the steps that still wait for records, as at the end of a trace; returns the
        verdicts that they changed, like `update`. Later records of these steps are ignored."""
        before = self._layout_state.snapshot()
        self._judge(self._layout_state.assembler.finish())
        return self._told(before)

    def _told(self, before: tuple[Ints, np.ndarray]) -> list[Verdict]:
        """The verdicts that changed, and those that wait to be told."""
        self._drop_notes()
        changed = {**self._pending, **{v.rank: v for v in self._changed(before)}}
        self._pending = {}
        return [changed[rank] for rank in sorted(changed)]

    def _drop_pending(self) -> None:
        """Forget verdicts that wait to be told and no longer hold on a new layout."""
        pending = self._pending
        now = {v.rank: v.status for v in self._verdicts_at(self._positions(sorted(pending)))}
        self._pending = {
            rank: verdict for rank, verdict in pending.items() if now.get(rank) is verdict.status
        }

    def _take(self, batch: TelemetryBatch) -> None:
        assembler = self._layout_state.assembler
        self._judge(assembler.add(batch))
        self.counters["late"] += assembler.progress.late
        self.counters["astray"] += assembler.progress.astray

    def _judge(self, steps: Iterable[TelemetryBatch]) -> None:
        for step in steps:
            self.counters["excess"] += self._layout_state.assembler.excess
            step = self._layout_state.transfers.separated(step)  # noqa: PLW2901 the same records
            if len(step):
                self._recent.add(step, self._layout_state.places)
            self._layout_state.decide(step)

    def step_time(self, step: int, measured_ms: float) -> StepExpectation:
        """Takes what a step took, once for each step; returns it with what was to be expected of
        its work, if `update` has had its records."""
        return self._layout_state.step_times.measured(step, measured_ms)

    def verdicts(self) -> list[Verdict]:
        """The current verdict on every rank of the layout, and on those that left it because they
        were slow; in the order of ranks."""
        working = self._verdicts_at(range(self._layout_state.places.size))
        return sorted([*working, *self._probation.verdicts()], key=lambda verdict: verdict.rank)

    def summary(self) -> VerdictSummary:
        """The content of `verdicts` at the cost of the ranks that are not simply healthy."""
        state, table = self._layout_state, self._layout_state.status_table
        doubt = beliefs(table.evidence)
        healthy = (table.status == HEALTHY) & (doubt < _ORDINARY_DOUBT)
        healthy &= ~state.annotations.remarkable(state.slow_links())
        healthy[self._positions(self._processes.hanging)] = False
        others = self._verdicts_at(np.flatnonzero(~healthy).tolist())
        others = sorted([*others, *self._probation.verdicts()], key=lambda verdict: verdict.rank)
        return VerdictSummary(
            healthy=state.places.ranks[healthy],
            since=table.since[healthy],
            confidence=1.0 - float(doubt[healthy].max(initial=0.0)),
            step=state.last_step,
            others=others,
        )

    def unhealthy(self) -> list[Verdict]:
        """The verdicts on ranks of the layout that are slow or have stopped, and on all that left
        it because they were slow: what a plan depends on, at the cost of these ranks alone."""
        status = self._layout_state.status_table.status
        slow = np.flatnonzero((status == FAIL_SLOW) | (status == FAIL_STOP)).tolist()
        return [*self._verdicts_at(slow), *self._probation.verdicts()]

    def diagnosis(self) -> Diagnosis:
        """Diagnosis of the last steps; no cause before the first."""
        table = self._layout_state.status_table
        named = np.flatnonzero(table.status == FAIL_SLOW).tolist()
        by_host = self._processes.sensors.by_host(table, named)
        slow = SlowDevice.named(self._verdicts_at(named), self.job.layout, by_host=by_host)
        return diagnose(self.job, self.job.layout, self._recent.batches(), slow)

    def apply_plan(self, plan: Plan) -> None:
        """Starts afresh on the layout of a newer plan.

        The learned cost of work is kept. A device named slow keeps its name until records on the
        new layout say otherwise, and one that leaves the layout until probes do. Records of older
        plans are ignored from now on. Records of this plan that came early are taken now; the
        verdicts that they change are returned by the next `update`. An older version, and the same
        plan again, do nothing; another plan of the same version replaces it.
        """
        job = moved_job(self._original_job, plan.layout, plan.quotas, plan.schedule)
        is_known = plan.version == self.plan_version and job == self.job
        if plan.version < self.plan_version or is_known:
            return
        self.plan_version, self.job = plan.version, job
        last_step = self._layout_state.last_step or 0
        for rank, slowdown, since in self._layout_state.leaving(plan.layout.ranks):
            self._probation.leave(rank, slowdown, since, last_step)
        self._layout_state = self._layout_state.successor(self.job)
        self._processes.sensors.move(self._layout_state.places)
        for rank, (slowdown, since) in self._probation.back(plan.layout.ranks).items():
            self._layout_state.carry(rank, slowdown, since)
        self._recent.clear()
        self._processes.keep(self._is_known)
        self._drop_notes()
        self._drop_pending()
        early = list(self._ahead)
        self._ahead.clear()
        self._ahead.extend(batch for batch in early if batch.plan_version > plan.version)
        now = (batch for batch in early if batch.plan_version <= plan.version)
        changed = [verdict for batch in now for verdict in self.update(batch)]
        self._pending.update({verdict.rank: verdict for verdict in changed})

    def heartbeat(self, ranks: Iterable[int], now: float) -> list[Verdict]:
        """Notes that ranks were alive at `now` (seconds of any monotonic clock).

        Returns the verdicts that this changed: a rank that was only silent is alive again.
        """
        return self.take_heartbeats([Heartbeat(ranks=tuple(ranks))], now)

    def take_heartbeats(self, heartbeats: Iterable[Heartbeat], now: float) -> list[Verdict]:
        """Take heartbeats that arrived at `now`; return the verdicts that they changed.

        One that is older than another of the same process is ignored, as is a goodbye of a process
        that another one has replaced. Ranks that are neither in the layout nor on probation are
        counted as `unknown_ranks`. A rank that left is not waited for; one whose process ends with
        an error is reported as failed.
        """
        before, failed = self._layout_state.snapshot(), list[Verdict]()
        explained, outside = list[int](), list[Verdict]()
        self.begun = []
        for heartbeat in heartbeats:
            known = [rank for rank in heartbeat.ranks if self._is_known(rank)]
            self.counters["unknown_ranks"] += len(heartbeat.ranks) - len(known)
            self.begun += [r for r in known if self._processes.is_another(r, heartbeat)]
            ranks = [rank for rank in known if self._processes.is_newest(rank, heartbeat)]
            if heartbeat.left:
                self._processes.end(ranks, failed=bool(heartbeat.error))
                if heartbeat.error:
                    step, detail = heartbeat.step, _ENDED + heartbeat.error
                    failed += self.report_failure(ranks, step=step, detail=detail)
                continue
            explained += self._processes.beat(
                ranks, heartbeat, now, self._layout_state.status_table
            )
            for rank in ranks if self._notes else ():
                replaced = self._processes.is_successor(rank, heartbeat)
                outside += self._revive(rank, replaced=replaced)
        self._layout_state.assembler.progress.expect(self.begun)
        causes = self._verdicts_at(self._positions(explained))
        found = (*failed, *self._changed(before), *causes, *outside)
        changed = {verdict.rank: verdict for verdict in found}
        return [changed[rank] for rank in sorted(changed)]

    def heard(
        self, ranks: Iterable[int], now: float, records: TelemetryBatch | None = None
    ) -> list[Verdict]:
        """Take records of ranks that arrived at `now` as signs of life and of progress, if those
        ranks send heartbeats; return the verdicts that they changed.

        A rank that is held for dead comes back by `records` of later steps than were known then:
        earlier ones may have waited with another sender.
        """
        before, outside = None, list[Verdict]()
        for rank in ranks:
            is_dead = rank in self._notes
            if not self._processes.knows(rank) or (is_dead and self._is_late(rank, records)):
                continue
            self._processes.heard(rank, now)
            if is_dead:
                before = before or self._layout_state.snapshot()
                outside += self._revive(rank)
        return [] if before is None else [*self._changed(before), *outside]

    def _is_late(self, rank: int, records: TelemetryBatch | None) -> bool:
        at = self._positions([rank])
        if records is None or not at:
            return False
        newest = records.step[records.rank == rank].max(initial=-1)
        return bool(newest <= self._layout_state.status_table.since[at[0]])

    def check_alive(self, now: float) -> list[Verdict]:
        """Verdicts on ranks whose heartbeats have stopped, and on those whose training threads
        hang or move again; to be called every second or so."""
        state, processes = self._layout_state, self._processes
        dead = [rank for rank in processes.silent(now) if rank not in self._notes]
        failed = (
            self.report_failure(dead, step=self._newest_step(), detail=_SILENCE) if dead else []
        )
        for rank in dead:
            self._notes[rank] = (_SILENCE, *processes.take_last_place(rank))
        changed = processes.look_for_hangs(now, state.places, state.status_table)
        noted = self._verdicts_at(self._positions(sorted(changed.union(dead))))
        verdicts = {verdict.rank: verdict for verdict in (*failed, *noted)}
        return [verdicts[rank] for rank in sorted(verdicts)]

    def _newest_step(self) -> int:
        """Newest step that a rank is known to have reached, by its records or its heartbeats."""
        return max(self._layout_state.assembler.progress.newest, self._processes.newest_step)

    def _positions(self, ranks: Sequence[int]) -> list[int]:
        """Positions of those ranks that are in the layout."""
        index = self._layout_state.places.index(np.array(ranks, np.int64))
        found: list[int] = index[index >= 0].tolist()
        return found

    def asked_stacks(self) -> tuple[int, ...]:
        """Ranks whose next heartbeats are to have the stacks of their training threads, as of the
        last `check_alive`: a few of those that hang, and one that waits for them."""
        return self._processes.asked_stacks()

    def _is_known(self, rank: int) -> bool:
        return rank in self._layout_state.places.members or self._probation.knows(rank)

    def _revive(self, rank: int, *, replaced: bool = False) -> list[Verdict]:
        """Take back that a rank has stopped, if heartbeats were the only reason, or another process
        has `replaced` the one that others reported; return the verdict on one outside the
        layout."""
        note = self._notes.get(rank)
        if note is None or not (replaced or note[0].startswith((_SILENCE, _ENDED))):
            return []
        del self._notes[rank]
        self._processes.revive(rank)
        self._layout_state.revive(rank)
        return self._probation.revive(rank, self._layout_state.last_step or 0)

    def _drop_notes(self) -> None:
        """Forget why ranks had stopped that work again, so that they can be found dead anew."""
        if self._notes:
            stopped = self._layout_state.stopped() | self._probation.stopped()
            for rank in self._notes.keys() - stopped:
                del self._notes[rank]
                self._processes.revive(rank)

    def report_failure(
        self, ranks: Iterable[int], *, step: int | None = None, detail: str = "reported dead"
    ) -> list[Verdict]:
        """Takes a report, from survivors or the launcher, that ranks are gone."""
        before, ranks = self._layout_state.snapshot(), sorted(set(ranks))
        found = self._layout_state.fail(ranks, step)
        last_step = self._layout_state.last_step or 0
        gone = self._probation.fail(ranks, step if step is not None else last_step)
        found += [verdict.rank for verdict in gone]
        self._notes.update(dict.fromkeys(found, (detail,)))
        self._processes.fail(found)
        return [*self._changed(before), *gone]

    def links(self) -> list[LinkVerdict]:
        """The verdicts on links that transfer more slowly than those between the same stages, and
        on groups whose collectives are slower than those of similar groups: `fail_slow`, and
        `suspect` before; all others are healthy. By rank and peer.

        They begin anew on another layout, and when the job goes back to an earlier step.
        """
        return self._layout_state.link_verdicts()

    def link_counts(self) -> dict[Status, int]:
        """Number of links and groups that are compared with others or with their past, by status;
        those of none are left out."""
        return dict(self._layout_state.link_counts())

    def probe_requests(self, now: float) -> list[ProbeRequest]:
        """Probes that would settle a suspicion, or show that a device outside the layout is
        healthy again; `now` in seconds of any monotonic clock."""
        state, requests = self._layout_state, list[ProbeRequest]()
        for rank, reference in state.suspects():
            if self._probe_budget.allow(rank, len(_LONE_PROBES), now):
                requests += _lone_probes(rank, reference)
        healthy = state.places.ranks[state.status_table.status == HEALTHY]
        for rank, reference in self._probation.due(now, healthy):
            if self._probe_budget.allow(rank, len(_LONE_PROBES), now):
                self._probation.asked(rank, now)
                requests += _lone_probes(rank, reference)
        return requests

    def probe_result(self, result: ProbeResult) -> list[Verdict]:
        """Takes the answer to a probe. It joins the evidence on a rank of the layout from the next
        step on, and may change the verdict on one outside, which is returned."""
        outside = self._probation.observe(result, self._layout_state.last_step or 0)
        if outside is not None:
            return outside
        self._layout_state.take_probe(result)
        return []

    def save(self, arrays: dict[str, bytes] | None = None) -> bytes:
        """The whole state, for `restore`. Its large arrays are put into `arrays`, where given, by
        names that change with their content, so that what is unchanged need not be stored again."""
        job = self.job
        moved = {"layout": job.layout, "quotas": job.quotas, "schedule": job.schedule}
        return pack({**self.state(), "moved": to_json(moved)}, arrays)

    @classmethod
    def restore(
        cls,
        job: Job,
        state: bytes,
        arrays: Mapping[str, bytes] = MappingProxyType({}),
        *,
        settings: DetectorSettings | None = None,
    ) -> Detector:
        """The detector that `save` wrote, with the `arrays` that it was given, on the layout that
        it was then on.

        Raises `ContractError` for bytes that `save` did not write.
        """
        saved = unpack(state, arrays)
        try:
            moved = saved["moved"]
            layout = from_json(Layout, moved["layout"], "layout")
            quotas, schedule = tuple(moved["quotas"]), Schedule(moved["schedule"])
            detector = cls(moved_job(job, layout, quotas, schedule), settings=settings)
            detector._original_job = job
            detector.load(saved)
        except (KeyError, TypeError) as error:
            raise ContractError("state", "is not that of a detector") from error
        return detector

    def _changed(self, before: tuple[Ints, np.ndarray]) -> list[Verdict]:
        status, factor = before
        table = self._layout_state.status_table
        changed = table.status != status
        slow = np.flatnonzero(table.status == FAIL_SLOW)
        changed[slow] |= np.abs(np.log(table.factor[slow] / factor[slow])) > _WORTH_TELLING
        return self._verdicts_at(np.flatnonzero(changed).tolist())

    def _verdicts_at(self, positions: Sequence[int]) -> list[Verdict]:
        links = self._layout_state.slow_links() if positions else []
        return [self._verdict(at, links) for at in positions]

    def _verdict(self, at: int, links: Sequence[LinkVerdict]) -> Verdict:
        state, table = self._layout_state, self._layout_state.status_table
        rank = int(state.places.ranks[at])
        notes = self._notes.get(rank, ()) if table.status[at] == FAIL_STOP else ()
        notes = (*notes, *state.annotations.notes_of(at, links))
        notes = (*self._processes.sensors.evidence(at, table), *notes)
        return self._processes.with_hang(verdict_of(rank, at, table, state.last_step, notes))


def moved_job(job: Job, layout: Layout, quotas: tuple[int, ...], schedule: Schedule) -> Job:
    """The job with what it runs under a plan; stages of one range keep its chunks under its own
    schedule alone."""
    chunks = max(replica.chunks for replica in layout.replicas)
    if chunks == 1 and schedule is job.schedule:
        chunks = job.chunks
    return replace(
        job,
        layout=layout,
        quotas=quotas,
        microbatches=sum(quotas),
        schedule=schedule,
        chunks=chunks,
    )


def _lone_probes(rank: int, reference: int) -> list[ProbeRequest]:
    return [ProbeRequest(rank=rank, reference=reference, kind=kind) for kind in _LONE_PROBES]
