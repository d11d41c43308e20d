"""Decisions of node 0 between attempts, whatever comes first."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from resihp._preemption import PreemptionNotice
from resihp.contracts import Plan, from_json
from resihp.elastic.rendezvous.store import host_store
from resihp.launch.attempts import Attempt, AttemptEnd, EndKind, JobEnd, NodeOffer
from resihp.launch.coordinator import AttemptCoordinator
from resihp.launch.heartbeats import LauncherHeartbeats
from resihp.launch.launcher_store import LauncherStore
from resihp.launch.options import Command, Options
from resihp.launch.restart_plans import RestartPlanPoller
from resihp.launch.restart_policy import Failure
from tests.launch.test_restart_plans import plan_of

ERROR = "RuntimeError: Connection closed by peer"


@pytest.fixture(scope="module")
def server() -> dist.Store:
    return host_store("127.0.0.1", 0, timedelta(seconds=30))


@dataclass
class FakePlans:
    """Poller whose pending plan a test sets."""

    plan: Plan | None = None
    told: list[Any] = field(default_factory=list)

    def pending(self) -> Plan | None:
        return self.plan

    def take(self, plan: Plan) -> None:
        self.plan = None

    def refuse(self, plan: Plan, why: str) -> None:
        self.plan = None
        self.told.append(("refused", plan.version, why))

    def refuse_unusable(self) -> None:
        pass

    def applied(self, plan: Plan, pause_ms: float | None = None) -> None:
        self.told.append(("applied", plan.version, pause_ms is not None))

    def begin(self, world_size: int, *, same_ranks: bool = False) -> None:
        self.told.append(("begin", world_size, same_ranks))


class Job:
    """Launchers of some nodes of two ranks, of which this process plays all."""

    def __init__(
        self, server: dist.Store, name: str, nodes: int, most: int, least: int, store_url: str = ""
    ) -> None:
        self.store = LauncherStore(dist.PrefixStore(name, server))
        self.plans, self.notice = FakePlans(), PreemptionNotice()
        self.beats = SimpleNamespace(silent=frozenset())
        command, url = Command("t.py", "script"), store_url or None
        options = Options(command, nodes=most, least_nodes=least, processes=2, store_url=url)
        self.node = AttemptCoordinator(
            options,
            self.store,
            cast(LauncherHeartbeats, self.beats) if most > 1 or store_url else None,
            cast(RestartPlanPoller, self.plans),
            self.notice,
        )
        self.offers = {f"n{i}": NodeOffer(f"n{i}", i, (0, 1)) for i in range(nodes)}
        for offer in self.offers.values():
            self.store.announce(offer)
        first = self.node.first()
        assert isinstance(first, Attempt)
        self.attempt, self.plans.told = first, []

    def fail(self, rank: int = 0, status: int = 1, message: str = ERROR, step: int = 4) -> None:
        failure = Failure(self.attempt.number, rank, status, message, step)
        self.store.end(self.attempt.number, AttemptEnd(EndKind.FAILURE, str(failure), failure))

    def report(self, *ids: str, **changes: Any) -> None:
        for launcher in ids:
            self.store.report(self.attempt.number, replace(self.offers[launcher], **changes))

    def next(self) -> Attempt | JobEnd:
        following = self.node.next(self.attempt, 4)
        if isinstance(following, Attempt):
            self.attempt = following
        return following

    def ids(self) -> list[str]:
        return [node.id for node in self.attempt.nodes]


@pytest.fixture
def job(server: dist.Store, request: pytest.FixtureRequest) -> Job:
    nodes, most, least = request.param
    return Job(server, request.node.name, nodes, most, least)


one_node = pytest.mark.parametrize("job", [(1, 1, 1)], indirect=True)
with_spare = pytest.mark.parametrize("job", [(3, 2, 1)], indirect=True)


@one_node
def test_a_plan_that_comes_with_a_failure_is_followed_in_the_same_restart(job: Job) -> None:
    job.plans.plan = plan_of(1)
    job.fail()
    job.report("n0")
    assert isinstance(job.next(), Attempt)
    assert job.attempt.nodes[0].local_ranks == (1,)
    assert from_json(Plan, json.loads(job.attempt.plan)).layout.ranks == (0,)
    assert job.plans.told == [("applied", 1, False), ("begin", 1, False)]


@one_node
def test_a_plan_is_told_to_later_attempts_of_the_same_ranks(job: Job) -> None:
    job.plans.plan = plan_of(1)
    job.node.attend(job.attempt, 3, takes_plans=True)
    end = job.store.end_of(0)
    assert end is not None
    assert end.kind is EndKind.PLAN
    job.report("n0")
    job.next()
    assert job.plans.told[0] == ("applied", 1, True)
    told = job.attempt.plan
    assert told
    job.fail()
    job.report("n0", local_ranks=(0,))
    job.next()
    assert (job.attempt.number, job.attempt.plan) == (2, told)
    assert job.plans.told[-1] == ("begin", 1, True)


@one_node
def test_the_pause_ends_with_the_first_step_that_is_kept(job: Job) -> None:
    job.plans.plan = plan_of(1)
    job.node.attend(job.attempt, 3, takes_plans=True)
    job.report("n0")
    job.next()
    told = len(job.plans.told)
    job.node.attend(job.attempt, 4, takes_plans=True)
    assert len(job.plans.told) == told
    job.node.attend(job.attempt, 5, takes_plans=True)
    job.node.attend(job.attempt, 6, takes_plans=True)
    assert job.plans.told[told:] == [("applied", 1, True)]


@one_node
def test_a_job_that_completes_meanwhile_is_not_restarted_by_a_plan(job: Job) -> None:
    job.plans.plan = plan_of(1)
    job.node.attend(job.attempt, 3, takes_plans=False)
    assert job.store.end_of(0) is None
    job.node.attend(job.attempt, 3, takes_plans=True)
    job.report("n0", completed=True)
    assert job.next() == JobEnd(0)


@one_node
def test_a_plan_that_the_options_do_not_permit_changes_nothing(job: Job) -> None:
    job.plans.plan = plan_of(0, 1)
    job.node.attend(job.attempt, 3, takes_plans=True)
    assert job.store.end_of(0) is None
    assert [told[0] for told in job.plans.told] == ["refused"]


@with_spare
def test_the_loss_of_a_node_is_the_reason_of_what_fails_after_it(job: Job) -> None:
    """The same words at the same step are no bug of the script then."""
    for lost, left in (("n1", ["n0", "n2"]), ("n2", ["n0"])):
        job.fail(rank=0)
        job.report("n0")
        job.beats.silent |= {lost}
        assert isinstance(job.next(), Attempt)
        assert job.attempt.why == f"node {lost[1]} was lost"
        assert job.ids() == left


@with_spare
def test_a_spare_that_died_is_not_chosen(job: Job) -> None:
    job.beats.silent |= {"n2"}
    job.fail(rank=2, status=-9)
    job.report("n0", "n1")
    assert isinstance(job.next(), Attempt)
    assert job.ids() == ["n0", "n1"]


@with_spare
def test_a_plan_without_all_ranks_of_a_node_takes_the_spare_in(job: Job) -> None:
    job.plans.plan = plan_of(0, 1)
    job.node.attend(job.attempt, 3, takes_plans=True)
    job.report("n0", "n1")
    job.next()
    assert job.ids() == ["n0", "n2"]
    assert job.attempt.plan == ""  # of two ranks, and there are four
    job.fail(status=-9)
    job.report("n0", "n2")
    job.next()
    assert job.ids() == ["n0", "n2"], "the slow node came back in place of one that works"


@with_spare
def test_a_node_that_returns_is_without_the_devices_that_were_left_out(job: Job) -> None:
    job.fail(rank=3, message="CUDA error: an ECC error")
    job.report("n0")
    job.report("n1", local_ranks=(0,))
    job.next()
    job.plans.plan = plan_of(0, 1)
    job.node.attend(job.attempt, 3, takes_plans=True)
    job.report("n0")
    job.report("n1", local_ranks=(0,))
    job.next()
    assert job.ids() == ["n0", "n2"]
    job.fail(status=-9)
    job.beats.silent |= {"n2"}
    job.report("n0")
    job.next()
    assert [(node.id, node.local_ranks) for node in job.attempt.nodes] == [
        ("n0", (0, 1)),
        ("n1", (0,)),
    ]


@with_spare
def test_nobody_waits_for_a_node_that_leaves(job: Job) -> None:
    why = "node 1 leaves the job (got SIGTERM)"
    job.store.end(0, AttemptEnd(EndKind.NOTICE, why))
    job.store.mark("n1", "leaves")
    job.report("n0")
    assert isinstance(job.next(), Attempt)
    assert (job.ids(), job.attempt.why) == (["n0", "n2"], why)
    job.beats.silent |= {"n2"}
    job.report("n0")
    job.next()
    assert job.ids() == ["n0"], "a node that still ends its ranks was taken for a spare"


@with_spare
def test_ranks_that_end_together_after_a_notice_have_not_completed_the_job(job: Job) -> None:
    """Their launcher has seen them end with 0, and not the notice."""
    job.store.end(0, AttemptEnd(EndKind.NOTICE, "node 1 leaves the job"))
    job.store.mark("n1", "leaves")
    job.report("n0", completed=True)
    assert isinstance(job.next(), Attempt)
    assert job.ids() == ["n0", "n2"]


def test_a_job_whose_only_node_leaves_goes_on_with_the_spare(server: dist.Store) -> None:
    """In a store that outlives its nodes; another launcher decides by then."""
    job = Job(server, "only node leaves", 2, 1, 1, store_url="redis://store")
    job.beats.silent |= {"n0"}
    for mark in ("leaves", "left"):
        job.store.mark("n0", mark)
    job.store.end(0, AttemptEnd(EndKind.NOTICE, "node 0 leaves the job"))
    job.report("n0", leaves=True)
    assert isinstance(job.next(), Attempt)
    assert job.ids() == ["n1"]


@with_spare
def test_a_notice_at_all_nodes_at_once_ends_the_job(job: Job) -> None:
    """As Slurm gives it. The spare learns that the job was not completed."""
    job.notice.handle_signal(10, None)
    job.store.mark("n1", "leaves")
    job.report("n0")
    assert job.next() == JobEnd(143, "node 0 leaves the job (got SIGUSR1)")


@with_spare
def test_a_notice_at_node_0_ends_the_job(job: Job) -> None:
    job.notice.handle_signal(15, None)
    job.report("n0", "n1")
    assert job.next() == JobEnd(143, "node 0 leaves the job (got SIGTERM)")


@pytest.mark.parametrize("job", [(2, 2, 2)], indirect=True)
def test_too_few_nodes_end_the_job(job: Job) -> None:
    job.beats.silent |= {"n1"}
    job.node.attend(job.attempt, 4, takes_plans=True)
    job.report("n0")
    assert job.next() == JobEnd(69, "node 1 was lost: 1 of at least 2 nodes is left")
