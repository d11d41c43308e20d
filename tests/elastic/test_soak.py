"""Long chains of switches, and of deaths and returns: exact, and nothing accumulates."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from resihp.contracts import Layout, Replica, Stage
from resihp.elastic.local import LocalRanks
from resihp.elastic.membership.store import Timeouts
from tests.elastic.job import ALONE, GRID, MICROBATCHES, Case, plan, run, run_rank

SWITCHES, KILLS = 200, 20


def random_layout(chosen: random.Random) -> Layout:
    """One or two replicas of uneven stages over a random part of the eight ranks."""
    free = chosen.sample(range(8), 8)
    replicas = []
    for _ in range(chosen.randint(1, 2)):
        cuts = sorted(chosen.sample(range(1, 4), chosen.randint(0, 1)))
        stages = []
        for start, stop in zip([0, *cuts], [*cuts, 4], strict=True):
            degree = chosen.randint(1, 2)
            ranks, free = tuple(free[:degree]), free[degree:]
            first = chosen.randint(1, 3)
            stages.append(Stage(ranks, (start, stop), (first, 4 - first) if degree > 1 else (4,)))
        replicas.append(Replica(tuple(stages)))
    return Layout(tuple(replicas))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_switches_leave_the_training_exact_and_nothing_behind(tmp_path: Path) -> None:
    chosen = random.Random(7)
    plans = []
    for version in range(1, SWITCHES + 1):
        layout = random_layout(chosen)
        first = chosen.randint(1, MICROBATCHES - 1)
        quotas = (first, MICROBATCHES - first) if layout.dp == 2 else (MICROBATCHES,)
        plans.append(plan(version, layout, quotas=quotas, from_step=2 * version - 1))
    steps = 2 * SWITCHES + 2
    outcome = run(Case(GRID, steps, tuple(plans), ranks=tuple(range(8))), tmp_path, timeout_s=3000)
    assert set(outcome.exit_codes.values()) == {0}, outcome.logs
    versions = {event["version"] for event in outcome.switches}
    assert versions == set(range(1, SWITCHES + 1)), outcome.logs

    alone = run(Case(ALONE, steps), tmp_path / "alone", timeout_s=600)
    for step, loss in outcome.losses.items():
        assert loss == pytest.approx(alone.losses[step], abs=1e-3)
    for epoch in range(SWITCHES):
        before = outcome.full_state(f"before{epoch}")
        after = outcome.full_state(f"after{epoch + 1}")
        for key, tensors in before.items():
            assert all(a.equal(b) for a, b in zip(tensors, after[key], strict=True)), key
    for rank in range(8):
        own = [event for event in outcome.switches if event["rank"] == rank]
        early = [event for event in own if 5 <= event["version"] <= 15]
        late = [event for event in own if event["version"] > SWITCHES - 10]
        for what in ("threads", "files"):
            grown = max(e[what] for e in late) - max(e[what] for e in early)
            assert grown <= 8, f"rank {rank}: {what} grew by {grown}"


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_ranks_that_die_and_return_leave_nothing_behind(tmp_path: Path) -> None:
    """Ranks of one replica are killed one after another; each comes back as a joiner."""
    chosen = random.Random(11)
    timeouts = Timeouts(
        heartbeat=timedelta(seconds=5),
        poll=timedelta(milliseconds=50),
        connect=timedelta(seconds=15),
        exchange=timedelta(seconds=20),  # broken worlds are held so long
    )
    welcome = tuple(plan(version, GRID) for version in range(1, 102 * KILLS))
    case = Case(GRID, 1_000_000, welcome=welcome, step_s=0.05, timeouts=timeouts)
    steady = GRID.replicas[0].ranks[0]
    with LocalRanks("test", tmp_path) as ranks:
        ranks.start(GRID.ranks, run_rank, case, tmp_path)
        log = tmp_path / f"events-{steady}.jsonl"
        wait_for(lambda: log.exists() and "loss" in log.read_text(), ranks)
        for kill in range(KILLS):
            victim = chosen.choice(GRID.replicas[1].ranks)
            ranks.kill(victim)
            wait_for(lambda n=kill: len(switches(tmp_path, steady)) == 2 * n + 1, ranks)
            ranks.start([victim], run_rank, replace(case, joiners=(victim,)), tmp_path)
            wait_for(lambda n=kill: len(switches(tmp_path, steady)) == 2 * n + 2, ranks)
        seen = switches(tmp_path, steady)
    early, late = seen[KILLS // 2 : KILLS], seen[-KILLS // 2 :]
    for what, most in (("threads", 40), ("files", 80), ("memory_mb", 64)):
        grown = max(e[what] for e in late) - max(e[what] for e in early)
        assert grown <= most, f"{what} grew by {grown}: {[e[what] for e in seen]}"


def switches(folder: Path, rank: int) -> list[dict[str, Any]]:
    """What a rank noted at each switch."""
    lines = (folder / f"events-{rank}.jsonl").read_text().splitlines()
    return [event for line in lines if "version" in (event := json.loads(line))]


def wait_for(is_so: Callable[[], bool], ranks: LocalRanks) -> None:
    """Wait, and let the launcher announce deaths. Raises `TimeoutError` with the logs."""
    deadline = time.monotonic() + 90
    while not is_so():
        ranks.poll(0.05)
        if time.monotonic() > deadline:
            raise TimeoutError(ranks.logs())
