"""A long chain of live switches between random layouts: exact, and nothing accumulates."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.elastic.chains import random_plan
from tests.elastic.engine_job import ALONE, GRID, Case, run

ROUND, ROUNDS = 20, 3
SWITCHES = ROUND * ROUNDS


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_many_switches_leave_the_training_exact_and_nothing_behind(tmp_path: Path) -> None:
    """The same layouts follow one another in every round, so that like is compared with like."""
    chosen = random.Random(7)
    layouts = [random_plan(chosen, 0) for _ in range(ROUND)]
    plans = tuple(
        replace(layouts[(v - 1) % ROUND], version=v, from_step=2 * v - 1)
        for v in range(1, SWITCHES + 1)
    )
    steps = 2 * SWITCHES + 2
    case = Case(GRID, steps, plans, ranks=tuple(range(8)), counts=True)
    outcome = run(case, tmp_path, timeout_s=1500)
    assert set(outcome.exit_codes.values()) == {0}, outcome.logs
    versions = {event["version"] for event in outcome.switches}
    assert versions == set(range(1, SWITCHES + 1)), outcome.logs

    alone = run(Case(ALONE, steps), tmp_path / "alone", timeout_s=600)
    for step, loss in outcome.losses.items():
        assert loss == pytest.approx(alone.losses[step], abs=1e-3)
    for generation in range(SWITCHES):
        before = outcome.full_state(f"before{generation}")
        after = outcome.full_state(f"after{generation + 1}")
        for key, tensors in before.items():
            assert all(a.equal(b) for a, b in zip(tensors, after[key], strict=True)), key
    for rank in range(8):
        assert_nothing_grew([event for event in outcome.switches if event["rank"] == rank])


def assert_nothing_grew(seen: list[dict[str, Any]]) -> None:
    """A rank holds the same threads and files in each generation as in that of the round before."""
    early, late = ({e["version"] % ROUND: e for e in part} for part in _last_rounds(seen))
    for place, event in late.items():
        for what in ("threads", "files"):
            assert event[what] == early[place][what], (event["rank"], event["version"])


def _last_rounds(seen: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], ...]:
    by_version = sorted(seen, key=lambda event: event["version"])
    assert len(by_version) == SWITCHES
    return by_version[-2 * ROUND : -ROUND], by_version[-ROUND:]
