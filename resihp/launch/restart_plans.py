"""Plans of the sidecar that a job takes on by a restart."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from resihp._shutdown import start_thread
from resihp.contracts import Action, Plan, ServiceError, to_json
from resihp.contracts.job import acceptable_name, name_of_run
from resihp.formatting import plural

from .attempts import Attempt
from .options import Command

if TYPE_CHECKING:
    from resihp.client import Client

_log = logging.getLogger("resihp.launch")
_POLL_S = 1.0
"""Longest wait for a plan, and pause after an answer that cannot be used."""
_POLLS_UNTIL_CHECK = 10
_LAST_ANSWERS_S = 5.0
_UNKNOWN_JOB = 404
_FINAL = frozenset({400, 401, 403, 404, 409, 413, 422})
"""Statuses of an answer that no repetition makes acceptable."""


class RestartPlanPoller:
    """Asks the sidecar for plans in a thread, and keeps the newest one for a restart.

    Neither silence of the sidecar nor a wrong answer reaches the launcher: the first in a row is
    logged. A plan names ranks as the job was registered, which each attempt does anew. So plans of
    an attempt with other ranks than the one before count once it has registered; those made before
    are refused.
    """

    def __init__(self, client: Client, job: str) -> None:
        self._client, self._job = client, job
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._sending = threading.Lock()
        self._answers: deque[Callable[[], None]] = deque()
        self._world_size, self._knows_ranks = -1, True
        self._pending: Plan | None = None
        self._unusable: tuple[Plan, str] | None = None
        self._seen: Plan | None = None
        self._is_first_answer, self._is_silent, self._polls = True, False, 0
        self._resumes = False

    def start(self) -> None:
        """Ask from now on."""
        thread = threading.Thread(target=self._run, name="resihp-plans", daemon=True)
        start_thread(thread, self._closed.set)

    def begin(self, world_size: int, *, same_ranks: bool = False) -> None:
        """Begin an attempt; with the `same_ranks` as before, a plan that waits still counts."""
        with self._lock:
            is_first, self._world_size = self._world_size < 0, world_size
            if is_first or same_ranks:
                return
            self._knows_ranks = False
            pending, self._pending = self._pending, None
        if pending is not None:
            self.refuse(pending, "the job was restarted with other ranks meanwhile")

    def resume(self, world_size: int) -> None:
        """Ask in place of another launcher, in the middle of an attempt: the newest plan may be the
        one that the attempt follows."""
        with self._lock:
            self._world_size, self._resumes = world_size, True

    def pending(self) -> Plan | None:
        """Newest plan that was neither taken nor refused."""
        return self._pending

    def refuse_unusable(self) -> None:
        """Refuse a plan that names other ranks than those of this attempt."""
        with self._lock:
            unusable, self._unusable = self._unusable, None
        if unusable is not None:
            self.refuse(*unusable)

    def take(self, plan: Plan) -> None:
        """Keep a plan for a restart that comes now: it is not pending any more."""
        with self._lock:
            if self._pending is plan:
                self._pending = None

    def refuse(self, plan: Plan, why: str) -> None:
        """Tell the sidecar that the job keeps its ranks."""
        self.take(plan)
        _log.warning("plan %d is refused: %s", plan.version, why)
        self._answer(plan, "refused", why, None)

    def applied(self, plan: Plan, pause_ms: float | None = None) -> None:
        """Tell the sidecar that the job has restarted by the plan, and its pause so far."""
        self._answer(plan, "applied", "", pause_ms)

    def close(self) -> None:
        """Stop, after the answers that wait are sent: for a few seconds at most."""
        self._closed.set()
        last = threading.Thread(target=self._send_last, name="resihp-plans-last", daemon=True)
        start_thread(last, self._closed.set)
        last.join(_LAST_ANSWERS_S)

    def _send_last(self) -> None:
        try:
            self._send_answers()
        except Exception as error:  # noqa: BLE001 - no answer of the sidecar ends a job
            self._note_failure(error)

    def _send_answers(self) -> None:
        with self._sending:
            while self._answers:
                send = self._answers.popleft()
                try:
                    send()
                except ServiceError as error:
                    if error.status not in _FINAL:
                        self._answers.appendleft(send)  # for the next time
                        raise
                    _log.warning("the sidecar does not take the answer to a plan: %s", error)

    def _answer(self, plan: Plan, state: str, why: str, pause_ms: float | None) -> None:
        ranks = sorted(plan.layout.members)
        if state == "refused":
            ranks = ranks[:1]

        self._answers.extend(
            partial(
                self._client.acknowledge,
                self._job,
                plan.version,
                rank=rank,
                state=state,
                detail=why,
                pause_ms=pause_ms,
                digest=plan.digest,
            )
            for rank in ranks
        )

    # The thread.

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._send_answers()
                plan = self._ask()
                if self._is_silent:
                    _log.info("the sidecar answers again")
                self._is_silent = False
                if plan is None:
                    self._closed.wait(0.1)
                else:
                    self._receive(plan)
            except Exception as error:  # noqa: BLE001 - no answer of the sidecar ends a job
                self._note_failure(error)
                self._closed.wait(_POLL_S)

    def _ask(self) -> Plan | None:
        """A plan that was not seen yet.

        Versions begin anew when the job is registered with other content, so the newest plan is
        also compared with the one seen last, now and then.
        """
        seen = self._seen
        if seen is None:
            return self._client.plan(self._job)
        plan = self._client.plan(self._job, after=seen.version, wait=_POLL_S)
        self._polls += 1
        if plan is None and (self._polls % _POLLS_UNTIL_CHECK == 0 or not self._knows_ranks):
            plan = self._client.plan(self._job)
            if plan is not None and _identity(plan) == _identity(seen):
                return None
        return plan

    def _receive(self, plan: Plan) -> None:
        with self._lock:
            is_old, self._is_first_answer = self._is_first_answer, False
            self._seen, self._pending = plan, None
            if plan.action is not Action.RESTART:
                is_of_these = plan.layout.members == frozenset(range(self._world_size))
                self._knows_ranks = self._knows_ranks or is_of_these
            elif is_old and self._resumes:
                return
            elif is_old:
                self._unusable = plan, "it was made before this job was started"
            elif not self._knows_ranks:
                self._unusable = plan, "it names the ranks before the last restart"
            else:
                self._pending = plan

    def _note_failure(self, error: Exception) -> None:
        if isinstance(error, ServiceError) and error.status == _UNKNOWN_JOB:
            self._is_first_answer = False  # whatever it will know, this job has registered
            return
        if not self._is_silent:
            _log.warning("no plans from the sidecar for now: %s", error)
        self._is_silent = True


def poller_of(command: Command, run: str) -> RestartPlanPoller | None:
    """Poller for the job that the environment names; None without `RESIHP_URL`."""
    url = os.environ.get("RESIHP_URL")
    if not url:
        return None
    from resihp.client import Client

    try:
        return RestartPlanPoller(
            Client(url, os.environ.get("RESIHP_TOKEN") or None), job_of(command, run)
        )
    except ValueError as error:
        _log.warning("no plans: %s", error)
        return None


def job_of(command: Command, run: str) -> str:
    """Return the name by which the ranks register: RESIHP_JOB, else script and run.

    >>> [job_of(Command(path, "script"), "none") for path in ("runs/train.py", ".")]
    ['train', 'job']
    """
    name = os.environ.get("RESIHP_JOB")
    if name:
        return acceptable_name(name)
    stem = command.target.rpartition(".")[2] if command.kind == "module" else None
    return name_of_run(stem or Path(command.target).stem or "job", run)


def left_out(plan: Plan, attempt: Attempt) -> dict[str, tuple[int, ...]]:
    """Return the local ranks that a plan leaves out of an attempt, by launcher."""
    members = plan.layout.members
    found = {
        node.id: tuple(
            local
            for rank, local in zip(node.ranks, node.local_ranks, strict=True)
            if rank not in members
        )
        for node in attempt.nodes
    }
    return {launcher: ranks for launcher, ranks in found.items() if ranks}


def refusal(
    plan: Plan, attempt: Attempt, *, least_nodes: int, spares: int = 0, reads_plans: bool = False
) -> str | None:
    """Return the reason for which an attempt cannot be followed by one of this plan; None: it can.

    least_nodes  with which the job goes on
    spares       standbys that could take the place of a node
    reads_plans  the script takes layout and quotas from the plan, and not only a number of ranks
    """
    beyond = sorted(plan.layout.members - set(range(attempt.world_size)))
    if beyond:
        return f"there is no rank {beyond[0]} in this attempt"
    without = left_out(plan, attempt)
    if not without:
        same = "it leaves out no rank, and the script takes a number of ranks alone (--reads-plan)"
        return None if reads_plans else same
    gone = 0
    for node in attempt.nodes:
        kept = len(node.local_ranks) - len(without.get(node.id, ()))
        if kept == 0 and node is not attempt.nodes[0]:
            gone += 1
        elif kept < min(node.least, len(node.local_ranks)):
            least = plural(node.least, "rank")
            return f"node {node.node} goes on with {least} or more (--nproc-per-node MIN:MAX)"
    if len(attempt.nodes) - gone + spares < least_nodes:
        return f"the job goes on with {plural(least_nodes, 'node')} or more (--nnodes MIN:MAX)"
    return None


def as_renumbered(plan: Plan) -> str:
    """Return the JSON of a plan whose ranks are numbered as in the attempt that follows it."""
    number = {rank: index for index, rank in enumerate(sorted(plan.layout.members))}
    replicas = tuple(
        replace(
            replica,
            stages=tuple(
                replace(stage, ranks=tuple(number[rank] for rank in stage.ranks))
                for stage in replica.stages
            ),
        )
        for replica in plan.layout.replicas
    )
    return json.dumps(to_json(replace(plan, layout=replace(plan.layout, replicas=replicas))))


def _identity(plan: Plan) -> tuple[int, str]:
    return plan.version, plan.digest
