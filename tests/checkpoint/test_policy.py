"""Policies: when a checkpoint is due."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.checkpoint.policy import (
    Every,
    EveryStep,
    LeastLoss,
    SaveTiming,
    best_interval_s,
)
from resihp.contracts import ContractError, FaultRate

seconds = st.floats(1e-3, 1e5)


def expected_loss(interval_s: float, cost_s: float, mtbf_s: float) -> float:
    """Fraction of time lost to saving and to repeated work, to first order (Young)."""
    return cost_s / interval_s + interval_s / 2 / mtbf_s


@settings(deadline=None)
@given(cost_s=st.floats(1e-4, 10), mtbf_s=st.floats(1e4, 1e7), factor=st.floats(0.2, 5))
def test_no_other_interval_loses_clearly_less(cost_s: float, mtbf_s: float, factor: float) -> None:
    best_s = best_interval_s(cost_s, mtbf_s)
    other = expected_loss(best_s * factor, cost_s, mtbf_s)
    assert expected_loss(best_s, cost_s, mtbf_s) <= other * (1 + 3 * (cost_s / mtbf_s) ** 0.5)


@settings(deadline=None)
@given(cost_s=seconds, mtbf_s=seconds)
def test_rarer_faults_never_call_for_more_checkpoints(cost_s: float, mtbf_s: float) -> None:
    assert 0 < best_interval_s(cost_s, mtbf_s) <= best_interval_s(cost_s, 2 * mtbf_s) * 1.35


def test_every_step_and_every_nth() -> None:
    moments = [SaveTiming(step, None, None, None) for step in range(6)]
    assert all(EveryStep().is_due(moment) for moment in moments)
    assert [m.step for m in moments if Every(3).is_due(m)] == [0, 3]
    with pytest.raises(ContractError):
        Every(0)


def test_least_loss_waits_for_its_interval_and_for_storage() -> None:
    policy = LeastLoss(FaultRate(prior_mtbf_s=3600.0))
    assert policy.is_due(SaveTiming(0, None, None, None)), "nothing is known yet"
    assert not policy.is_due(SaveTiming(1, 8.0, 0.01, 1.0))
    assert policy.is_due(SaveTiming(1, 8.6, 0.01, 1.0))
    assert not policy.is_due(SaveTiming(1, 8.6, 0.01, 20.0)), "the disk is not done"
