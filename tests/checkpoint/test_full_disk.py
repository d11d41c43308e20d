"""A disk with room for fewer checkpoints than it is to keep."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fsspec.implementations.local import LocalFileOpener

from resihp.checkpoint import Checkpointer, IndependentRank, LocalDisk, SharedStorage
from resihp.checkpoint.levels import Level
from resihp.checkpoint.restore import restore

NBYTES = 3 << 20


def state_of(step: int) -> dict[str, torch.Tensor]:
    """About 3 MiB, every element of which is the step."""
    return {"w": torch.full((NBYTES // 4,), float(step))}


def occupied(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


class SmallDisk:
    """Makes writes below a folder fail once its files would occupy more than `room` bytes."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.room = folder, 1 << 40
        real_write, real_free = os.pwritev, os.statvfs

        def pwritev(fd: int, parts: list[memoryview], at: int) -> int:
            new = at + sum(map(len, parts)) - os.fstat(fd).st_blocks * 512
            if new > 0 and occupied(folder) + new > self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real_write(fd, parts, at)

        class Free:
            def __init__(self, nbytes: int) -> None:
                self.f_bavail, self.f_frsize = nbytes, 1

        def statvfs(path: Path) -> object:
            real = real_free(path)
            if not Path(path).is_relative_to(folder):
                return real
            return Free(max(0, self.room - occupied(folder)))

        monkeypatch.setattr(os, "pwritev", pwritev)
        monkeypatch.setattr(os, "statvfs", statvfs)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SmallDisk:
    folder = tmp_path / "disk"
    folder.mkdir()
    return SmallDisk(folder, monkeypatch)


def train(saver: Checkpointer, steps: range) -> None:
    for step in steps:
        saver.save(step, state_of(step))
        assert saver.wait(300)
        saver.fence()


def newest(disk: Level) -> int:
    """The newest step, after a restore that verifies every byte of it."""
    into = state_of(-1)
    restored = restore([disk], into, IndependentRank())
    assert torch.equal(into["w"], state_of(restored.step)["w"])
    return restored.step


def test_a_disk_without_room_for_one_more_replaces_the_oldest(
    small: SmallDisk, caplog: pytest.LogCaptureFixture
) -> None:
    small.room, disk = int(2.5 * NBYTES), LocalDisk(small.folder, keep=2)
    with caplog.at_level(logging.WARNING), Checkpointer([disk]) as saver:
        counters = saver.counters.levels[disk.name]
        train(saver, range(2))
        for step in range(2, 12):
            train(saver, range(step, step + 1))
            assert newest(disk) >= step - 1
        assert counters.failed == 1, "the first time the disk was full"
        assert disk.steps() == [10, 11]
    (full, works) = [r.getMessage() for r in caplog.records if r.name == "resihp.checkpoint"]
    assert "step 2 not saved" in full
    assert "newest there: step 1" in full
    assert "works again" in works


def test_more_are_kept_again_once_there_is_room(small: SmallDisk) -> None:
    small.room, disk = int(2.5 * NBYTES), LocalDisk(small.folder, keep=3)
    with Checkpointer([disk]) as saver:
        train(saver, range(6))
        assert disk.steps() == [4, 5]
        small.room = 10 * NBYTES
        train(saver, range(6, 9))
        assert disk.steps() == [6, 7, 8]


def test_the_only_whole_checkpoint_stays(
    small: SmallDisk, caplog: pytest.LogCaptureFixture
) -> None:
    small.room, disk = int(1.5 * NBYTES), LocalDisk(small.folder, keep=2)
    with Checkpointer([disk]) as saver:
        train(saver, range(6))
        assert saver.counters.levels[disk.name].failed == 5
        assert newest(disk) == 0
    assert "newest there: step 0" in caplog.text


def test_a_restarted_job_finds_room_and_names_the_newest_of_the_former_run(
    small: SmallDisk, caplog: pytest.LogCaptureFixture
) -> None:
    disk = LocalDisk(small.folder, keep=2)
    with Checkpointer([disk]) as saver:
        train(saver, range(2))
    small.room = int(2.5 * NBYTES)
    disk = LocalDisk(small.folder, keep=2)
    with Checkpointer([disk]) as saver:
        into = state_of(-1)
        assert saver.restore(into).step == 1
        train(saver, range(2, 4))
    assert newest(disk) == 3
    assert "newest there: step 1" in caplog.text


def test_a_full_disk_whose_folder_is_deleted_is_written_again(small: SmallDisk) -> None:
    disk = LocalDisk(small.folder / "run", keep=3)
    with Checkpointer([disk]) as saver:
        train(saver, range(2))
        small.room = int(2.5 * NBYTES)
        train(saver, range(2, 3))
        shutil.rmtree(disk.folder)  # somebody makes room
        train(saver, range(3, 5))
        assert saver.counters.levels[disk.name].failed == 1, "when the disk was full"
    assert disk.steps() == [3, 4]


TMPFS_JOB = """
import sys, torch
from pathlib import Path
from resihp.checkpoint import Checkpointer, LocalDisk
saver = Checkpointer([LocalDisk(Path(sys.argv[1]), keep=2)])
state = {"w": torch.zeros(int(sys.argv[2]) // 4)}
try:
    first = saver.restore(state).step + 1
except Exception:
    first = 0
for step in range(first, 10_000):
    state["w"].fill_(step)
    saver.save(step, state)
    saver.wait()
    saver.fence()
"""


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "tmpfs"
    folder.mkdir()
    size = int(2.5 * NBYTES)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_kills_on_a_full_disk_leave_a_whole_checkpoint(tmpfs: Path) -> None:
    disk, last = LocalDisk(tmpfs), -1
    for kill in range(3):
        job = subprocess.Popen([sys.executable, "-c", TMPFS_JOB, tmpfs, str(NBYTES)])
        deadline = time.monotonic() + 300
        while max(disk.steps(), default=-1) < last + 3 and time.monotonic() < deadline:
            time.sleep(0.01 * (kill + 1))
        job.kill()
        job.wait()
        assert newest(disk) > last + 1, "saves go on"
        last = newest(disk)


@pytest.mark.parametrize("failing", ["distcp", "index.json", "lineage.json", "metadata"])
def test_an_upload_that_finds_no_space_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Local files are cut off where the space ends."""
    shared, opened = SharedStorage(f"file://{tmp_path}", keep=2), LocalFileOpener.write

    def write(file: LocalFileOpener, content: bytes) -> int:
        if "step-000000001" in file.path and failing in file.path:
            opened(file, bytes(content)[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(file, content)

    monkeypatch.setattr(LocalFileOpener, "write", write)
    with Checkpointer([shared]) as saver:
        train(saver, range(2))
        assert saver.counters.levels[shared.name].failed == 1
        assert shared.steps() == [0]
        assert {path.name for path in tmp_path.glob("step-000000001/*")} <= {"lineage.json"}
        train(saver, range(2, 3))
    assert shared.steps() == [0, 2]
    assert newest(shared) == 2


def test_a_step_that_cannot_be_replaced_for_want_of_space_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, opened = SharedStorage(f"file://{tmp_path}"), LocalFileOpener.write
    with Checkpointer([shared]) as saver:
        train(saver, range(1))

    def write(file: LocalFileOpener, content: bytes) -> int:
        if "metadata" in file.path:
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(file, content)

    monkeypatch.setattr(LocalFileOpener, "write", write)
    with Checkpointer([shared]) as saver:
        train(saver, range(1))
        assert saver.counters.levels[shared.name].failed == 1
    assert newest(shared) == 0
