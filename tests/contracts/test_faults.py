"""How often faults come, and over how many steps a change has to pay."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resihp.contracts import ContractError, FaultRate, Job, Layout, Protection, from_json, to_json


def test_the_rate_of_faults_moves_from_the_prior_to_what_was_seen() -> None:
    assert FaultRate(1000.0).mtbf_s == 1000.0
    assert FaultRate(1000.0).seen(99, 9000.0).mtbf_s == 100.0


def test_the_horizon_ends_at_the_last_checkpoint_before_the_next_fault() -> None:
    rate = FaultRate(1000.0)
    assert Protection(faults=rate).horizon_steps(2.0) == 500
    assert Protection(faults=rate, interval_s=200.0, cost_s=20.0).horizon_steps(2.0) == 405
    assert Protection(faults=rate).horizon_steps(5000.0) == 1


def test_the_horizon_is_a_number_of_steps_at_any_times() -> None:
    endless = FaultRate(1e308, observed_s=1e308)
    assert Protection(faults=FaultRate(1000.0)).horizon_steps(0.0) == 2**53
    assert Protection(faults=FaultRate(1000.0)).horizon_steps(5e-324) == 2**53
    assert Protection(faults=endless).horizon_steps(1.0) == 2**53
    assert Protection(faults=endless, interval_s=9.0, cost_s=9.0).horizon_steps(1.0) == 1


@given(interval_s=st.floats(0.1, 1e4), share=st.floats(0.0, 1.0), longer=st.floats(1.0, 10.0))
def test_rarer_checkpoints_of_the_same_price_never_lengthen_it(
    interval_s: float, share: float, longer: float
) -> None:
    one = Protection(interval_s=interval_s, cost_s=share * interval_s)
    other = Protection(interval_s=longer * interval_s, cost_s=share * longer * interval_s)
    assert other.horizon_steps(0.5) <= one.horizon_steps(0.5) + 1


def test_it_travels_with_the_job() -> None:
    known = Protection(faults=FaultRate(3600.0, 2, 50.0), interval_s=9.0, cost_s=0.5)
    job = Job(
        name="j", layout=Layout.grid(dp=2, pp=1, tp=1, layers=2), microbatches=4, protection=known
    )
    assert from_json(Job, to_json(job)).protection == known


@pytest.mark.parametrize("wrong", [{"cost_s": 2.0, "interval_s": 1.0}, {"cost_s": -1.0}])
def test_a_checkpoint_costs_no_more_than_its_interval(wrong: dict[str, float]) -> None:
    with pytest.raises(ContractError, match="cost_s"):
        Protection(**wrong)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ((0.0,), "prior_mtbf_s"),
        ((math.inf,), "prior_mtbf_s"),
        ((1.0, -1), "faults"),
        ((1.0, 0, math.inf), "observed_s"),
    ],
)
def test_a_rate_is_of_finite_times(wrong: tuple[Any, ...], field: str) -> None:
    with pytest.raises(ContractError) as caught:
        FaultRate(*wrong)
    assert caught.value.field == field
