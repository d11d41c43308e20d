"""Probes never disturb training: bounded, refused where forbidden, their trouble counted."""

from __future__ import annotations

import logging
from itertools import count

import pytest

from resihp.hooks import _probe_kernels as _probe_work
from resihp.hooks._environment import allowed_by_environment
from resihp.hooks._probes import Probes
from resihp.hooks._stats import FailureLog


def probes_of(*, allowed: bool = True) -> Probes:
    return Probes(FailureLog(), allowed=allowed, budget_ms=2.0)


def ask(probes: Probes, *kinds: str) -> None:
    """Ask rank 3."""
    requests = [{"id": f"{i}{k}", "kind": k, "rank": 3} for i, k in enumerate(kinds)]
    probes.add({"accepted": 1, "probes": requests}, 3)


@pytest.mark.parametrize("kind", ["gemm", "memory"])
def test_a_probe_is_timed_between_two_steps(monkeypatch, kind):
    seconds = count()
    monkeypatch.setattr(_probe_work, "perf_counter", lambda: 0.25 * next(seconds))
    probes = probes_of()
    ask(probes, kind)
    assert not probes.answers
    probes.run()
    (answer,) = probes.answers
    assert answer.id == f"0{kind}"
    assert answer.ms == 250.0


def test_an_order_is_taken_once_and_probes_are_spaced(monkeypatch):
    monkeypatch.setattr("resihp.hooks._probes.perf_counter", lambda: 7.0)
    probes = probes_of()
    ask(probes, "gemm", "memory")
    ask(probes, "gemm", "memory")
    assert len(probes.requests) == 2
    probes.run()
    probes.run()  # at once: too soon for another
    assert (len(probes.requests), len(probes.answers)) == (1, 1)


def test_where_probes_are_forbidden_the_sidecar_is_told():
    probes = probes_of(allowed=False)
    ask(probes, "gemm")
    assert not probes.requests
    assert probes.answers[0].ms is None
    assert "forbidden" in probes.answers[0].detail


@pytest.mark.parametrize(
    ("value", "allowed"), [("0", False), ("false", False), ("OFF", False), ("1", True), ("", True)]
)
def test_the_environment_forbids(monkeypatch, value, allowed):
    monkeypatch.setenv("RESIHP_PROBES", value)
    assert allowed_by_environment("RESIHP_PROBES") is allowed


def test_a_kind_of_probe_that_is_not_known_is_refused():
    probes = probes_of()
    ask(probes, "link")
    probes.run()
    answer = probes.answers.popleft()
    assert answer.ms is None
    assert "no link probe" in answer.detail


def test_a_probe_that_fails_is_counted_logged_once_and_answered(monkeypatch, caplog):
    def broken(budget_ms: float) -> float:
        raise MemoryError("no room")

    monkeypatch.setitem(_probe_work.TIMED, "gemm", broken)
    failures = FailureLog()
    probes = Probes(failures, allowed=True, budget_ms=2.0)
    for round_ in range(2):
        probes.add({"probes": [{"id": str(round_), "kind": "gemm", "rank": 0}]}, 0)
        probes._last_s = float("-inf")
        probes.run()
    assert failures.count == 2
    assert [answer.ms for answer in probes.answers] == [None, None]
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


@pytest.mark.parametrize(
    "answer",
    [
        None, [], {"probes": 3}, {"probes": [3, {"id": 1, "rank": 0}, {"kind": "gemm", "rank": 0}]},
        {"probes": [{"id": "another rank's", "kind": "gemm", "rank": 1}]},
    ],
)  # fmt: skip
def test_what_a_sidecar_may_answer_otherwise_is_passed_over(answer):
    probes = probes_of()
    probes.add(answer, 0)
    assert not probes.requests
    assert not probes.answers


def test_a_step_runs_what_is_asked_for_as_it_ends(make_monitor, sidecar, wait_until):
    said = []
    sidecar.answer_probe = lambda job, **answer: said.append((job, answer["probe"], answer["ms"]))
    monitor = make_monitor()
    ask(monitor._probes, "gemm")
    with monitor.step():
        pass
    wait_until(lambda: said)
    assert said[0][1] == "0gemm"
    assert said[0][2] > 0
    assert monitor.stats.failures == 0
