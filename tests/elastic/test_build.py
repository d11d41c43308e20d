"""Preparations that are given up: a rank that does not come holds up neither training nor plans."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from resihp.contracts import Layout, PeerLostError, Replica
from resihp.elastic.rendezvous import keys
from resihp.elastic.rendezvous.liveness import LivenessSummary
from resihp.elastic.rendezvous.membership import Rendezvous
from resihp.elastic.rendezvous.store import Timeouts, announce_death
from resihp.elastic.state.phases import Phase
from tests.elastic.engine_job import BRISK, GRID, SHIFTED, Case, Fault, plan, run

STEPS = 8
FIRST = Layout((GRID.replicas[0],))
OTHER_SHARES = Layout((SHIFTED.replicas[1],))
IDLE = 2
PATIENCE_S = 30.0


def _with_idle(replica: Replica) -> Layout:
    """The idle rank in the place of rank 1."""
    stages = (
        replace(stage, ranks=tuple(IDLE if rank == 1 else rank for rank in stage.ranks))
        for stage in replica.stages
    )
    return Layout((Replica(tuple(stages)),))


def test_a_plan_follows_one_whose_rank_has_stopped(tmp_path: Path) -> None:
    """An idle rank stops unseen; the plan that needs it cannot be prepared, the next one holds."""
    plans = (
        plan(1, _with_idle(FIRST.replicas[0]), from_step=2),
        plan(2, OTHER_SHARES, from_step=4),
    )
    case = Case(
        FIRST,
        STEPS,
        plans,
        faults=(Fault(IDLE, Phase.IDLE, 0, signal.SIGSTOP),),
        ranks=(*FIRST.ranks, IDLE),
        stopped=frozenset({IDLE}),
        timeouts=BRISK,
    )
    outcome = run(case, tmp_path)
    assert outcome.exit_codes == dict.fromkeys(FIRST.ranks, 0), outcome.logs
    assert f"ranks [{IDLE}] are dead or do not answer" in outcome.logs
    assert f"plan 1 is refused: ranks [{IDLE}] are not there" in outcome.logs
    assert outcome.switches[-1]["version"] == 2, outcome.logs
    assert sorted(outcome.losses) == list(range(STEPS)), outcome.logs


def test_ranks_that_come_in_and_go_leave_nothing_behind(tmp_path: Path) -> None:
    layouts = (_with_idle(FIRST.replicas[0]), FIRST) * 2
    plans = tuple(plan(v, layout, from_step=2 * v) for v, layout in enumerate(layouts, start=1))
    case = Case(FIRST, 2 * len(plans) + 2, plans, ranks=(*FIRST.ranks, IDLE), counts=True)
    outcome = run(case, tmp_path)
    assert set(outcome.exit_codes.values()) == {0}, outcome.logs
    held = {(s["version"], s["rank"]): (s["threads"], s["files"]) for s in outcome.switches}
    for (version, rank), now in held.items():
        assert now == held[version - 2 if version > 2 else version, rank], (version, rank)


def rendezvous_of(store: dist.Store, rank: int, timeouts: Timeouts = BRISK) -> Rendezvous:
    return Rendezvous(lambda: store, rank, (0, 1), timeouts)


def test_ranks_meet_when_all_have_come() -> None:
    """The last one comes when the others are known to wait; another name is another meeting."""
    store, cancelled = dist.HashStore(), threading.Event()

    def come(rank: int) -> None:
        rendezvous_of(store, rank).barrier("generation", (0, 1), cancelled, is_starting=True)

    store.add(keys.arrivals("elsewhere"), 2)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(come, 0)
        while store.add(keys.arrivals("generation"), 0) == 0:
            time.sleep(0.001)
        assert not first.done()
        come(1)
        first.result(PATIENCE_S)


def test_a_meeting_is_left_when_it_is_given_up_or_a_rank_will_not_come() -> None:
    def wait(rendezvous: Rendezvous) -> None:
        rendezvous.barrier("generation", (0, 1), threading.Event(), is_starting=True)

    given_up = rendezvous_of(dist.HashStore(), 0)
    given_up.request_recovery("given up")
    with pytest.raises(PeerLostError, match="given up"):
        wait(given_up)
    store = dist.HashStore()
    announce_death(store, 1)
    watching = rendezvous_of(store, 0)
    watching.start()
    with pytest.raises(PeerLostError, match=r"ranks \[1\] are dead"):
        wait(watching)
    watching.close()
    at_once = dict.fromkeys(("heartbeat", "connect", "exchange"), timedelta(microseconds=2))
    hasty = Timeouts(poll=timedelta(microseconds=1), **at_once)
    store = dist.HashStore()
    store.set(keys.JOB_LIVENESS, LivenessSummary(1, "host", {1: 0}).encode())
    with pytest.raises(PeerLostError, match="1 of 2 ranks arrived"):
        wait(rendezvous_of(store, 0, hasty))
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(PeerLostError, match="cancelled"):
        rendezvous_of(dist.HashStore(), 0).barrier("it", (0, 1), cancelled, is_starting=True)
