"""Cgroups of this machine, for tests that hold a process back; version 1, as root."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

MOUNTS = Path("/sys/fs/cgroup")


class CgroupFolder:
    """A new cgroup of one controller; removed at the end, once its processes have left."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.mkdir()

    def part(self, name: str) -> CgroupFolder:
        """Make a cgroup inside this one."""
        return CgroupFolder(self.path / name)

    def write(self, name: str, value: int) -> None:
        (self.path / name).write_text(str(value))

    def read(self, name: str) -> int:
        return int((self.path / name).read_text())

    def add(self, pid: int) -> None:
        self.write("cgroup.procs", pid)

    def limit_cpu(self, share: float) -> None:
        """Limit the processes to a share of one CPU, in periods of 100 ms."""
        self.write("cpu.cfs_period_us", 100_000)
        self.write("cpu.cfs_quota_us", round(100_000 * share))

    def remove(self) -> None:
        for part in self.path.iterdir():
            if part.is_dir():
                self._remove(part)
        self._remove(self.path)

    def _remove(self, path: Path) -> None:
        top = self.path.parent / "cgroup.procs"
        deadline = time.monotonic() + 30.0
        while path.exists():
            for pid in (path / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    top.write_text(pid)
            with contextlib.suppress(OSError):
                path.rmdir()
            assert time.monotonic() < deadline, f"{path} is still in use"
            time.sleep(0.02)


@contextlib.contextmanager
def cgroup(controller: str, file: str) -> Iterator[CgroupFolder]:
    """A new cgroup whose controller has `file`; skips the test where there can be none."""
    try:
        folder = CgroupFolder(
            MOUNTS / controller / f"resihp-test-{os.getpid()}-{time.monotonic_ns()}"
        )
    except OSError as error:
        pytest.skip(f"no cgroup of {controller}, version 1, can be made here: {error}")
    try:
        if not os.access(folder.path / file, os.W_OK):
            pytest.skip(f"the cgroups of {controller} here have no {file} that can be written")
        yield folder
    finally:
        folder.remove()
