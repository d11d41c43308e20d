"""A long chain of live switches between random layouts: exact, and nothing accumulates."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.elastic.chains import random_plan
from tests.elastic.job import ALONE, GRID, Case, run

SWITCHES = 60


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_many_switches_leave_the_training_exact_and_nothing_behind(tmp_path: Path) -> None:
    chosen = random.Random(7)
    plans = [random_plan(chosen, v, from_step=2 * v - 1) for v in range(1, SWITCHES + 1)]
    steps = 2 * SWITCHES + 2
    outcome = run(Case(GRID, steps, tuple(plans), ranks=tuple(range(8))), tmp_path, timeout_s=1500)
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
