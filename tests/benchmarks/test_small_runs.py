"""Benchmarks that look inside the product, at their smallest: they break when it changes."""

from __future__ import annotations

from benchmarks import elastic_cost, liveness, worker_cost


def test_cost_of_a_worker() -> None:
    seen = worker_cost.measure(16, 2)
    assert {column for column, value in seen.items() if value < 0.0} == set()
    assert seen["saved_kb"] > 0.0


def test_cost_of_being_elastic() -> None:
    seen = elastic_cost.measure(elastic_cost.SKIPPED + 2)
    assert len(seen["elastic"]) == len(seen["bare"]) == 2


def test_delays_of_losses() -> None:
    rows = liveness._delays(16, seeds=1)
    assert len(rows) == len(liveness._losses(16))
    assert all(row["of_timeout"] > 1.0 for row in rows)
