"""`resihp.instrument` on what Accelerate's `prepare` returned."""

from __future__ import annotations

import pytest

from .conftest import Run

pytestmark = pytest.mark.integrations


def test_a_slow_rank_is_named(run: Run) -> None:
    training = run("accelerate_loop.py", "--slow-rank", "1")
    training.assert_named(1)
    training.assert_sent(250, loads=100)  # of 50 steps of two microbatches
