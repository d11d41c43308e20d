"""Ranks that their hosts hold back, in a job that truly computes: named slow, with the cause.

The ranks share the machine with whatever else runs on it. They are in a cgroup that gets the
processors first, but caches and memory are shared, so that other ranks may really be slow for a
while, too: what is asserted of them is that they are not given the cause of the one that is held
back.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from resihp.client import Client
from resihp.contracts import Cause, ServiceError, Status, Verdict
from resihp.testing.local_ranks import LocalRanks
from service.launch import Sidecar
from tests.hooks.cgroup_folders import CgroupFolder, cgroup
from tests.hooks.computing_ranks import DATA_BYTES, RANKS, train, write_data
from tests.service.forked_sidecar import ForkedSidecar

pytestmark = pytest.mark.soak

PATIENCE_S = 240.0
HEALTHY_STEPS = 80
SLOW = 1


class Job:
    """A running job of a few ranks, with the sidecar that observes it."""

    def __init__(self, sidecar: Sidecar, ranks: LocalRanks, folder: Path) -> None:
        self.client, self.ranks, self.folder = Client(sidecar.url), ranks, folder
        self.named: set[int] = set()
        self.cgroups: dict[str, CgroupFolder] = {}
        for rank in range(RANKS):
            write_data(folder / f"data-{rank}")
        ranks.start(range(RANKS), train, sidecar.url, ranks.job, folder)

    def pid(self, rank: int) -> int:
        file = self.folder / f"pid-{rank}"
        self.until(lambda: file.exists() and file.read_text() != "")
        return int(file.read_text())

    def share_processors(self, first: CgroupFolder) -> None:
        """Give each rank a cgroup of its own inside one that gets the processors first."""
        first.write("cpu.shares", 200_000)
        for rank in range(RANKS):
            self.cgroups[f"rank-{rank}"] = first.part(f"rank-{rank}")
            self.cgroups[f"rank-{rank}"].add(self.pid(rank))

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            self.ranks.poll(0.2)
            assert not self.ranks.exit_codes, self.ranks.logs()
            assert time.monotonic() < deadline, f"{self.verdicts()}\n{self.ranks.logs()}"

    def verdicts(self) -> list[Verdict]:
        with contextlib.suppress(ServiceError):  # the job is registered after its first step
            return self.client.verdicts(self.ranks.job)
        return []

    def train_healthy(self) -> None:
        """Let the job begin and learn what is usual."""
        (self.folder / "go").touch()
        self.until(lambda: self._step() >= HEALTHY_STEPS)

    def cpu_share(self, rank: int) -> float:
        """Share of one CPU that a rank takes, over some of its steps."""
        used, since, step = self._cpu_s(rank), time.monotonic(), self._step()
        self.until(lambda: self._step() >= step + HEALTHY_STEPS)
        return (self._cpu_s(rank) - used) / (time.monotonic() - since)

    def _cpu_s(self, rank: int) -> float:
        stat = Path(f"/proc/{self.pid(rank)}/stat").read_text().rpartition(")")[2].split()
        return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")

    def _step(self) -> int:
        file = self.folder / "step"
        return int(file.read_text() or 0) if file.exists() else 0

    def is_named_with(self, words: str) -> bool:
        for verdict in self.verdicts():
            if verdict.status is Status.FAIL_SLOW:
                if verdict.rank not in self.named:
                    print(verdict)  # noqa: T201 what a person looks at after a soak
                self.named.add(verdict.rank)
                if verdict.rank == SLOW and words in " ".join(verdict.evidence):
                    return True
        return False

    def root_cause(self) -> Cause | None:
        with contextlib.suppress(ServiceError):
            return self.client.diagnosis(self.ranks.job).root_cause
        return None

    def is_the_hosts_fault(self, words: str) -> None:
        self.until(lambda: self.is_named_with(words))
        self.until(lambda: self.root_cause() is Cause.HOST)
        for verdict in self.verdicts():
            print(verdict)  # noqa: T201
            assert (words in " ".join(verdict.evidence)) == (verdict.rank == SLOW)
        print(self.client.diagnosis(self.ranks.job))  # noqa: T201
        (self.folder / "stop").touch()
        assert set(self.ranks.wait(PATIENCE_S).values()) == {0}, self.ranks.logs()
        assert "failures=0" in self.ranks.log(SLOW).read_text()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def first(stack) -> CgroupFolder:
    return stack.enter_context(cgroup("cpu", "cpu.cfs_quota_us"))


def job_of(stack: ExitStack, folder: Path, name: str, first: CgroupFolder) -> Job:
    sidecar = stack.enter_context(ForkedSidecar(folder / "sidecar"))
    job = Job(sidecar, stack.enter_context(LocalRanks(name, folder / "ranks")), folder)
    job.share_processors(first)
    return job


def test_a_rank_in_a_cgroup_with_a_quota(stack, first, tmp_path):
    job = job_of(stack, tmp_path, "throttled", first)
    job.train_healthy()
    quota = 0.5 * job.cpu_share(SLOW)
    job.cgroups[f"rank-{SLOW}"].limit_cpu(quota)
    job.is_the_hosts_fault(f"its cgroup (quota {quota:.2g} CPUs) throttled it")


def test_a_rank_beside_a_busy_loop_on_its_core(stack, first, tmp_path):
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("a core is needed beside the one that is shared")
    job = job_of(stack, tmp_path, "shared-core", first)
    for rank in range(RANKS):
        os.sched_setaffinity(job.pid(rank), {cores[int(rank == SLOW)]})
    job.train_healthy()
    for name in ("one", "other"):
        loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        stack.callback(loop.communicate)
        stack.callback(loop.kill)
        os.sched_setaffinity(loop.pid, {cores[1]})
        first.part(name).add(loop.pid)
    job.is_the_hosts_fault("its training thread waited for a CPU")


def test_a_rank_whose_memory_is_short(stack, first, tmp_path):
    memory = stack.enter_context(cgroup("memory", "memory.limit_in_bytes"))
    job = job_of(stack, tmp_path, "short-memory", first)
    memory.add(job.pid(SLOW))
    job.train_healthy()
    in_use = memory.read("memory.usage_in_bytes")
    memory.write("memory.limit_in_bytes", in_use - DATA_BYTES * 3 // 4)
    job.is_the_hosts_fault("page faults a second waited for a disk")
