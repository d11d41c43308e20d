"""One job inside a worker: its messages, applied in order.

A session holds no connection. It is a function of the saved state and of the messages since, and
collects the effects of these in `PendingChanges`. The worker commits the changes with the new
state in one transaction, so that each message takes effect exactly once, whichever process dies
in between.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

import msgpack
import numpy as np

from detector.persistence import pack, unpack
from resihp.contracts import (
    ContractError,
    Job,
    LinkVerdict,
    Plan,
    Status,
    TelemetryBatch,
    Verdict,
    from_json,
    to_json,
)

from ..logs import logger
from ..store.documents import (
    JobMessage,
    MessageKind,
    PendingChanges,
    in_short,
    link_in_short,
    plan_from_json,
    plan_json,
    planning_in_short,
    stream_order,
)
from ..store.worker_store import ShownState
from .adapters import Adapters
from .forecast import Forecast, ForecastState
from .listening import ListeningClock
from .planning import Planner, PlanningState, PlanRequest, speeds_of
from .probes import OpenProbes
from .reactions import ReactionLog
from .step_times import StepTime, StepTimes
from .telemetry_runs import TelemetryPart, joined, runs

log = logger("resihp.session")

_CHECK_EVERY_S = 0.5  # what does not depend on messages
_LONGEST_DETAIL = 1_000
_MOST_DEPARTED = 131_072


@dataclass
class SessionState:
    """State of a session apart from the detector and the step times: plain values, saved and
    restored as one.

    reactions to faults: when each was seen, planned for and its plan applied
    departed  last verdict on each rank that left the layout
    links     verdicts on links and groups that are slow or suspected
    clock     time during which the service listened and had applied all messages
    """

    planning: PlanningState
    forecast: ForecastState = field(default_factory=ForecastState)
    probes: OpenProbes = field(default_factory=OpenProbes)
    reactions: ReactionLog = field(default_factory=ReactionLog)
    departed: dict[int, Verdict] = field(default_factory=dict)
    links: tuple[LinkVerdict, ...] = ()
    clock: ListeningClock = field(default_factory=ListeningClock)


class JobSession:
    """Detector, planning and probes of one job.

    plan       plan 0, the layout that the job was registered with
    predictor  stored predictor of an earlier job of the same kind
    unix_s     clock of the reactions
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        adapters: Adapters,
        planner: Planner,
        predictor: bytes | None = None,
        *,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        self.job, self._unix_s = job, unix_s
        self.changes = PendingChanges()
        self._adapters = adapters
        self._planner = planner
        try:
            self._detector = adapters.detector(job, predictor)
        except ContractError as error:
            if predictor is None:
                raise
            log.warning("stored predictor ignored", job=job.name, error=str(error))
            self._detector = adapters.detector(job, None)
        self._known_predictor = self._detector.predictor
        self._state = SessionState(PlanningState({plan.version: plan}, plan.version))
        self._steps = StepTimes(plan.layout.ranks)
        self._forecast = Forecast(job, self._state.forecast)
        self._request: PlanRequest | None = None
        self._checked_s = float("-inf")

    @property
    def last_step(self) -> int:
        """Newest step that any rank reported; -1 before the first."""
        return self._steps.last_step

    @property
    def planning(self) -> PlanningState:
        """Plans, and the outcome of the last planning."""
        return self._state.planning

    def apply(self, *messages: JobMessage) -> None:
        """Apply messages in order, consecutive telemetry in runs. An error is logged and becomes
        an event; the message is skipped."""
        self.changes.applied += [message.id for message in messages]
        self.changes.applied_bytes += sum(len(message.body) for message in messages)
        for kind, group in groupby(messages, attrgetter("kind")):
            if kind is MessageKind.TELEMETRY:
                self._telemetry(group)
                continue
            for message in group:
                self._guarded(kind.value, partial(self._handle, message))

    def _handle(self, message: JobMessage) -> None:
        handlers = {
            MessageKind.HEARTBEAT: self._heartbeat,
            MessageKind.ACK: self._ack,
            MessageKind.OWN_PLAN: self._own_plan,
            MessageKind.FAILURE: self._failure,
            MessageKind.JOINER: self._joiner,
            MessageKind.PROBE: self._probe,
        }
        if message.kind not in handlers:
            raise ContractError("kind", "is none that this version of the service knows")
        handlers[message.kind](message)

    def _guarded(self, during: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # the boundary to injected adapters and to data of users
            log.exception("skipped after an error", job=self.job.name, during=during)
            detail = f"{type(error).__name__}: {error}"
            self._event("error", {"during": during, "detail": detail[:_LONGEST_DETAIL]})

    def _event(self, kind: str, document: dict[str, Any]) -> None:
        self.changes.events.append((kind, document))

    # Heartbeats and probes

    def tick(self, elapsed_s: float, delay_s: float) -> None:
        """Advance the clock, check heartbeats and request probes.

        Called only when the message stream is drained, so that time in which the service was down
        or behind never counts against a rank. What was sent in the last `delay_s` may be missing.
        """
        self._state.clock.advance(elapsed_s, delay_s)
        now_s = self._state.clock.heard_s
        if now_s - self._checked_s >= _CHECK_EVERY_S:
            self._checked_s = now_s
            self._guarded("check_alive", lambda: self._report(self._detector.check_alive(now_s)))
            self._guarded("probe_requests", lambda: self._request_probes(now_s))

    def _heartbeat(self, message: JobMessage) -> None:
        changed = self._detector.take_heartbeats(message.heartbeats(), self._state.clock.latest_s)
        self._steps.expect(self._detector.begun)
        if changed:
            self._report(changed)

    def _request_probes(self, now_s: float) -> None:
        for request in self._state.probes.ask(self._detector.probe_requests(now_s), now_s):
            kind, rank, reference = request.kind.value, request.rank, request.reference
            self._event("probe", {"probe": kind, "rank": rank, "reference": reference})

    def _probe(self, message: JobMessage) -> None:
        document = message.document()
        answer = document["probe"], document["rank"], document["ms"]
        result = self._state.probes.answer(*answer)
        if result is not None:
            self._event("probe_result", {"rank": result.rank, "detail": result.words})
            self._report(self._detector.probe_result(result))

    # Telemetry

    def _telemetry(self, messages: Iterable[JobMessage]) -> None:
        parts: list[TelemetryPart] = []

        def parse(message: JobMessage) -> None:
            parts.append(TelemetryPart.of(message.body))

        for message in messages:
            self._guarded("telemetry", partial(parse, message))
        self.changes.records += sum(map(len, parts))
        for run in runs(parts):
            try:
                self._apply_run(run)
            except Exception:  # the boundary of `_guarded`, to which each message goes by itself
                log.exception("a run failed, applying its messages one by one", job=self.job.name)
                for part in run:
                    self._guarded("telemetry", partial(self._apply_run, [part]))

    def _apply_run(self, run: list[TelemetryPart]) -> None:
        """Apply a run to the detector, which takes a record twice as one; only then to the rest.

        Raises the errors of the records and of the detector. Later ones become events.
        """
        before = self.planning.active
        if self.planning.activate(run[0].plan_version):
            self._switch(before)
        told = frozenset().union(*(part.ranks for part in run))
        ranks = self._steps.of_layout(told)
        if not ranks:
            return  # from ranks outside the layout, which report only to receive probes
        batch = joined(run)
        if ranks != told:  # the hosts' messages hold records of both
            batch = batch.select(np.isin(batch.rank, list(ranks)))
        revived = self._detector.heard(sorted(ranks), self._state.clock.latest_s, batch)
        restarts = self._detector.counters["restarts"]
        changed = [*revived, *self._detector.update(batch)]
        if self._detector.counters["restarts"] > restarts:
            self._state.links = ()  # compared anew, which says of none that it is healthy again
        self._guarded("telemetry", lambda: self._follow(batch, changed))

    def _follow(self, batch: TelemetryBatch, changed: list[Verdict]) -> None:
        self._forecast.add(batch)
        plan = self.planning.active
        if batch.plan_version == plan.version:
            lost = [rank for rank, speed in self.planning.speeds.items() if speed == 0.0]
            self._close_steps(plan, self._steps.add(batch, lost))
        self._report_links()
        self._report(changed)

    def _close_steps(self, plan: Plan, steps: Iterable[StepTime]) -> None:
        planning = self.planning
        for step in steps:
            self._forecast.learn(plan, step, healthy=not (planning.speeds or planning.links))
            self._state.reactions.step(step.step, self._unix_s())
            told = self._detector.step_time(step.step, step.observed_ms)
            self._forecast.note_error(told)
            summary = {
                "step": step.step,
                "observed_ms": round(step.observed_ms, 4),
                "predicted_ms": self._forecast.predict(plan),
                "expected_ms": _rounded(told.expected_ms),
                "healthy_ms": _rounded(told.healthy_ms),
                "plan_version": plan.version,
                "ranks": len(step.ranks),
            }
            self.changes.steps.append(summary)
            planning.step_ms = told.expected_ms or step.observed_ms
            if plan.version == planning.newest.version:
                due = planning.count_step()
                if due is not None:
                    self._publish(due)

    # Layout: failures, joiners, acknowledgements

    def _failure(self, message: JobMessage) -> None:
        document = message.document()
        step, version = document["step"], document.get("plan_version")
        detail = document["detail"] or "reported dead"
        ranks = [rank for rank in document["ranks"] if self.planning.works_since(rank, version)]
        if not ranks:
            log.info("late report of a failure", job=self.job.name, plan_version=version)
            return
        self._event("failure", in_short({**document, "ranks": ranks}))
        self.planning.forget_joiners()
        self._report(self._detector.report_failure(ranks, step=step, detail=detail))

    def _joiner(self, message: JobMessage) -> None:
        document = message.document()
        self._event("joiner", in_short(document))
        self.planning.add_joiners(document["ranks"])
        self._plan_if_needed()

    def _ack(self, message: JobMessage) -> None:
        document = message.document()
        version, answer, rank = document["version"], document["state"], document["rank"]
        if not self.planning.awaits(version, rank):
            return
        before, pause_ms = self.planning.active, document.get("pause_ms")
        is_applied_by_all = self.planning.acknowledge(version, rank, answer, pause_ms)
        if answer == "refused":
            self._event("ack", document)
        else:
            ranks, of = len(self.planning.acks), len(self.planning.newest.layout.ranks)
            self.changes.count_acks(version, ranks=ranks, of=of, pause_ms=pause_ms)
        if is_applied_by_all:
            self._switch(before)
        elif answer == "refused":
            self.planning.refuse_newest()
            self._plan_if_needed()

    def _own_plan(self, message: JobMessage) -> None:
        document = message.document()
        plan, lost = plan_from_json(document["plan"]), document["lost"]
        plan = replace(plan, reason=(*plan.reason, "made by the job itself, without the sidecar"))
        before = self.planning.active
        if not self.planning.take_over(plan, lost):
            return
        detail = f"the job went on without it, by its own plan {plan.version}"
        changed = self._detector.report_failure(lost, step=document["step"], detail=detail)
        self._note_faults(changed)
        self._announce(plan)
        self._switch(before)
        self._tell(changed)

    def _switch(self, before: Plan) -> None:
        """Follow the job from the plan `before` to the active one."""
        plan = self.planning.active
        self._close_steps(before, self._steps.move(plan.layout.ranks))
        leaving = self._detector.summary().outside(frozenset(plan.layout.ranks))
        departed = self._state.departed
        departed.update({verdict.rank: verdict for verdict in leaving})
        for rank in list(departed)[: max(len(departed) - _MOST_DEPARTED, 0)]:
            del departed[rank]
        self._detector.apply_plan(plan)
        self._state.links = ()  # compared anew, which says of none that it is healthy again
        now = self.last_step, self._unix_s()
        reaction = self._state.reactions.applied(plan.version, *now)
        told = {} if reaction is None else {"reaction": reaction.document()}
        self._event("plan_applied", {"version": plan.version, **told})

    # Verdicts and plans

    def _report(self, changed: Iterable[Verdict]) -> None:
        verdicts = list(changed)
        self._note_faults(verdicts)
        self._tell(verdicts)

    def _note_faults(self, changed: Iterable[Verdict]) -> None:
        for verdict in changed:
            if verdict.status is Status.HEALTHY:
                self._state.reactions.recovered(verdict.rank)
            elif verdict.status in (Status.FAIL_SLOW, Status.FAIL_STOP):
                now = self.last_step, self._unix_s()
                kind = verdict.status.value
                self._state.reactions.fault(verdict.rank, kind, verdict.since_step, *now)

    def _tell(self, changed: Iterable[Verdict]) -> None:
        for verdict in changed:
            self._event("verdict", {"verdict": to_json(verdict)})
            self.planning.fail_stops += verdict.status is Status.FAIL_STOP
        self._plan_if_needed()

    def _report_links(self) -> None:
        """Take the verdicts on links, with the time since which each has its status; links that
        have become slow, and those that are no longer, become events."""
        before = {link.ends: link for link in self._state.links}
        known = {link.ends: link for link in self._detector.links()}
        now_s = self._arrived_s()
        for ends, link in known.items():
            old = before.get(ends)
            since_s = old.since_s if old is not None and old.status is link.status else now_s
            known[ends] = replace(link, since_s=since_s)
        self._state.links = tuple(known.values())
        slow = {ends for ends, link in known.items() if link.status is Status.FAIL_SLOW}
        was = {ends for ends, link in before.items() if link.status is Status.FAIL_SLOW}
        for ends in sorted(slow - was):
            for rank in ends:
                since_step, now = known[ends].since_step, (self.last_step, self._unix_s())
                self._state.reactions.fault(rank, "link", since_step, *now)
            self._event("link", {"link": link_in_short(known[ends])})
        for ends in sorted(was - slow):
            for rank in ends:
                self._state.reactions.recovered(rank)
            over = replace(
                before[ends], status=Status.HEALTHY, slowdown=1.0, confidence=1.0, evidence=(),
                since_step=self.last_step, since_s=now_s,
            )  # fmt: skip
            self._event("link", {"link": link_in_short(over)})

    def _arrived_s(self) -> float | None:
        """Unix time at which the newest of the messages that are applied arrived."""
        applied = self.changes.applied
        return stream_order(applied[-1])[0] / 1e3 if applied else None

    def _plan_if_needed(self) -> None:
        clock_s = self._state.clock.heard_s
        unhealthy, links = self._detector.unhealthy(), self._detector.links()
        needed = self._planner.is_needed(self.planning, unhealthy, clock_s, links)
        if needed and self._request is None:
            self._ask_for_plan()

    def _ask_for_plan(self) -> None:
        self._request = self._planner.ask(
            self.planning,
            self._forecast.job,
            step=self.last_step + 1,
            clock_s=self._state.clock.heard_s,
        )
        self.take_plan()

    @property
    def is_planning(self) -> bool:
        """True while a plan is computed."""
        return self._request is not None

    def take_plan(self) -> None:
        """Take the decision on the plan asked for, if there is one now.

        It is dropped, and another plan asked for, if plan, speeds or slow links have changed
        meanwhile.
        """
        request = self._request
        if request is not None and request.decision.done():
            self._request = None
            self._guarded("planning", partial(self._take_plan, request))

    def _take_plan(self, request: PlanRequest) -> None:
        before = self.planning.outcome
        if not request.is_for(self.planning):
            self._ask_for_plan()
            return
        plan = self._planner.take(self.planning, request, self._state.clock.heard_s)
        if plan is not None:
            self._publish(plan)
        elif self.planning.outcome != before:
            self._event("planning", planning_in_short(self.planning.report()))

    def _publish(self, plan: Plan) -> None:
        plan = replace(
            plan,
            version=self.planning.newest.version + 1,
            from_step=self.last_step + 1,
            reason=(*plan.reason, *filter(None, [self._forecast.basis()])),
        )
        self.planning.publish(plan)
        self._announce(plan)

    def _announce(self, plan: Plan) -> None:
        self.changes.plans.append(plan)
        self._state.reactions.planned(plan.version, self.last_step, self._unix_s())
        expected_ms = self._forecast.for_new_plan(plan)
        told = {name: value for name, value in plan_json(plan).items() if name != "layout"}
        self._event("plan", {"plan": told, "expected_ms": expected_ms})

    # Status and saved state

    def status(self) -> dict[str, Any]:
        """Documents on verdicts, planning and progress, for the API, without an `error`. Those on
        verdicts are what `store.documents.verdict_texts` reads."""
        summary = self._detector.summary()
        healthy = summary.healthy.tolist()
        others = {verdict.rank: verdict for verdict in summary.others}
        departed = self._state.departed.keys() - others.keys()
        departed = departed and departed.difference(healthy)
        others.update({rank: self._state.departed[rank] for rank in departed})
        devices = Counter(verdict.status.value for verdict in others.values())
        devices[Status.HEALTHY.value] += len(healthy)
        return {
            "healthy": {"ranks": healthy, "since_step": summary.since.tolist()},
            "healthy_as_of": {"confidence": summary.confidence, "step": summary.step},
            "verdicts": [to_json(verdict) for _, verdict in sorted(others.items())],
            "devices": +devices,
            "links": [to_json(link) for link in self._state.links],
            "link_counts": {s.value: n for s, n in self._detector.link_counts().items()},
            "planning": self.planning.report(),
            "last_step": self.last_step,
            "rollout": self.planning.rollout(),
            "reactions": self._state.reactions.documents(),
            "probes": self._state.probes.by_rank(),
            "stacks": list(self._detector.asked_stacks()),
            "error": None,
        }

    def new_predictor(self) -> bytes | None:
        """A predictor fitted since the last call, for the next job; None otherwise."""
        fitted, known = self._detector.predictor, self._known_predictor
        self._known_predictor = fitted
        return None if fitted is None or fitted is known else fitted.to_bytes()

    def diagnosis(self) -> dict[str, Any] | None:
        """The diagnosis as of the last message; None before there is enough data."""
        try:
            document: dict[str, Any] = to_json(self._detector.diagnosis())
        except ContractError:
            return None
        except Exception:  # the verdicts are published without it
            log.exception("no diagnosis", job=self.job.name)
            return None
        return document

    def save(self) -> dict[str, bytes]:
        """Saved state by part: the detector, the step times, and everything else; large arrays by
        names that change with their content."""
        arrays = dict[str, bytes]()
        parts = {
            "detector": self._detector.save(arrays),
            "steps": pack(self._steps.state(), arrays),
            "session": msgpack.packb(to_json(self._state)),
        }
        return parts | arrays

    def resume(self, saved: dict[str, bytes]) -> bool:
        """Restore a saved state. One that is unreadable becomes an event, and the session goes on
        with a new detector, under the plans of the state; False if not even these can be read, and
        the session is that of a new job."""
        before = self._state
        self._guarded("resume", lambda: self._restore(saved))
        return self._state is not before

    def _restore(self, saved: dict[str, bytes]) -> None:
        state = from_json(SessionState, msgpack.unpackb(saved["session"]))
        plan = state.planning.active
        self._state = replace(state, links=())  # none is compared by a new detector yet
        self._forecast = Forecast(self.job, state.forecast)
        self._steps, steps = StepTimes(plan.layout.ranks), StepTimes(plan.layout.ranks)
        self._begin_detector()
        steps.load(unpack(saved["steps"], saved))
        self._detector = self._adapters.restore(self.job, saved["detector"], saved)
        self._state, self._steps = state, steps

    def go_on(self, shown: ShownState) -> None:
        """Go on under the plans of a job whose saved state is lost, and with the ranks that had
        stopped; all else that was known of its ranks is found out anew."""
        active, newest = shown.plans[0], shown.plans[-1]
        why = f"the saved state could not be read; the job goes on with plan {newest.version}"
        log.warning(why, job=self.job.name, active=active.version)
        self._state.planning = PlanningState(
            {plan.version: plan for plan in shown.plans},
            active.version,
            speeds=speeds_of(shown.verdicts, {}, ()),
            outcome={"state": "planned", "version": newest.version, "detail": why},
        )
        members = active.layout.members
        self._state.departed = {v.rank: v for v in shown.verdicts if v.rank not in members}
        self._steps = StepTimes(active.layout.ranks)
        self._begin_detector()

    def _begin_detector(self) -> None:
        """Begin with a new detector under the active plan, of which it is to know who has stopped:
        else a plan with these ranks would follow."""
        plan = self.planning.active
        self._detector.apply_plan(plan)
        stopped = [rank for rank, speed in self.planning.speeds.items() if speed == 0.0]
        if stopped := sorted(plan.layout.members.intersection(stopped)):
            detail = "stopped before the state of the detector was lost"
            self._detector.report_failure(stopped, step=None, detail=detail)


def _rounded(ms: float | None) -> float | None:
    return None if ms is None else round(ms, 4)
