"""A slow, full, read-only or vanishing level costs checkpoints there and nothing else."""

from __future__ import annotations

import errno
import logging
import os
import resource
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.two_tensor import TwoTensor

from resihp.checkpoint import (
    Checkpointer,
    Every,
    EveryStep,
    HostMemory,
    IndependentRank,
    LeastLoss,
    LocalDisk,
    NodeMemory,
    PeerMemory,
    ShardedTensorPiece,
    SharedStorage,
)
from resihp.checkpoint.levels import Level
from resihp.checkpoint.levels.direct_file import DirectFile
from resihp.checkpoint.staging.in_flight import InFlightCheckpoint
from resihp.contracts import CheckpointError, ContractError
from tests.checkpoint.helpers import assert_stamped, back_from, room_for, stamp, stamped


def train(saver: Checkpointer, steps: range) -> None:
    """Steps that wait for storage, so that which checkpoints exist does not depend on timing."""
    state = stamped(-1)
    for step in steps:
        saver.fence()
        stamp(state, step)
        saver.save(step, state)
        assert saver.wait(300)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "resihp.checkpoint"]


def test_each_level_keeps_as_many_as_told(tmp_path: Path) -> None:
    shared = SharedStorage(f"file://{tmp_path}/shared", keep=3)
    memory, disk = HostMemory(keep=2), LocalDisk(tmp_path / "disk", keep=1)
    with Checkpointer([memory, disk, shared], Every(2)) as saver:
        train(saver, range(12))
        assert memory.steps() == [8, 10]
        assert disk.steps() == [10]
        assert shared.steps() == [6, 8, 10]
        for level in (memory, disk, shared):
            restored, into = back_from(level)
            assert (restored.step, restored.level) == (10, level.name)
            assert_stamped(into, 10)


