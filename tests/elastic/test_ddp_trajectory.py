"""Many losses and returns in one run of a user's loop: every step is the undisturbed one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.elastic.ddp_faults import LoopFault
from tests.elastic.ddp_loops import Loop, play

POINTS = ("microbatch", "sum", "vote", "commit", "after")


def campaign(
    chosen: random.Random, *, replicas: int, steps: int, kills: int, returns: int
) -> tuple[tuple[LoopFault, ...], tuple[tuple[int, int], ...]]:
    """Kills at random points of random replicas; `returns` of the dead come back.

    Every fifth kill has company: a second replica dies at the same point, and every fifth one
    hits a replica that is recovering from the loss of another.
    """
    alive, lives = list(range(replicas)), dict.fromkeys(range(replicas), 0)
    faults: list[LoopFault] = []
    comes_back: list[tuple[int, int]] = []
    gap = (steps - 8) // kills
    while len(faults) < kills:
        number = len(faults)
        step, at = 2 + number * gap, chosen.choice(POINTS)
        both = number % 5 == 3 and number + 1 < kills
        victims = chosen.sample(alive, 2 if both else 1)
        points = [at, chosen.choice((at, "recovery"))] if at != "after" else [at, at]
        for victim, point in zip(victims, points, strict=False):
            faults.append(LoopFault(victim, step, at=point, life=lives[victim]))
            if len(comes_back) < returns and len(faults) % 2:
                comes_back.append((victim, step + 1))
                lives[victim] += 1
            else:
                alive.remove(victim)
    return tuple(faults), tuple(comes_back)


def assert_undisturbed(
    folder: Path, *, replicas: int, steps: int, kills: int, returns: int, deterministic: bool
) -> None:
    microbatches = 2 * replicas
    faults, comes_back = campaign(
        random.Random(7), replicas=replicas, steps=steps, kills=kills, returns=returns
    )
    assert (len(faults), len(comes_back)) == (kills, returns)
    loop = Loop(
        replicas,
        steps=steps,
        microbatches=microbatches,
        faults=faults,
        returns=comes_back,
        deterministic=deterministic,
    )
    trace = play(loop, folder / "hurt", timeout_s=40.0 + 5.0 * steps)
    plain = Loop(1, steps=steps, microbatches=microbatches, deterministic=deterministic)
    alone = play(plain, folder / "alone", timeout_s=40.0 + 5.0 * steps)
    left = replicas - kills + returns
    assert sum(code == 0 for code in trace.exit_codes.values()) == left, trace.logs
    assert len(trace.alive[steps - 1]) == left
    for step in range(steps):
        first = step * microbatches
        assert trace.summed[step] == list(range(first, first + microbatches)), (step, trace.logs)
    if deterministic:
        assert trace.losses == alone.losses
    assert trace.losses == pytest.approx(alone.losses, rel=1e-4)
    for model in trace.models.values():
        for key, tensor in model.items():
            if deterministic:
                assert torch.equal(tensor, alone.models[0][key]), key
            torch.testing.assert_close(tensor, alone.models[0][key], rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("deterministic", [False, True])
def test_losses_and_returns_leave_the_trajectory_as_it_is(
    deterministic: bool, tmp_path: Path
) -> None:
    assert_undisturbed(
        tmp_path, replicas=4, steps=32, kills=5, returns=3, deterministic=deterministic
    )


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("deterministic", [False, True])
def test_200_steps_20_kills_10_returns(deterministic: bool, tmp_path: Path) -> None:
    assert_undisturbed(
        tmp_path, replicas=12, steps=200, kills=20, returns=10, deterministic=deterministic
    )


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_losses_at_any_moment(tmp_path: Path) -> None:
    """Not at scripted points: three kills within a second, and one of the dead comes back."""
    steps = 40
    alone = play(Loop(1, steps=steps, deterministic=True), tmp_path / "alone")
    for seed in range(30):
        chosen = random.Random(seed)
        victims = chosen.sample(range(4), 3)
        kills = tuple((chosen.uniform(0.0, 1.0), victim) for victim in victims)
        loop = Loop(
            4, steps=steps, kills=kills, returns=((victims[0], steps - 3),), deterministic=True
        )
        trace = play(loop, tmp_path / str(seed), timeout_s=300)
        assert {rank for rank, code in trace.exit_codes.items() if code} <= set(victims), trace.logs
        assert trace.losses == alone.losses, (seed, trace.logs)
        for model in trace.models.values():
            assert all(torch.equal(model[key], alone.models[0][key]) for key in model), seed
