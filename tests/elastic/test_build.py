"""Preparations that are given up: a rank that does not come holds up neither training nor plans."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from resihp.contracts import Layout, PeerLostError, Replica
from resihp.elastic.rendezvous import keys
from resihp.elastic.rendezvous.barrier import barrier
from resihp.elastic.state.phases import Phase
from tests.elastic.engine_job import BRISK, GRID, SHIFTED, Case, Fault, plan, run

STEPS = 8
FIRST = Layout((GRID.replicas[0],))
OTHER_SHARES = Layout((SHIFTED.replicas[1],))
IDLE = 2
HOUR = timedelta(hours=1)
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


def test_ranks_meet_when_all_have_come() -> None:
    """The last one comes when the others are known to wait; another name is another meeting."""
    store, waits = dist.HashStore(), threading.Event()

    def come() -> None:
        barrier(
            store, "generation", (0, 1), broken=waits.set, absent=lambda seconds: [], timeout=HOUR
        )

    store.add(keys.arrivals("elsewhere"), 2)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(come)
        assert waits.wait(PATIENCE_S)
        assert not first.done()
        come()
        first.result(PATIENCE_S)


def test_a_meeting_is_left_when_it_is_given_up_or_a_rank_will_not_come() -> None:
    def wait(given_up: str | None, gone: list[int], timeout: timedelta) -> None:
        barrier(
            dist.HashStore(),
            "generation",
            (0, 1),
            broken=lambda: given_up,
            absent=lambda seconds: gone,
            timeout=timeout,
        )

    with pytest.raises(PeerLostError, match="given up"):
        wait("given up", [], HOUR)
    with pytest.raises(PeerLostError, match=r"ranks \[1\] are dead"):
        wait(None, [1], HOUR)
    with pytest.raises(PeerLostError, match="1 of 2 ranks arrived"):
        wait(None, [], timedelta(0))