def test_what_others_left_in_the_folder_is_in_nobodys_way(tmp_path: Path) -> None:
    for name in ("step-000000002", ".step-000000001.retired", "step-000000099", "notes"):
        (tmp_path / name).write_text("a file")
    for name in ("step-abc", "step-000000007.tmp", "step-000000003"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").write_text("data")
    (tmp_path / "step-000000004").symlink_to(tmp_path / "nowhere")
    disk = LocalDisk(tmp_path, keep=2)
    with Checkpointer([disk]) as saver:
        train(saver, range(6))
        assert not saver.counters.levels[disk.name].failed
    assert disk.steps() == [4, 5]
    for name in ("step-abc/data", "step-000000007.tmp/data", "step-000000099", "notes"):
        assert (tmp_path / name).exists()


def test_a_relative_folder_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    disk, shared = LocalDisk("disk"), SharedStorage("shared")
    with Checkpointer([disk, shared]) as saver:
        train(saver, range(1))
        monkeypatch.chdir("elsewhere")
        train(saver, range(1, 3))
    assert disk.name == "disk"
    assert disk.steps() == LocalDisk(tmp_path / "disk").steps() == [1, 2]
    assert shared.steps() == [1, 2]
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_torchs_own_writer_goes_by_its_number(tmp_path: Path) -> None:
    disk, shared = LocalDisk(tmp_path / "d"), SharedStorage(f"file://{tmp_path}/s")
    for folder in ("d", "s"):
        for step in (1, 4):
            name = f"step-{step:09d}"
            dcp.save(stamped(step), checkpoint_id=tmp_path / folder / name, no_dist=True)
    with Checkpointer([disk, shared]) as saver:
        train(saver, range(4))
        assert disk.steps() == shared.steps() == [2, 3, 4]
        train(saver, range(5, 8))
    assert disk.steps() == shared.steps() == [6, 7]


def test_a_retired_file_is_written_anew_unless_somebody_reads_it(tmp_path: Path) -> None:
    name, disk = "__0_0.distcp", LocalDisk(tmp_path, keep=1)
    with Checkpointer([disk]) as saver:
        train(saver, range(1))
        file = tmp_path / "step-000000000" / name
        inode = file.stat().st_ino
        train(saver, range(1, 3))
        assert (tmp_path / "step-000000002" / name).stat().st_ino == inode
        with open(tmp_path / "step-000000002" / name, "rb") as reader:
            before = reader.read()
            train(saver, range(3, 7))
            reader.seek(0)
            assert reader.read() == before


def link_all(step: Path, kept: Path) -> None:
    shutil.copytree(step, kept, copy_function=os.link)


def move_files(step: Path, kept: Path) -> None:
    kept.mkdir()
    for file in step.iterdir():
        os.rename(file, kept / file.name)
        file.symlink_to(kept / file.name)


def move_folder(step: Path, kept: Path) -> None:
    os.rename(step, kept)
    step.symlink_to(kept)


@pytest.mark.parametrize("keep_step", [link_all, move_files, move_folder])
def test_what_the_user_kept_of_a_retired_checkpoint_stays(
    tmp_path: Path, keep_step: Callable[[Path, Path], None]
) -> None:
    disk, kept = LocalDisk(tmp_path / "run", keep=1), tmp_path / "kept"
    with Checkpointer([disk]) as saver:
        train(saver, range(1))
        keep_step(tmp_path / "run" / "step-000000000", kept)
        before = {path.name: path.read_bytes() for path in kept.iterdir()}
        train(saver, range(1, 5))
        assert not saver.counters.failures
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == before
    assert_stamped(back_from(disk)[1], 4)


def test_a_retired_file_that_cannot_be_opened_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one without write permission, for users other than root."""
    disk, opened = LocalDisk(tmp_path, keep=1), os.open
    refused: list[int] = []

    def refuse(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        fd = opened(path, flags, *arguments, **options)
        if flags & os.O_RDWR and os.fstat(fd).st_ino in refused:
            os.close(fd)
            raise PermissionError(errno.EACCES, "not yours", path)
        return fd

    monkeypatch.setattr(os, "open", refuse)
    with Checkpointer([disk]) as saver:
        train(saver, range(1))
        file = tmp_path / "step-000000000" / "__0_0.distcp"
        refused.append(file.stat().st_ino)
        held = opened(file, os.O_RDONLY)  # or the new file may get the number
        train(saver, range(1, 3))
        os.close(held)
        assert not saver.counters.levels[disk.name].failed
    assert_stamped(back_from(disk)[1], 2)


def test_shared_storage_of_any_kind(tmp_path: Path) -> None:
    shared = SharedStorage("memory://bucket/run")
    try:
        with Checkpointer([LocalDisk(tmp_path), shared]) as saver:
            train(saver, range(3))
        restored, into = back_from(shared)
        assert restored.step == 2
        assert_stamped(into, 2)
    finally:
        fsspec.filesystem("memory").rm("/bucket", recursive=True)


@pytest.mark.parametrize("scheme", ["memory://", "file://"])
def test_a_url_with_wildcards_is_a_name(tmp_path: Path, scheme: str) -> None:
    state, root = stamped(0), f"{scheme}{tmp_path}"
    levels = [SharedStorage(f"{root}/{name}", keep=1) for name in ("run1", "run[12]", "run?")]
    try:
        for level in levels:
            with Checkpointer([level]) as saver:
                for step in range(3):
                    saver.save(step, state)
                    assert saver.wait(300)
        for level in levels:
            assert level.steps() == [2]
            assert level._names(level._root) == {"step-000000002"}
    finally:
        fsspec.filesystem("memory").store.clear()


def test_two_disks_before_shared_storage_leave_no_file_open(tmp_path: Path) -> None:
    disks = [LocalDisk(tmp_path / name, keep=1) for name in ("memory", "disk")]
    shared = SharedStorage(f"file://{tmp_path}/shared", keep=1)
    with Checkpointer([*disks, shared]) as saver:
        train(saver, range(4))
        assert all(level.saved == 4 for level in saver.counters.levels.values())
        held = [os.readlink(fd.path) for fd in os.scandir("/proc/self/fd") if fd.is_symlink()]
        assert not [path for path in held if path.startswith(str(tmp_path))]
    assert_stamped(back_from(shared)[1], 3)


def test_a_disk_that_hangs_delays_nobody_else(tmp_path: Path) -> None:
    going, entered = threading.Event(), threading.Event()

    class Hanging(LocalDisk):
        def put(self, checkpoint: InFlightCheckpoint) -> None:
            entered.set()
            assert going.wait(300)
            super().put(checkpoint)

    state, disk, memory = stamped(0), Hanging(tmp_path), HostMemory()
    saver = Checkpointer([memory, disk], host_cache_bytes=room_for(3))
    for step in range(20):
        saver.fence()
        stamp(state, step)
        saver.save(step, state)
        assert entered.wait(300)
    assert saver.counters.no_buffer
    assert next(one for one in saver._pipeline._first if one.level is memory).wait(300)
    assert saver.counters.levels[memory.name].saved >= 1
    going.set()
    saver.close()
    assert not saver.counters.failures
    restored, into = back_from(disk)
    assert_stamped(into, restored.step)


def test_a_disk_that_cannot_be_written_leaves_shared_storage_its_checkpoints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    disk, shared = LocalDisk(tmp_path / "file" / "run"), SharedStorage(f"file://{tmp_path}/shared")
    with Checkpointer([disk, shared]) as saver:
        train(saver, range(4))
        assert saver.counters.levels[disk.name].failed == 4
        assert saver.counters.levels[shared.name].saved == 4
    assert_stamped(back_from(shared)[1], 3)
    assert len([line for line in said(caplog) if "NotADirectoryError" in line]) == 1


def test_shared_storage_that_vanishes_is_said_once_and_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, away = tmp_path / "shared", tmp_path / "away"
    disk, shared = LocalDisk(tmp_path / "disk"), SharedStorage(f"file://{root}")
    with caplog.at_level(logging.WARNING), Checkpointer([disk, shared]) as saver:
        train(saver, range(2))
        os.rename(root, away)
        root.write_text("no folder any more")
        train(saver, range(2, 5))
        assert saver.counters.levels[shared.name].failed == 3
        restored, into = back_from(shared, disk)
        assert (restored.step, restored.level) == (4, disk.name)
        assert_stamped(into, 4)
        root.unlink()
        os.rename(away, root)
        train(saver, range(5, 6))
    assert back_from(shared)[0].step == 5
    about = [line for line in said(caplog) if line.startswith(shared.name)]
    assert len(about) == 2
    assert about[1].endswith("works again")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "resihp-test", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_keeps_the_checkpoint_before_whole(small_disk: Path) -> None:
    disk = LocalDisk(small_disk, keep=1)
    with Checkpointer([disk]) as saver:
        train(saver, range(1))
        (small_disk / "others").write_bytes(bytes(16 << 20))
        train(saver, range(1, 3))
        assert saver.counters.levels[disk.name].failed == 2
        restored, into = back_from(disk)
        assert restored.step == 0
        assert_stamped(into, 0)
        (small_disk / "others").unlink()
        train(saver, range(3, 5))
        assert disk.steps() == [4]
        assert_stamped(back_from(disk)[1], 4)


def test_a_limit_on_the_size_of_files_is_an_error_like_any_other(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    disk = LocalDisk(tmp_path)
    with Checkpointer([disk]) as saver:
        train(saver, range(1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (5 << 20, limits[1]))
        try:
            train(saver, range(1, 3))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert saver.counters.levels[disk.name].failed == 2
        assert_stamped(back_from(disk)[1], 0)
        assert not list(tmp_path.glob("*.part")), "what is unfinished gives its room back"


def test_a_folder_that_turns_read_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = LocalDisk(tmp_path)
    with Checkpointer([disk]) as saver:
        train(saver, range(2))
        os.chmod(tmp_path, 0o500)
        lock = ["chattr", "+i", str(tmp_path)]
        if not os.geteuid() and subprocess.run(lock, capture_output=True, check=False).returncode:
            pytest.skip("root may write everywhere here")
        try:
            train(saver, range(2, 4))
        finally:
            subprocess.run(["chattr", "-i", str(tmp_path)], capture_output=True, check=False)
            os.chmod(tmp_path, 0o700)
        assert saver.counters.levels[disk.name].failed == 2
        assert_stamped(back_from(disk)[1], 1)
    assert len([line for line in said(caplog) if line.startswith(disk.name)]) == 1


def test_without_direct_io_files_go_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite

    def refusing(fd: int, parts: list[memoryview], at: int) -> int:
        import fcntl

        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not here")
        return real(fd, parts[0][: (1 << 20) + 7], at)  # and only short writes

    monkeypatch.setattr(os, "pwritev", refusing)
    with Checkpointer([LocalDisk(tmp_path)]) as saver:
        train(saver, range(2))
        assert not saver.counters.failures
    assert_stamped(back_from(LocalDisk(tmp_path))[1], 1)


def test_a_file_that_ends_early_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(bytes(4096))
    file = DirectFile.existing(tmp_path / "short")
    with pytest.raises(OSError, match="ends too early"):
        file.read(memoryview(bytearray(8192)), 0)
    file.close()


def test_nothing_is_left_of_a_run_that_died(tmp_path: Path) -> None:
    leftover = tmp_path / ".step-000000007.formerrun.part"
    leftover.mkdir()
    (leftover / "__0_0.distcp").write_bytes(b"half")
    with Checkpointer([LocalDisk(tmp_path)]) as saver:
        train(saver, range(1))
    assert not leftover.exists()
    shutil.rmtree(tmp_path)


def test_layouts_of_one_job_leave_each_other_what_they_write(tmp_path: Path) -> None:
    """Until it is behind a complete one; the text up to the dot in `run` is the job's."""
    ahead, behind = (tmp_path / f".step-00000000{step}.job.0.part" for step in (1, 0))
    for part in (ahead, behind):
        part.mkdir()
    with Checkpointer([LocalDisk(tmp_path)], ranks=IndependentRank(run="job.1")) as saver:
        train(saver, range(2))
    assert (ahead.exists(), behind.exists()) == (True, False)


def test_problems_in_the_loop_are_counted_and_never_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer([LocalDisk(tmp_path)]) as saver:
        for _ in range(3):
            assert not saver.save(0, {"generator": (one for one in ())})
        assert sum(saver.counters.failures.values()) == 3
    assert len(said(caplog)) == 1


def test_a_step_that_names_no_checkpoint_is_counted_and_never_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    odd: list[Any] = [-1, 2.5, float("nan"), "7", None, 1 << 63]
    with Checkpointer([LocalDisk(tmp_path)]) as saver:
        assert not any(saver.save(step, stamped(0)) for step in odd)
        assert sum(saver.counters.failures.values()) == len(odd)
        assert saver.save(np.int64(3), stamped(3))  # type: ignore[arg-type]
    assert len(said(caplog)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000003"]


TWO = TwoTensor(torch.ones(3), torch.ones(3))


def stepped(stored: Callable[[Tensor], Tensor]) -> torch.optim.Optimizer:
    """An optimizer whose moment is stored in another form."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], momentum=0.9)
    optimizer.state[parameter]["momentum_buffer"] = stored(torch.zeros(3))
    return optimizer


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        (None, "state: a mapping or a list of ShardedTensorPiece, not NoneType"),
        ([torch.ones(3)], "state: a mapping or a list of ShardedTensorPiece, not list"),
        (torch.ones(3), "state: a mapping or a list of ShardedTensorPiece, not Tensor"),
        ({"a": {"b": torch.ones(3, device="meta")}}, "a.b: a tensor that is on the meta device"),
        ({"a": torch.ones(3).to_sparse()}, "a: a tensor that is of torch.sparse_coo layout"),
        ({"a": torch.nn.UninitializedParameter()}, "a: a tensor that is not initialized yet"),
        (
            {"a": torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)},
            "a: a tensor that is nested",
        ),
        ({"a": TWO}, "a: a tensor that is made of other tensors"),
        ({"a": torch.nn.Parameter(TWO)}, "a: a tensor that is made of other tensors"),
        ([ShardedTensorPiece("a", (3,), (0,), TWO)], "a: a tensor that is made of other tensors"),
        (
            {"o": stepped(lambda tensor: TwoTensor(tensor, tensor))},
            "o.state.0.momentum_buffer: a tensor that is made of other tensors",
        ),
    ],
)
def test_a_state_that_cannot_be_saved_is_named(tmp_path: Path, state: Any, problem: str) -> None:
    with Checkpointer([LocalDisk(tmp_path)]) as saver:
        assert not saver.save(1, state)
        (text,) = saver.counters.failures
        assert saver.save(2, stamped(2)), "a bad state costs one checkpoint"
    assert text.startswith(f"save: {problem}")


def test_a_distributed_tensor_whose_shard_cannot_be_saved_is_named(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        tensor = DTensor.from_local(TWO, init_device_mesh("cpu", (1,)), run_check=False)
        with Checkpointer([LocalDisk(tmp_path)], ranks=IndependentRank()) as saver:
            assert not saver.save(1, {"a": tensor})
            assert "a: a tensor that is made of other tensors" in str(saver.counters.failures)
    finally:
        dist.destroy_process_group()


def test_a_save_after_close_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer([LocalDisk(tmp_path)]) as saver:
        pass
    assert not saver.save(1, stamped(1))
    saver.fence()
    assert "has been closed" in said(caplog)[0]


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda _: Checkpointer([]), "at least one"),
        (lambda d: Checkpointer([LocalDisk(d), LocalDisk(d)]), "same name"),
        (lambda d: Checkpointer(LocalDisk(d)), "levels: a list of levels"),
        (lambda d: Checkpointer([str(d)]), "levels: a list of levels"),
        (lambda d: Checkpointer([LocalDisk(d)], host_cache_bytes=0), "host_cache_bytes: at least"),
        (
            lambda d: Checkpointer([LocalDisk(d)], host_cache_bytes=1e9),
            "host_cache_bytes: at least",
        ),
        (lambda d: Checkpointer([LocalDisk(d)], niceness=20), "niceness: from 0 to 19"),
        (lambda d: Checkpointer([LocalDisk(d)], EveryStep), "policy: e.g. EveryStep"),
        (lambda d: LocalDisk(d, keep=0), "keep: at least one"),
        (lambda d: LocalDisk(d, keep=1.5), "keep: at least one"),
        (lambda d: LocalDisk(d, ranks=[]), "ranks: at least one"),
        (lambda _: LocalDisk(""), "folder: is empty"),
        (lambda _: HostMemory(keep=-1), "keep: at least one"),
        (lambda _: SharedStorage("nowhere://bucket"), "nowhere://bucket: Protocol not known"),
        (lambda _: SharedStorage(""), "url: is empty"),
        (lambda _: PeerMemory(None), "own: this process's HostMemory"),
        (lambda _: Every(0), "steps: must be a positive integer"),
        (lambda _: Every(float("nan")), "steps: must be a positive integer"),
        (lambda _: LeastLoss(60.0), "faults: must be a FaultRate"),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    tmp_path: Path, make: Callable[[Path], object], problem: str
) -> None:
    with pytest.raises(ContractError, match=problem):
        make(tmp_path)


class UnreadDisk(LocalDisk):
    """A folder that cannot be read at present."""

    def steps(self) -> list[int]:
        raise OSError(errno.EIO, "not now")


def test_the_newest_step_is_that_of_any_level(tmp_path: Path) -> None:
    with Checkpointer([LocalDisk(tmp_path / "a"), LocalDisk(tmp_path / "b")]) as saver:
        assert saver.newest_step() is None
        train(saver, range(3))
        assert saver.newest_step() == 2
    levels = [UnreadDisk(tmp_path / "a"), LocalDisk(tmp_path / "b")]
    with Checkpointer(levels) as saver:
        assert saver.newest_step() == 2


class UnreachableStorage(SharedStorage):
    """Storage whose client raises errors of its own."""

    def steps(self) -> list[int]:
        raise RuntimeError("503")


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (UnreadDisk, "not now"),
        (lambda folder: LocalDisk(folder / "a file"), "Not a directory"),
        (lambda folder: UnreachableStorage(f"file://{folder}"), "503"),
    ],
)
def test_a_job_does_not_begin_anew_because_a_level_cannot_be_read(
    tmp_path: Path, make: Callable[[Path], Level], problem: str
) -> None:
    (tmp_path / "a file").write_text("content")
    levels = [make(tmp_path), LocalDisk(tmp_path / "b")]
    with Checkpointer(levels) as saver, pytest.raises(CheckpointError, match=problem):
        saver.newest_step()


def test_node_memory_is_the_launchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RESIHP_NODE_MEMORY", raising=False)
    assert not NodeMemory.is_available()
    with pytest.raises(ContractError, match="resihp run"):
        NodeMemory()
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RESIHP_NODE_MEMORY", str(tmp_path))
    with Checkpointer([NodeMemory()]) as saver:
        train(saver, range(3))
    assert LocalDisk(tmp_path).steps() == [2]
    assert_stamped(back_from(NodeMemory())[1], 2)


def test_a_folder_that_a_rank_which_gives_up_deletes_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does so whenever the folder is empty, twice here."""
    made: list[Path] = []

    def mkdir(self: Path, *arguments: object, **options: bool) -> None:
        os.makedirs(self, exist_ok=True)
        made.append(self)
        if len(made) <= 2:
            self.rmdir()

    disk = LocalDisk(tmp_path)
    with Checkpointer([disk]) as saver:
        monkeypatch.setattr(Path, "mkdir", mkdir)
        saver.save(0, stamped(0))
        assert saver.wait(60)
        monkeypatch.undo()
    assert disk.steps() == [0], saver.counters.failures
    assert len(made) == 3


@pytest.mark.parametrize("run", ["x" * 201, "ü" * 50, 3])
def test_a_run_that_no_file_can_be_named_by_is_refused(run: Any) -> None:
    with pytest.raises(ContractError, match="run"):
        IndependentRank(0, (0, 1), run=run)


@pytest.mark.parametrize("run", ["user/job1", "a\0b", "x" * 200])
def test_any_other_run_is_saved_on_every_level(tmp_path: Path, run: str) -> None:
    disk, shared = LocalDisk(tmp_path / "d"), SharedStorage(f"file://{tmp_path}/s")
    ranks = IndependentRank(0, (0,), run=run)
    with Checkpointer([disk, shared], ranks=ranks) as saver:
        train(saver, range(2))
        train(saver, range(2))  # goes back: a second lineage
    assert [each.failed for each in saver.counters.levels.values()] == [0, 0]
