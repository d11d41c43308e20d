"""Many losses and many newcomers in one job: every step is the undisturbed one, to the last bit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from resihp.contracts import Layout
from tests.elastic.engine_faults import EngineFault, Job, play
from tests.elastic.engine_job import ALONE, MICROBATCHES

STEPS, KILLS, REPLICAS = 200, 20, 6
SPARES = tuple(range(REPLICAS, KILLS + 1))
POINTS = ("data", "account", "vote", "clip", "optimizer", "after", "accumulating", "reducing")


def faults(chosen: random.Random) -> list[EngineFault]:
    """Losses at random points of random ranks, one every few steps, until one rank is left.

    The points are such as every rank comes to in every step, with a quota or without one.
    """
    working, spares = list(range(REPLICAS)), list(SPARES)
    found = []
    for number in range(KILLS):
        victim = chosen.choice(working)
        step = 5 + number * (STEPS - 10) // KILLS + chosen.randrange(5)
        found.append(EngineFault(victim, chosen.choice(POINTS), step))
        if spares:
            working[working.index(victim)] = spares.pop(0)
        else:
            working.remove(victim)
    return found


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_job_that_loses_all_its_first_ranks(deterministic: bool, tmp_path: Path) -> None:
    layout = Layout.grid(dp=REPLICAS, pp=1, tp=1, layers=4, units=4)
    planned = tuple(faults(random.Random(3)))
    job = Job(layout, STEPS, planned, deterministic=deterministic, spares=SPARES)
    record = play(job, tmp_path, timeout_s=1500)
    alone = play(Job(ALONE, STEPS, deterministic=deterministic), tmp_path / "alone", timeout_s=600)
    assert record.dead == {fault.rank for fault in planned}, record.logs
    for step in range(STEPS):
        assert record.counted(step) == list(range(MICROBATCHES)), record.logs
        if deterministic:
            assert record.losses[step] == alone.losses[step]
        else:
            assert record.losses[step] == pytest.approx(alone.losses[step], abs=1e-3)
    if deterministic:
        for key, tensors in record.state.items():
            assert all(map(torch.equal, tensors, alone.state[key])), key


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_losses_at_any_moment(tmp_path: Path) -> None:
    """Not at scripted points: two ranks of different replicas, somewhere in the first second."""
    steps, layout = 12, Layout.grid(dp=3, pp=2, tp=1, layers=4, units=4)
    alone = play(Job(ALONE, steps, deterministic=True), tmp_path / "alone")
    for seed in range(40):
        chosen = random.Random(seed)
        victims = chosen.sample(range(3), 2)
        kills = [(chosen.uniform(0.0, 1.0), v + 3 * chosen.randrange(2)) for v in victims]
        record = play(Job(layout, steps, deterministic=True), tmp_path / str(seed), kills=kills)
        assert record.dead <= {rank for _, rank in kills}, record.logs
        assert record.losses == alone.losses, record.logs
        for step in range(steps):
            assert record.counted(step) == list(range(MICROBATCHES)), record.logs
