"""One job in the hands of a worker: its messages, applied in order.

A session holds no connection. It is a function of the saved state and of the entries since, and
collects what it has to say in an `Outbox`, which the worker commits together with the new state
in one transaction: so every entry takes effect exactly once, whoever dies in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import msgpack

from resihp.contracts import ContractError, Job, Plan, Verdict, from_json, to_json

from ..logs import logger
from ..store.http_store import plan_json, plan_of
from ..store.messages import JobMessage, MessageKind
from .adapters import Adapters, DetectorLike
from .forecast import Forecast
from .outbox import Outbox
from .planning import Planner
from .predictor_cache import PredictorCache
from .probes import OpenProbes
from .replanning import Replanning
from .rollout import Rollout
from .step_times import StepTimes

log = logger("resihp.session")


class Session:
    """Detector, planner and roll-out of one job; `predictor` is what an earlier one learned."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        adapters: Adapters,
        planner: Planner,
        predictor: bytes | None = None,
    ) -> None:
        self.job = job
        self.outbox = Outbox()
        self.planning: dict[str, Any] = {"state": "idle"}
        self._adapters = adapters
        self._learning = PredictorCache(adapters, job)
        self._detector: DetectorLike = self._learning.detector(predictor)
        self._rollout = Rollout(plan)
        self._steps = StepTimes()
        self._forecast = Forecast(job)
        self._verdicts: dict[int, Verdict] = {}
        self._replanning = Replanning(job, planner)
        self._probes = OpenProbes()
        self._clock_s = 0.0

    @property
    def last_step(self) -> int:
        """Newest step that any rank reported; -1 before the first."""
        return self._steps.last_step

    @property
    def plan(self) -> Plan:
        """The newest plan."""
        return self._rollout.newest

    def apply(self, entry: JobMessage) -> None:
        """Take one entry into account. One that cannot be understood is reported, not fatal."""
        self.outbox.applied.append(entry.id)
        self.outbox.applied_bytes += len(entry.body)
        handler = {
            MessageKind.TELEMETRY: self._telemetry,
            MessageKind.HEARTBEAT: self._heartbeat,
            MessageKind.ACK: self._ack,
            MessageKind.OWN_PLAN: self._own_plan,
            MessageKind.FAILURE: self._failure,
            MessageKind.JOINER: self._joiner,
            MessageKind.PROBE: self._probe,
        }[entry.kind]
        self._guarded(entry.kind.value, lambda: handler(entry))

    def _guarded(self, during: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # the boundary: the engines are given, and data is the users'
            log.exception("skipped after an error", job=self.job.name, during=during)
            detail = f"{type(error).__name__}: {error}"
            self._say("error", {"during": during, "detail": detail})

    def tick(self, elapsed_s: float) -> None:
        """Advance the heartbeat clock.

        Called only when the message stream is drained, so that time in which the service was down
        or behind never counts against a rank.
        """
        self._clock_s += elapsed_s
        alive = self._detector.check_alive
        self._guarded("check_alive", lambda: self._report(alive(self._clock_s)))
        self._guarded("probe_requests", self._ask)

    def _ask(self) -> None:
        """Ask for the probes that would settle a suspicion."""
        wanted = self._detector.probe_requests(self._clock_s)
        for request in self._probes.ask(wanted, self._clock_s):
            kind, rank, reference = request.kind.value, request.rank, request.reference
            self._say("probe", {"probe": kind, "rank": rank, "reference": reference})

    def _probe(self, entry: JobMessage) -> None:
        document = entry.document()
        result = self._probes.answer(document["probe"], document["rank"], document["ms"])
        if result is not None:
            self._say("probe_result", {"rank": result.rank, "detail": result.words})
            self._report(self._detector.probe_result(result))

    def _telemetry(self, entry: JobMessage) -> None:
        batch = entry.batch()
        self.outbox.records += len(batch)
        if self._rollout.saw(batch.plan_version):
            self._switch(self._rollout.active)
        if not self._rollout.has_work_for(batch.rank.tolist()):
            return  # a rank that is only there to be asked for probes
        self._steps.add(batch)
        self._forecast.add(batch)
        changed = self._detector.update(batch)
        self._close_steps()
        self._report(changed)

    def _close_steps(self) -> None:
        plan = self._rollout.active
        known = self._replanning.known
        expected = [rank for rank in plan.layout.ranks if known.get(rank, 1.0) > 0.0]
        for step, observed_ms, ranks in self._steps.close(expected):
            self._forecast.learn(plan, step, observed_ms, healthy=not known)
            summary = {
                "step": step,
                "observed_ms": round(observed_ms, 4),
                "predicted_ms": self._forecast.predict(plan),
                "plan_version": plan.version,
                "ranks": ranks,
            }
            self.outbox.steps.append(summary)
            self._replanning.horizon.stepped(observed_ms)
            if plan.version == self._rollout.newest.version:
                due = self._replanning.count_step()
                if due is not None:
                    self._publish(due)

    def _heartbeat(self, entry: JobMessage) -> None:
        self._report(self._detector.heartbeat(entry.document()["ranks"], self._clock_s))

    def _ack(self, entry: JobMessage) -> None:
        document = entry.document()
        self._say("ack", document)
        refused = self._rollout.newest if document["state"] == "refused" else None
        if self._rollout.ack(document["version"], document["rank"], document["state"]):
            self._switch(self._rollout.active)
        elif refused is not None and refused.version == document["version"]:
            self._replanning.refused()
            self._plan_if_needed()

    def _own_plan(self, entry: JobMessage) -> None:
        document = entry.document()
        plan, lost = plan_of(document["plan"]), document["lost"]
        reason = (*plan.reason, "made by the job itself, without the sidecar")
        plan = replace(plan, reason=reason)
        if not self._rollout.take_over(plan):
            return
        self._replanning.wait_no_more(lost)
        changed = (
            self._detector.report_failure(lost, step=document["step"], detail="") if lost else []
        )
        self._keep_verdicts()
        self._replanning.taken_over(lost)
        self.planning = {"state": "taken_over", "version": plan.version}
        self._tell_plan(plan)
        self._switch(plan)
        self._report(changed)

    def _switch(self, plan: Plan) -> None:
        self._detector.apply_plan(plan)
        self._replanning.wait_no_more(plan.layout.ranks)
        self._say("plan_applied", {"version": plan.version})

    def _failure(self, entry: JobMessage) -> None:
        document = entry.document()
        self._say("failure", document)
        ranks, step, detail = document["ranks"], document["step"], document["detail"]
        self._replanning.forget_joiners()
        self._report(self._detector.report_failure(ranks, step=step, detail=detail))

    def _joiner(self, entry: JobMessage) -> None:
        document = entry.document()
        self._say("joiner", document)
        working = self._rollout.active.layout.ranks
        self._replanning.joined(document["ranks"], working=working)
        self._plan_if_needed()

    def _report(self, changed: Iterable[Verdict]) -> None:
        for verdict in changed:
            self._say("verdict", {"verdict": to_json(verdict)})
            self._replanning.horizon.heard(verdict)
        self._plan_if_needed()

    def _plan_if_needed(self) -> None:
        """Plan whenever the speeds are not those that the last plan was made for."""
        decided = self._replanning.decide(
            self._forecast.job,
            self._rollout.current,
            self._detector.verdicts(),
            step=self.last_step + 1,
            clock_s=self._clock_s,
        )
        if isinstance(decided, Plan):
            self._publish(decided)
        elif decided is not None:
            self._tell_planning({"state": decided.state, **decided.told})

    def _publish(self, plan: Plan) -> None:
        version = self._rollout.newest.version + 1
        reason = (*plan.reason, *filter(None, [self._forecast.told()]))
        plan = replace(plan, version=version, from_step=self.last_step + 1, reason=reason)
        self.planning = {"state": "planned", "version": version}
        self._rollout.publish(plan)
        self._tell_plan(plan)

    def _tell_plan(self, plan: Plan) -> None:
        self.outbox.plans.append(plan)
        self._say("plan", {"plan": plan_json(plan), "expected_ms": self._forecast.made(plan)})

    def _tell_planning(self, planning: dict[str, Any]) -> None:
        """Once: what a further attempt finds again is no news."""
        if planning != self.planning:
            self.planning = planning
            self._say("planning", planning)

    def _say(self, kind: str, document: dict[str, Any]) -> None:
        self.outbox.events.append((kind, document))

    def status(self) -> dict[str, Any]:
        """What the API answers about verdicts, planning and progress."""
        self._keep_verdicts()
        return {
            "verdicts": [to_json(verdict) for _, verdict in sorted(self._verdicts.items())],
            "planning": self.planning,
            "last_step": self.last_step,
            "rollout": self._rollout.describe(),
            "probes": self._probes.orders(),
        }

    def _keep_verdicts(self) -> None:
        """The last word on a rank that has left stands: the detector speaks of the others."""
        self._verdicts.update({verdict.rank: verdict for verdict in self._detector.verdicts()})

    def learned(self) -> tuple[str, bytes] | None:
        """What the detector learned since this was asked last, for other jobs of that kind."""
        return self._learning.news(self._detector)

    def diagnosis(self) -> dict[str, Any] | None:
        """Why the job is slow, as of the last entry; None before there is anything to say."""
        try:
            document: dict[str, Any] = to_json(self._detector.diagnosis())
        except ContractError:
            return None
        except Exception:  # as in `_guarded`: the verdicts are worth having without
            log.exception("no diagnosis", job=self.job.name)
            return None
        return document

    def save(self) -> tuple[bytes, bytes]:
        """State of the detector, and of everything else."""
        rest = {
            "rollout": self._rollout.save(),
            "steps": self._steps.save(),
            "forecast": self._forecast.save(),
            "verdicts": [to_json(verdict) for verdict in self._verdicts.values()],
            "planning": self.planning,
            "replanning": self._replanning.save(),
            "probes": self._probes.save(),
            "clock_s": self._clock_s,
        }
        return self._detector.save(), msgpack.packb(rest)

    def resume(self, detector: bytes, rest: bytes) -> None:
        """Go back to a saved state; one that cannot be read (of an older version) is reported,
        and the detector begins afresh."""
        self._guarded("resume", lambda: self._restore(detector, msgpack.unpackb(rest)))

    def _restore(self, detector: bytes, saved: dict[str, Any]) -> None:
        self._detector = self._adapters.restore(self.job, detector)
        self._rollout = Rollout.restore(saved["rollout"])
        self._steps = StepTimes.restore(saved["steps"])
        self._forecast = Forecast.restore(self.job, saved["forecast"])
        verdicts = [from_json(Verdict, verdict) for verdict in saved["verdicts"]]
        self._verdicts = {verdict.rank: verdict for verdict in verdicts}
        self.planning = saved["planning"]
        failed = self.planning["state"] == "infeasible"
        failed_at_s = saved["clock_s"] if failed else None
        self._replanning.restore(saved["replanning"], failed_at_s=failed_at_s)
        self._probes = OpenProbes.restore(saved["probes"])
        self._clock_s = saved["clock_s"]
