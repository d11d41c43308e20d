"""Publication of a folder that several ranks write, whatever fails at whichever moment."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from resihp.checkpoint import (
    Checkpointer,
    IndependentRank,
    LocalDisk,
    ShardedTensorPiece,
    SharedStorage,
)
from resihp.checkpoint.format.index import FileIndex
from resihp.checkpoint.format.metadata import data_name, index_name
from resihp.checkpoint.levels import Level, checkpoint_folder
from resihp.checkpoint.restore import restore
from tests.checkpoint.helpers import assert_stamped, back_from, load_by_torch, stamped


def save(saver: Checkpointer, step: int) -> None:
    saver.save(step, stamped(step))
    assert saver.wait(300)
    saver.fence()


@pytest.mark.parametrize("name", ["lineage.json", ".metadata"])
def test_a_publication_that_fails_leaves_nothing_behind(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = checkpoint_folder.write_whole, [2]

    def write_whole(path: Path, content: bytes) -> None:
        if path.name == name and "step-000000001" not in str(path) and left[0]:
            left[0] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, content)

    monkeypatch.setattr(checkpoint_folder, "write_whole", write_whole)
    with Checkpointer([LocalDisk(tmp_path)]) as saver:
        for step in range(1, 4):
            save(saver, step)
        assert saver.counters.levels[str(tmp_path)].failed == 2
        assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"]
        save(saver, 4)
    restored, into = back_from(LocalDisk(tmp_path))
    assert restored.step == 4
    assert_stamped(into, 4)


def test_a_step_that_is_saved_again_is_there_at_any_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, disk, found = os.rename, LocalDisk(tmp_path / "disk"), []
    names = tmp_path / "one", tmp_path / "other"
    for name in names:
        name.touch()
    if not checkpoint_folder._exchange(*names):
        pytest.skip("this file system cannot exchange two names")

    def rename(one: Path, other: Path) -> None:
        found.append(disk.steps())
        real(one, other)

    with Checkpointer([disk]) as saver:
        save(saver, 1)
        monkeypatch.setattr(os, "rename", rename)
        save(saver, 1)
    assert found == [[1]] * len(found)
    assert found
    assert [path.name for path in disk.folder.iterdir()] == ["step-000000001"]


def test_where_names_cannot_be_exchanged_a_failure_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left, disk = os.rename, [1], LocalDisk(tmp_path)

    def rename(one: Path, other: Path) -> None:
        if one.name.endswith(".ready.part") and left:
            raise OSError(left.pop(), "not now")
        real(one, other)

    monkeypatch.setattr(checkpoint_folder, "_exchange", lambda *_: False)
    with Checkpointer([disk]) as saver:
        save(saver, 1)
        before = disk.checkpoints()
        monkeypatch.setattr(os, "rename", rename)
        save(saver, 1)
        assert saver.counters.levels[disk.name].failed == 1
        assert disk.checkpoints() == before
        save(saver, 1)
        assert disk.checkpoints() != before
    assert_stamped(back_from(disk)[1], 1)


def test_what_a_killed_rank_was_publishing_is_deleted_later(tmp_path: Path) -> None:
    """Another rank may be publishing a checkpoint of the layout before: it is left in peace."""
    for step, layout in ((1, "job.1"), (2, "job.2"), (9, "job.2")):
        (tmp_path / f".step-{step:09d}.{layout}.ready.part").mkdir()
        (tmp_path / f".step-{step:09d}.{layout}.ready.part" / "file").write_text("content")
    publishing = os.open(tmp_path / ".step-000000001.job.1.ready.part", os.O_RDONLY)
    fcntl.flock(publishing, fcntl.LOCK_EX)
    with Checkpointer([LocalDisk(tmp_path)], ranks=IndependentRank(run="job.2")) as saver:
        save(saver, 3)
        assert {path.name for path in tmp_path.glob(".*.part")} == {
            ".step-000000001.job.1.ready.part",
            ".step-000000009.job.2.ready.part",
        }
        os.close(publishing)
        save(saver, 4)
    assert {path.name for path in tmp_path.glob(".*.part")} == {".step-000000009.job.2.ready.part"}


def test_what_another_job_is_publishing_is_not_swept(tmp_path: Path) -> None:
    """The next job that finds it unlocked deletes it."""
    ready = tmp_path / ".step-000000001.other.ready.part"
    ready.mkdir()
    (ready / "file").write_text("content")
    publishing = os.open(ready, os.O_RDONLY)
    fcntl.flock(publishing, fcntl.LOCK_EX)
    with Checkpointer([LocalDisk(tmp_path)]) as saver:
        save(saver, 2)
    assert (ready / "file").exists()
    os.close(publishing)
    with Checkpointer([LocalDisk(tmp_path)]) as saver:
        save(saver, 3)
    assert not ready.exists()


def test_a_rank_whose_folder_another_one_publishes_at_once_has_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 publishes while rank 0 has its index in place and has not yet synced the folder."""
    real, is_written, is_published = checkpoint_folder.write_whole, Event(), Event()

    def write_whole(path: Path, content: bytes) -> None:
        real(path, content)
        if path.name == "__0.index.json":
            is_written.set()
            assert is_published.wait(300)

    monkeypatch.setattr(checkpoint_folder, "write_whole", write_whole)
    savers = [
        Checkpointer([LocalDisk(tmp_path)], ranks=IndependentRank(rank, (0, 1), "run"))
        for rank in (0, 1)
    ]
    try:
        for rank, saver in enumerate(savers):
            row = ShardedTensorPiece("w", (2, 1000), (rank, 0), torch.full((1, 1000), 7.0))
            saver.save(1, [row])
            saver.fence()
            assert rank or is_written.wait(300)
        assert savers[1].wait(300)
        is_published.set()
        assert savers[0].wait(300)
    finally:
        is_published.set()
        for saver in savers:
            saver.close(300)
    for saver in savers:
        counters = saver.counters.levels[str(tmp_path)]
        assert (counters.saved, counters.failed) == (1, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"]


def save_rows(level: Level, ranks: Sequence[int], count: int, run: str, value: float) -> None:
    """Some of `count` ranks save step 1, one after the other."""
    for rank in ranks:
        rows = torch.full((12 // count, 1000), value)
        row = ShardedTensorPiece("w", (12, 1000), (rank * len(rows), 0), rows)
        with Checkpointer([level], ranks=IndependentRank(rank, range(count), run)) as saver:
            saver.save(1, [row])
        assert not saver.counters.levels[level.name].failed


def save_row(disk: LocalDisk, rank: int, run: str) -> int:
    """One of two ranks saves step 1; returns the number of its failed saves."""
    row = ShardedTensorPiece("w", (2, 1000), (rank, 0), torch.full((1, 1000), 7.0))
    with Checkpointer([disk], ranks=IndependentRank(rank, (0, 1), run)) as saver:
        saver.save(1, [row])
    return saver.counters.levels[disk.name].failed


def test_a_rank_that_fails_after_its_index_is_there_takes_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_index(part: Path, index: FileIndex) -> None:
        real(part, index)
        if index.rank == 0:
            raise OSError(errno.EIO, "Input/output error")

    real, disk = checkpoint_folder.write_index, LocalDisk(tmp_path)
    monkeypatch.setattr(checkpoint_folder, "write_index", write_index)
    assert [save_row(disk, rank, "run") for rank in (0, 1)] == [1, 0]
    assert disk.steps() == []
    assert {path.name for path in tmp_path.glob(".step-*/*")} == {data_name(1), index_name(1)}
    monkeypatch.undo()
    assert save_row(disk, 0, "run") == 0
    assert disk.steps() == [1]


@pytest.mark.parametrize("length", [None, 0, 4096])
def test_a_folder_without_the_whole_file_of_a_rank_is_not_published(
    tmp_path: Path, length: int | None
) -> None:
    disk = LocalDisk(tmp_path)
    assert save_row(disk, 0, "run") == 0
    (file,) = tmp_path.glob(f".step-*/{data_name(0)}")
    file.unlink()
    if length is not None:
        file.write_bytes(bytes(length))
    assert save_row(disk, 1, "run") == 1
    assert disk.steps() == []


@pytest.mark.parametrize("uploaded", [(3,), (0, 1, 2, 3)])
def test_fewer_ranks_upload_the_step_of_a_run_that_died(
    uploaded: tuple[int, ...], tmp_path: Path
) -> None:
    shared, into = SharedStorage(f"file://{tmp_path}"), {"w": torch.zeros(12, 1000)}
    save_rows(shared, uploaded, 4, "one", 1.0)
    save_rows(shared, (0, 1), 2, "27/11", 2.0)
    restore([shared], into, IndependentRank())
    assert torch.equal(into["w"], torch.full_like(into["w"], 2.0))
    load_by_torch(tmp_path / "step-000000001", into)
    assert torch.equal(into["w"], torch.full_like(into["w"], 2.0))


def test_a_folder_without_runs_in_its_names_is_read_without_the_indexes_of_another_run(
    tmp_path: Path,
) -> None:
    """`LocalDisk` writes such names, and `SharedStorage` has written them."""
    into = {"w": torch.zeros(12, 1000)}
    save_rows(LocalDisk(tmp_path / "old"), range(4), 4, "one", 1.0)
    save_rows(LocalDisk(tmp_path / "new"), range(2), 2, "two", 2.0)
    stale = tmp_path / "old" / "step-000000001" / "__3.index.json"
    stale.rename(tmp_path / "new" / "step-000000001" / stale.name)
    restore([SharedStorage(f"file://{tmp_path}/new")], into, IndependentRank())
    assert torch.equal(into["w"], torch.full_like(into["w"], 2.0))


@pytest.mark.parametrize(
    ("refused", "ours"),
    [(".distcp", 1), (".index.json", 1), ("lineage.json", 1), (".metadata", 2)],
)
def test_an_upload_of_the_same_step_leaves_one_complete_wherever_it_ends(
    refused: str, ours: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours may be the new one already while torch reads the former; both are complete."""
    shared, real = SharedStorage(f"file://{tmp_path}"), LocalFileSystem._open

    def refusing(self: LocalFileSystem, path: str, mode: str, **options: Any) -> Any:
        if "w" in mode and path.removesuffix(".part").endswith(refused):
            raise OSError(errno.EIO, "unreachable")
        return real(self, path, mode, **options)

    def save_again(value: int, failed: int) -> None:
        with Checkpointer([shared]) as saver:
            saver.save(1, stamped(value))
        assert saver.counters.levels[shared.name].failed == failed

    def assert_found(ours: int, torchs: int) -> None:
        assert_stamped(back_from(shared)[1], ours)
        into = stamped(-1)
        load_by_torch(tmp_path / "step-000000001", into)
        assert_stamped(into, torchs)

    save_again(1, failed=0)
    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "_open", refusing)
        save_again(2, failed=1)
    assert_found(ours, torchs=1)
    save_again(3, failed=0)
    assert_found(3, torchs=3)
