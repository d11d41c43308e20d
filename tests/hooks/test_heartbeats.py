"""Dead, stopped and hanging ranks and a pause, in a job with hooks only."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from resihp.client import Client
from resihp.contracts import Status, Verdict
from resihp.testing.local_ranks import LocalRanks
from tests.hooks.ddp_ranks import JOB, RANKS, order, train
from tests.service.forked_sidecar import ForkedSidecar

PATIENCE_S = 100.0


@dataclass
class Watched:
    """A job and all verdicts that were seen of it."""

    client: Client
    ranks: LocalRanks
    seen: list[Verdict] = field(default_factory=list)

    def verdicts(self) -> dict[int, Verdict]:
        self.ranks.poll(0.1)
        found = self.client.verdicts("ddp")
        self.seen += found
        return {verdict.rank: verdict for verdict in found}

    def until(self, condition) -> dict[int, Verdict]:
        deadline = time.monotonic() + PATIENCE_S
        while not condition(verdicts := self.verdicts()):
            assert time.monotonic() < deadline, f"{verdicts}\n{self.stacks()}"
        return verdicts

    def stacks(self) -> str:
        """The logs, with the stacks of the ranks that have not ended."""
        for rank in self.ranks.poll(0.0):
            self.ranks.kill(rank, signal.SIGUSR1)
        time.sleep(1.0)
        return self.ranks.logs()

    def dead(self) -> set[int]:
        return {v.rank for v in self.seen if v.status is Status.FAIL_STOP}

    def hanging(self) -> set[int]:
        return {v.rank for v in self.seen if "training thread" in " ".join(v.evidence)}


@pytest.fixture
def watched(tmp_path) -> Iterator[Watched]:
    with (
        ForkedSidecar(tmp_path / "sidecar") as sidecar,
        LocalRanks("ddp", tmp_path / "ranks") as ranks,
    ):
        client = Client(sidecar.url)
        client.register(JOB)
        ranks.start(range(RANKS), train, sidecar.url, tmp_path)
        watched = Watched(client, ranks)
        watched.until(lambda verdicts: len(verdicts) == RANKS and verdicts[0].step)
        yield watched
        client.close()


def pause_is_no_alarm(watched: Watched, folder: Path, seconds: float) -> None:
    evaluation = order(folder, 1, "pause", seconds)
    watched.until(lambda verdicts: not evaluation.exists())
    assert not watched.dead()
    assert not watched.hanging()


def stopped_rank_is_dead_and_comes_back(watched: Watched) -> None:
    watched.ranks.kill(2, signal.SIGSTOP)
    verdicts = watched.until(lambda verdicts: verdicts[2].status is Status.FAIL_STOP)
    assert "its heartbeats have stopped" in verdicts[2].evidence
    watched.ranks.kill(2, signal.SIGCONT)
    watched.until(lambda verdicts: verdicts[2].status is not Status.FAIL_STOP)
    assert watched.dead() == {2}


def killed_rank_is_dead_and_its_survivors_are_not(watched: Watched) -> None:
    watched.ranks.kill(3)
    watched.until(lambda verdicts: verdicts[3].status is Status.FAIL_STOP)
    watched.until(lambda verdicts: len(watched.ranks.exit_codes) == RANKS)  # gloo ends the others
    for _ in range(20):
        watched.verdicts()
    assert watched.dead() == {2, 3}


@pytest.mark.timeout(400)
def test_death_and_stop_are_told_from_a_pause(watched, tmp_path):
    pause_is_no_alarm(watched, tmp_path, 7.0)
    stopped_rank_is_dead_and_comes_back(watched)
    killed_rank_is_dead_and_its_survivors_are_not(watched)


@pytest.mark.soak
def test_death_stop_and_hang_are_told_from_a_pause_of_20_s(watched, tmp_path):
    pause_is_no_alarm(watched, tmp_path, 20.0)
    hang = order(tmp_path, 1, "hang", 40.0)
    verdicts = watched.until(lambda verdicts: watched.hanging())
    assert hang.exists()
    assert verdicts[1].status is Status.SUSPECT
    assert "has been in backward of step" in verdicts[1].evidence[0]
    assert "microbatch 0" in verdicts[1].evidence[0]
    assert "its process is alive" in verdicts[1].evidence[0]
    watched.until(lambda verdicts: not hang.exists())
    watched.until(lambda verdicts: "training thread" not in " ".join(verdicts[1].evidence))
    assert not watched.dead()
    assert watched.hanging() == {1}
    stopped_rank_is_dead_and_comes_back(watched)
    killed_rank_is_dead_and_its_survivors_are_not(watched)


@pytest.mark.soak
def test_ranks_that_end_are_not_dead(watched, tmp_path):
    for rank in range(RANKS):
        order(tmp_path, rank, "stop")
    watched.until(lambda verdicts: len(watched.ranks.exit_codes) == RANKS)
    assert set(watched.ranks.exit_codes.values()) == {0}, watched.ranks.logs()
    for _ in range(100):
        watched.verdicts()
    assert not watched.dead()
