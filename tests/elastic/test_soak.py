"""Two hundred changes of layout and twenty deaths in one job: exact, and nothing accumulates."""

from __future__ import annotations

import random
import time
from collections.abc import Collection
from dataclasses import replace
from datetime import timedelta
from itertools import accumulate
from pathlib import Path

import pytest

from resihp.contracts import Layout, Plan
from resihp.elastic.rendezvous.store import Timeouts
from resihp.testing.local_ranks import LocalRanks
from tests.elastic.chains import random_plan
from tests.elastic.engine_job import ALONE, GRID, UNEVEN, Case, plan, run, run_rank
from tests.elastic.records import events, switches
from tests.elastic.scripted import Scripted
from tests.elastic.snapshots import full_state

CYCLES, RESIZES = 20, 10
PERIOD = 5
"""Cycles after which the same layouts come again, so that like is compared with like."""
STEADY = GRID.replicas[0].ranks
ROOM = {"used_kib": 1024, "resident_kib": 8192}
"""For ten cycles: torch keeps 1 to 3 KiB a switch, and the allocator some of what was freed."""
OTHERS = (GRID, UNEVEN)
DRIFT = 2.0
"""How much farther from one rank's losses than the worst of OTHERS so far the job may be: sums in
another order differ in their last bits, and training lets such differences grow."""


class Chaos(Scripted):
    """Random layouts, then one that can lose a rank; the next ones when it has come back."""

    def __init__(self, folder: Path) -> None:
        super().__init__((), (), ())
        chosen = random.Random(7)
        self._chain = [random_plan(chosen, 0) for _ in range(PERIOD * RESIZES)]
        self._folder = folder
        self._given: dict[int, Plan] = {}

    def wait(self, after: int, seconds: float) -> Plan | None:
        cycle, place = divmod(len(self._given) - (after in self._given), RESIZES)
        if after not in self._given and not (self._folder / f"cycle-{cycle}").exists():
            time.sleep(0.05)
            return None
        offered = plan(after + 1, GRID)
        if place < RESIZES - 1:
            drawn = self._chain[cycle % PERIOD * RESIZES + place]
            offered = replace(drawn, version=after + 1)
        return self._given.setdefault(after, offered)

    def joined(self, current: Plan, joiners: Collection[int], step: int) -> Plan | None:
        return plan(current.version + 1, GRID)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_changes_and_deaths_leave_nothing_behind(tmp_path: Path) -> None:
    """Ranks of one replica are killed one after another; each comes back as a joiner."""
    chosen = random.Random(11)
    timeouts = Timeouts(
        heartbeat=timedelta(seconds=60),  # the machine may be busy; the killed are seen at once
        poll=timedelta(milliseconds=50),
        connect=timedelta(seconds=60),
        exchange=timedelta(seconds=60),
    )
    case = Case(GRID, 1_000_000, source=Chaos, timeouts=timeouts, counts=True)
    with LocalRanks("test", tmp_path) as ranks:
        ranks.start(GRID.ranks, run_rank, case, tmp_path)
        for cycle in range(CYCLES):
            done = cycle * (RESIZES + 2)
            (tmp_path / f"cycle-{cycle}").touch()
            await_switch(done + RESIZES, GRID.ranks, tmp_path, ranks)
            victim = chosen.choice(GRID.replicas[1].ranks)
            others = [rank for rank in GRID.ranks if rank != victim]
            ranks.kill(victim)
            await_switch(done + RESIZES + 1, others, tmp_path, ranks)
            ranks.start([victim], run_rank, replace(case, joiners=(victim,)), tmp_path)
            await_switch(done + RESIZES + 2, GRID.ranks, tmp_path, ranks)
    assert_nothing_grew(tmp_path)
    assert_exact(tmp_path)


def assert_exact(folder: Path) -> None:
    """Every change kept all bits, and the losses are those of a job that nothing happened to."""
    noted = [event for rank in GRID.ranks for event in events(folder, rank)]
    losses = {event["step"]: event["loss"] for event in noted if "loss" in event}
    assert sorted(losses) == list(range(len(losses)))
    alone = undisturbed(ALONE, len(losses), folder / "alone")
    drift = [0.0] * len(losses)
    for number, layout in enumerate(OTHERS):
        other = undisturbed(layout, len(losses), folder / f"other{number}")
        drift = [max(d, abs(a - b)) for d, a, b in zip(drift, alone, other, strict=True)]
    for step, (expected, most) in enumerate(zip(alone, accumulate(drift, max), strict=True)):
        limit = 2e-5 if step < 50 else DRIFT * most
        assert losses[step] == pytest.approx(expected, abs=limit), step
    for switch in switches(folder, 0):
        if switch["lost"]:
            continue
        before = full_state(folder, f"before{switch['generation'] - 1}")
        after = full_state(folder, f"after{switch['generation']}")
        for key, tensors in before.items():
            assert all(a.equal(b) for a, b in zip(tensors, after[key], strict=True)), key


def undisturbed(layout: Layout, steps: int, folder: Path) -> list[float]:
    """The losses of a job that keeps its layout and all its ranks."""
    outcome = run(Case(layout, steps), folder, timeout_s=1200)
    return [outcome.losses[step] for step in range(steps)]


def assert_nothing_grew(folder: Path) -> None:
    """A rank holds the same in each generation as in the same one many cycles before."""
    period = PERIOD * (RESIZES + 2)
    generations = [switch["generation"] for switch in switches(folder, 0)]
    for rank in STEADY:
        seen = {switch["generation"]: switch for switch in switches(folder, rank)}
        cycles = zip(generations[period : 2 * period], generations[-period:], strict=True)
        for early, late in cycles:
            before, after, where = seen[early], seen[late], f"rank {rank}, generation {late}"
            assert after["threads"] == before["threads"], where
            assert after["files"] == before["files"], where
            for what, most in ROOM.items():
                assert after[what] - before[what] <= most, f"{where}: {what}"


def await_switch(
    number: int, members: Collection[int], folder: Path, processes: LocalRanks
) -> None:
    """Wait until rank 0 has noted so many, and all members that last one.

    The launcher announces deaths meanwhile. Raises `TimeoutError` with the logs.
    """
    deadline = time.monotonic() + 400
    while not _have_noted(number, members, folder):
        processes.poll(0.1)
        if time.monotonic() > deadline:
            raise TimeoutError(processes.logs())


def _have_noted(number: int, members: Collection[int], folder: Path) -> bool:
    own = switches(folder, 0)
    last = [switches(folder, rank)[-1:] for rank in members]
    newest = own[-1:] and own[-1]["generation"]
    return len(own) == number and all(o and o[0]["generation"] == newest for o in last)
