"""Phases of a run: which steps count, and what they took."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest
from records import RESIZE_AT, SCRIPT, STEPS, demo_record, plain_record

from resihp.contracts import from_json, to_json
from resihp.demo.findings import loss_difference, phase_spans, step_times
from resihp.demo.record import DemoRecord


def test_each_phase_holds_the_steps_that_are_wholly_in_it() -> None:
    assert phase_spans(demo_record()) == {
        "healthy": (3, 22),
        "slow": (23, 29),
        "resized": (30, 52),
        "after_loss": (53, 72),
    }


def test_step_times_are_medians_over_the_phases() -> None:
    record = demo_record()
    times = step_times(record)
    slow = [seen.step_ms for seen in record.steps if SCRIPT["slow_at"] < seen.step < RESIZE_AT]
    assert times["slow"] == median(slow)
    assert times["healthy"] is not None
    assert times["healthy"] < times["resized"] < times["after_loss"] < times["slow"]


def test_a_run_without_faults_is_healthy_throughout() -> None:
    record = demo_record(script=dict.fromkeys(SCRIPT, -1.0), switches=())
    assert phase_spans(record) == {"healthy": (3, STEPS)}
    assert step_times(record)["slow"] is None


def test_a_fault_that_was_left_out_has_no_step() -> None:
    script = {**SCRIPT, "slow_rank": -1, "dead_rank": -1}
    record = demo_record(script=script, switches=())
    assert phase_spans(record) == {"healthy": (3, STEPS)}


def test_a_slow_rank_that_no_plan_answers_stays_slow_until_the_death() -> None:
    record = demo_record()
    record = replace(record, switches=record.switches[1:])
    assert phase_spans(record)["slow"] == (23, 52)
    assert "resized" not in phase_spans(record)


def test_a_run_without_steps_has_no_times() -> None:
    assert set(step_times(plain_record()).values()) == {None}
    assert loss_difference(plain_record()) is None


def test_the_loss_is_compared_step_by_step() -> None:
    record = demo_record()
    shifted = tuple(
        loss + (0.25 if step == 40 else 0.0) for step, loss in enumerate(record.reference)
    )
    difference = loss_difference(replace(record, reference=shifted))
    assert difference is not None
    assert difference.at_step == 40
    assert difference.largest == pytest.approx(0.25, abs=1e-3)


def test_the_record_survives_json() -> None:
    record = demo_record()
    assert from_json(DemoRecord, to_json(record)) == record
