"""Sensors of this machine's kernel, in processes that are really held back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.hooks.cgroup_folders import cgroup

PATIENCE_S = 120.0
Sample = dict[str, float]


class Computing:
    """A process that computes or reads, and its samples."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, str(Path(__file__).with_name("computing_process.py"))]
        self.process = subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, text=True, env={**os.environ}
        )

    def sample(self) -> Sample:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def until(self, condition: Callable[[Sample], bool]) -> Sample:
        deadline = time.monotonic() + PATIENCE_S
        while not condition(sample := self.sample()):
            assert time.monotonic() < deadline, sample
        return sample

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def ended() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def computing(ended: ExitStack, *arguments: str) -> Computing:
    made = Computing(*arguments)
    ended.callback(made.end)
    return made


def test_a_quota_shows_as_throttling_as_long_as_it_holds(ended):
    folder = ended.enter_context(cgroup("cpu", "cpu.cfs_quota_us"))
    process = computing(ended, "compute")
    assert process.sample()["cpu_throttled"] == 0.0
    folder.limit_cpu(0.05)
    folder.add(process.process.pid)
    held = process.until(lambda sample: sample["cpu_throttled"] > 0.3)
    assert held["cpu_quota"] == 0.05
    folder.write("cpu.cfs_quota_us", -1)
    process.until(lambda sample: "cpu_quota" not in sample and sample["cpu_throttled"] == 0.0)


def test_a_neighbour_on_its_core_shows_as_waiting_for_the_cpu(ended):
    core = {min(os.sched_getaffinity(0))}
    process, *neighbours = (computing(ended, "compute") for _ in range(3))
    for each in (process, *neighbours):
        os.sched_setaffinity(each.process.pid, core)
    waiting = process.until(lambda sample: sample["cpu_waiting"] > 0.3)
    assert waiting["cpu_waiting"] <= 1.0


def test_a_limit_of_its_memory_shows_as_page_faults(ended, tmp_path):
    folder = ended.enter_context(cgroup("memory", "memory.limit_in_bytes"))
    file = tmp_path / "read"
    with file.open("wb") as written:
        written.write(os.urandom(1 << 20) * 48)
        os.fsync(written.fileno())
        os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    folder.write("memory.limit_in_bytes", 24 << 20)
    process = computing(ended, "read", str(file))
    folder.add(process.process.pid)
    process.until(lambda sample: sample["major_faults"] > 100.0)
    process.until(lambda sample: sample["major_faults"] > 100.0)
    folder.write("memory.limit_in_bytes", 512 << 20)
    process.until(lambda sample: sample["major_faults"] == 0.0)
