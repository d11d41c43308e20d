"""The coordinator's part in the agreement of the launchers: it decides about attempts."""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import replace

from resihp._preemption import NOTICED_STATUS, PreemptionNotice
from resihp.contracts import JobStoppedError, Plan
from resihp.elastic.rendezvous import exit_status
from resihp.formatting import plural

from .attempts import Attempt, AttemptEnd, EndKind, JobEnd, NodeOffer, NodeRanks, place
from .heartbeats import LauncherHeartbeats
from .launcher_store import LauncherStore
from .options import Options
from .restart_plans import RestartPlanPoller, as_renumbered, left_out, refusal
from .restart_policy import Failure, decide, launcher_status

_log = logging.getLogger("resihp.launch")
_POLL_S = 0.05
_GONE = ("leaves", "left", "lost")
"""Marks of launchers that no attempt waits for; one that leaves may still end its ranks."""


class AttemptCoordinator:
    """Numbers the ranks of attempts, ends attempts that wait in vain, and decides what follows.

    heartbeats  None for one node
    plans       None without a sidecar
    notice      whether this node is about to be taken away, which ends the job where it hosts the
                store
    token       secret of the servers of checkpoints; "" for a new one

    Failures that another coordinator has kept count as well.
    """

    def __init__(
        self,
        options: Options,
        store: LauncherStore,
        heartbeats: LauncherHeartbeats | None,
        plans: RestartPlanPoller | None,
        notice: PreemptionNotice,
        token: str = "",
    ) -> None:
        self._options, self._store = options, store
        self._heartbeats, self._plans, self._notice = heartbeats, plans, notice
        self._failures = store.failures()
        self._token = token or secrets.token_hex(16)
        self._pause = _RestartPause()
        self._begun_s = time.monotonic()  # of the newest attempt, as far as it is known here

    def first(self) -> Attempt | JobEnd:
        """Wait for the launchers, and return the first attempt, whose port is not known yet.

        Raises `JobStoppedError` if too few come.
        """
        options, begun_s = self._options, time.monotonic()
        while True:
            offers, waited_s = self._offers(), time.monotonic() - begun_s
            is_late = waited_s > options.last_call_s
            if self._has_to_end:
                return self._end_by_notice()
            if len(offers) >= (options.least_nodes if is_late else options.nodes):
                break
            if waited_s > options.arrival_s:
                raise JobStoppedError(f"{len(offers)} of {options.least_nodes} nodes came")
            time.sleep(_POLL_S)
        return self._begun(Attempt(0, 0, place(offers, most=options.nodes)), None, -1)

    def attend(self, attempt: Attempt, step: int, *, takes_plans: bool) -> None:
        """Look for lost nodes and for plans; see `Nodes.attend`."""
        self._report_pause(step)
        lost = self._lost(attempt)
        if lost:
            self._end_by_loss(lost[0], attempt, step)
            return
        if self._plans is None or not takes_plans:
            return
        self._plans.refuse_unusable()
        plan = self._plans.pending()
        if plan is not None and self._takes(plan, attempt):
            end = AttemptEnd(EndKind.PLAN, f"plan {plan.version}: {'; '.join(plan.reason[:1])}")
            self._pause.begin(plan)
            self._store.end(attempt.number, end)

    def next(self, attempt: Attempt, step: int) -> Attempt | JobEnd:
        """Wait for the reports on an attempt, and decide what follows it."""
        reports, lost = self._reports(attempt, step)
        end = self._store.end_of(attempt.number)
        # After a notice ranks end with 0 before they have completed, as one, and none may be left.
        is_notice = end is not None and end.kind is EndKind.NOTICE
        if reports and not (lost or is_notice) and all(one.completed for one in reports):
            return JobEnd(0)
        if self._has_to_end:
            return self._end_by_notice()
        why = end.why if end is not None else "ranks ended without having completed"
        failure = end.failure if end is not None else None
        if lost and (failure is None or failure.node is None):
            failure = self._loss_of(lost[0], attempt, step)
        if failure is not None:
            self._failures.append(failure)
            self._store.keep_failures(self._failures)
            decision = decide(self._failures, max_restarts=self._options.max_restarts)
            if not decision.restarts:
                return JobEnd(launcher_status(failure.status), decision.why, failure.rank)
            why = decision.why
        status = NOTICED_STATUS if is_notice else exit_status.JOB_STOPPED
        return self._restarted(attempt, reports, step, why, status)

    def _restarted(
        self, attempt: Attempt, reports: list[NodeOffer], step: int, why: str, status: int
    ) -> Attempt | JobEnd:
        """The attempt that follows, by a plan if there is one; the end of the job, with `status`,
        if too few nodes are left."""
        before = [node.id for node in attempt.nodes]
        present = self._offers()
        offers = [report for report in reports if report.id in {offer.id for offer in present}]
        spares = [offer for offer in present if offer.id not in before]
        offers += [self._latest(offer, attempt.number) for offer in spares]
        most, least = self._options.nodes, self._options.least_nodes
        plan = self._plans.pending() if self._plans is not None else None
        if plan is not None and self._takes(plan, attempt):
            nodes = place(offers, before=before, most=most, left_out=left_out(plan, attempt))
        else:
            plan, nodes = None, place(offers, before=before, most=most)
        is_without_host = not self._options.outlives_nodes and (
            not nodes or nodes[0].id != before[0]
        )
        if len(nodes) < least or is_without_host:
            left = f"{len(nodes)} of at least {plural(least, 'node')}"
            return JobEnd(status, f"{why}: {left} {'is' if len(nodes) == 1 else 'are'} left")
        same_ranks = [node.key for node in nodes] == [node.key for node in attempt.nodes]
        following = Attempt(attempt.number + 1, 0, nodes, why, attempt.plan if same_ranks else "")
        if plan is not None:
            is_as_planned = following.world_size == len(plan.layout.members)
            following = replace(following, plan=as_renumbered(plan) if is_as_planned else "")
        return self._begun(following, plan, step, same_ranks=same_ranks)

    @property
    def _has_to_end(self) -> bool:
        """True if the store ends with this node, which is about to be taken away."""
        return self._notice.why is not None and not self._options.outlives_nodes

    def _end_by_notice(self) -> JobEnd:
        return JobEnd(NOTICED_STATUS, f"node 0 leaves the job ({self._notice.why})")

    def _begun(
        self, attempt: Attempt, plan: Plan | None, step: int, *, same_ranks: bool = False
    ) -> Attempt:
        """The attempt, after noting that it begins."""
        self._begun_s = time.monotonic()
        self._pause.restarted(plan, step)
        memories = tuple(offer.memory for offer in self._offers() if offer.memory is not None)
        attempt = replace(attempt, token=self._token, memories=memories)
        if self._plans is not None:
            if plan is not None:
                self._plans.take(plan)
                self._plans.applied(plan, self._pause.ms)
            self._plans.begin(attempt.world_size, same_ranks=same_ranks)
        return attempt

    def _reports(self, attempt: Attempt, step: int) -> tuple[list[NodeOffer], list[NodeRanks]]:
        """Reports of the launchers that stay, in the order of their nodes; and the lost nodes."""
        while True:
            lost = self._lost(attempt)
            left = [node for node in attempt.nodes if node not in lost and not self._leaves(node)]
            found = [self._store.reported(attempt.number, node.id) for node in left]
            reports = [report for report in found if report is not None]
            if len(reports) == len(left):
                return reports, lost
            if lost:
                self._end_by_loss(lost[0], attempt, step)
            if self._has_to_end:
                end = AttemptEnd(EndKind.NOTICE, self._end_by_notice().why)
                self._store.end(attempt.number, end)
            time.sleep(_POLL_S)

    def _latest(self, offer: NodeOffer, number: int) -> NodeOffer:
        """The last report of a standby up to attempt `number`, which tells the devices that it
        still has; its first offer if it has had no part in one."""
        found = (self._store.reported(each, offer.id) for each in range(number, -1, -1))
        return next((report for report in found if report is not None), offer)

    def _leaves(self, node: NodeRanks) -> bool:
        """True if a node is about to be taken away: nobody waits for its ranks."""
        return self._heartbeats is not None and self._store.is_marked(node.id, "leaves")

    def _loss_of(self, node: NodeRanks, attempt: Attempt, step: int) -> Failure:
        lasted_s = time.monotonic() - self._begun_s
        return Failure(attempt.number, node.first, -9, "", step, node.node, lasted_s)

    def _end_by_loss(self, node: NodeRanks, attempt: Attempt, step: int) -> None:
        failure = self._loss_of(node, attempt, step)
        self._store.end(attempt.number, AttemptEnd(EndKind.FAILURE, str(failure), failure))

    def _lost(self, attempt: Attempt) -> list[NodeRanks]:
        """Nodes of the attempt whose launchers are gone without a report."""
        if self._heartbeats is None:
            return []
        silent = self._heartbeats.silent
        return [
            node
            for node in attempt.nodes
            if node.id in silent
            and not self._leaves(node)
            and self._store.reported(attempt.number, node.id) is None
        ]

    def _offers(self) -> list[NodeOffer]:
        """Offers of launchers that are there and stay, by arrival."""
        offers = self._store.announced()
        if self._heartbeats is None:
            return offers
        gone = self._heartbeats.silent
        return [
            offer
            for offer in offers
            if offer.id not in gone
            and not any(self._store.is_marked(offer.id, mark) for mark in _GONE)
        ]

    # Plans.

    def _takes(self, plan: Plan, attempt: Attempt) -> bool:
        """True if an attempt can be followed by one of this plan; refuses it otherwise."""
        assert self._plans is not None
        spares = len(self._offers()) - len(attempt.nodes)
        why = refusal(
            plan,
            attempt,
            least_nodes=self._options.least_nodes,
            spares=max(0, spares),
            reads_plans=self._options.reads_plans,
        )
        if why is not None:
            self._plans.refuse(plan, why)
        return why is None

    def _report_pause(self, step: int) -> None:
        """Report the pause of a restart once a step of the new attempt is kept."""
        plan = self._pause.ended(step)
        if plan is not None and self._plans is not None:
            pause_ms = self._pause.ms or 0.0
            _log.info("plan %d: training paused for %.1f s", plan.version, pause_ms / 1e3)
            self._plans.applied(plan, pause_ms)


class _RestartPause:
    """Pause of a restart by a plan: from its beginning to the first step that is kept after it."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._begun_s, self._step = 0.0, -1

    @property
    def ms(self) -> float | None:
        """Pause so far; None if no plan is the reason of the last restart."""
        return None if not self._begun_s else (time.monotonic() - self._begun_s) * 1e3

    def begin(self, plan: Plan) -> None:
        """Begin when the ranks are told to end."""
        self._plan, self._begun_s = plan, time.monotonic()

    def restarted(self, plan: Plan | None, step: int) -> None:
        """Note the start of the next attempt, by which plan, and the last step that is kept."""
        self._step = step
        if plan is not self._plan:  # a failure came first
            self._plan, self._begun_s = None, 0.0

    def ended(self, step: int) -> Plan | None:
        """The plan, once, when a later step is kept than at the restart."""
        if step <= self._step:
            return None
        plan, self._plan = self._plan, None
        return plan
