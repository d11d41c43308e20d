"""Random chains of live changes with real processes: the whole state stays, to the last bit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.elastic.chains import random_plan
from tests.elastic.engine_job import GRID, Case, run
from tests.elastic.snapshots import full_state
from tests.elastic.test_engine_resizes import setup

CHAINS, LENGTH = 10, 5


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=[pytest.mark.soak] if seed else []) for seed in range(CHAINS)],
)
def test_a_random_chain_keeps_parameters_moments_step_and_cursor(seed: int, tmp_path: Path) -> None:
    """Ranks go idle and come back, learn scalars and cursor from others, and agree on each step.

    A copy takes one step, two or three.
    """
    chosen, copy_steps = random.Random(seed), 1 + seed % 3
    steps = (2 + copy_steps) * LENGTH
    plans = tuple(random_plan(chosen, v, from_step=2 * v) for v in range(1, LENGTH + 1))
    case = Case(GRID, steps, plans, ranks=GRID.ranks, setup=setup, copy_steps=copy_steps)
    outcome = run(case, tmp_path, timeout_s=300)
    assert set(outcome.exit_codes.values()) == {0}, outcome.logs
    assert {event["version"] for event in outcome.switches} == set(range(1, LENGTH + 1)), (
        outcome.logs
    )
    assert sorted(outcome.losses) == list(range(steps)), outcome.logs
    for generation in range(LENGTH):
        before = full_state(tmp_path, f"before{generation}")
        after = full_state(tmp_path, f"after{generation + 1}")
        assert before.keys() == after.keys()
        for key, tensors in before.items():
            assert all(a.equal(b) for a, b in zip(tensors, after[key], strict=True)), key
