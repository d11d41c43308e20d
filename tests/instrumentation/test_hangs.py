"""Places where a rank of an instrumented job hangs."""

from __future__ import annotations

import contextlib
import signal
import time

import pytest

from resihp.client import Client
from resihp.contracts import ServiceError, Status
from resihp.testing.local_ranks import LocalRanks
from tests.instrumentation.hanging_ranks import RANKS, order, train, train_by_store_of_rank_0
from tests.service.forked_sidecar import ForkedSidecar

PATIENCE_S = 250.0
INNERMOST = {"backward": "_carry_out", "loader": "_carry_out", "collective": "all_reduce"}


def verdicts_until_late(ranks, url):
    """Verdicts on the ranks, again and again while all of them run; fails after the patience."""
    client, deadline = Client(url), time.monotonic() + PATIENCE_S
    while True:
        ranks.poll(0.2)
        assert not ranks.exit_codes, ranks.logs()
        assert time.monotonic() < deadline, ranks.logs()
        verdicts = []
        with contextlib.suppress(ServiceError):  # the job is registered after its first step
            verdicts = client.verdicts("hanging")
        yield verdicts


@pytest.mark.soak
@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("backward", "has been in backward of step"),
        ("collective", "has been waiting for other ranks in forward of step"),
        ("loader", "has been in data of step"),
    ],
)
def test_hanging_rank_is_named_with_its_place(tmp_path, where, words):
    with ForkedSidecar(tmp_path / "sidecar") as sidecar, LocalRanks("hanging", tmp_path) as ranks:
        ranks.start(range(RANKS), train, sidecar.url, tmp_path)
        looks = verdicts_until_late(ranks, sidecar.url)
        ordered, hanging = False, {}
        while not {"its stack", "flight recorder of rank 0"} <= {
            line.split(",")[0].split(":")[0] for line in hanging.get(2, ())
        }:
            verdicts = next(looks)
            if len(verdicts) == RANKS and (verdicts[2].step or 0) > 100 and not ordered:
                order(tmp_path / f"{where}-2", seconds=300)
                ordered = True
            assert not [each for each in verdicts if each.status is Status.FAIL_STOP]
            hanging = {
                each.rank: each.evidence
                for each in verdicts
                if "training thread" in " ".join(each.evidence)
            }
            assert set(hanging) <= {2}
        evidence = hanging[2]
        assert words in evidence[0]
        assert evidence[1] == "3 other ranks wait for others in backward of the same step"
        assert f"in {INNERMOST[where]}" in evidence[2]
        assert "hanging_ranks.py:" in evidence[2]
        collectives = "\n".join(evidence[3:])
        assert "flight recorder of rank 0: all_reduce number " in collectives
        assert "flight recorder of rank 2: all_reduce number " in collectives


@pytest.mark.soak
def test_an_evaluation_by_one_rank_is_no_hang(tmp_path):
    """For longer than the time-out of a data loader, from a loader of its own."""
    evaluation = tmp_path / "evaluation-0"
    with ForkedSidecar(tmp_path / "sidecar") as sidecar, LocalRanks("hanging", tmp_path) as ranks:
        ranks.start(range(RANKS), train, sidecar.url, tmp_path)
        looks = verdicts_until_late(ranks, sidecar.url)
        ordered, steps = 0, 0
        while not ordered or evaluation.exists() or steps < ordered + 100:
            verdicts = next(looks)
            assert not [each for each in verdicts if each.status is Status.FAIL_STOP]
            assert "training thread" not in str([each.evidence for each in verdicts])
            steps = verdicts[0].step or 0 if len(verdicts) == RANKS else 0
            if steps > 100 and not ordered:
                order(evaluation, seconds=45)
                ordered = steps


@pytest.mark.soak
def test_rank_that_hosts_the_store_and_stops_is_named_and_no_other(tmp_path):
    with ForkedSidecar(tmp_path / "sidecar") as sidecar, LocalRanks("hanging", tmp_path) as ranks:
        ranks.start(range(RANKS), train_by_store_of_rank_0, sidecar.url, tmp_path)
        looks = verdicts_until_late(ranks, sidecar.url)
        is_stopped, failed = False, set()
        while not failed:
            verdicts = next(looks)
            failed = {each.rank for each in verdicts if each.status is Status.FAIL_STOP}
            if len(verdicts) == RANKS and (verdicts[2].step or 0) > 100 and not is_stopped:
                ranks.kill(0, signal.SIGSTOP)
                is_stopped = True
        assert is_stopped
        assert failed == {0}
