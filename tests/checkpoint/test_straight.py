"""A disk that writes from the tensors' own memory: what the fence, or a failure, comes between."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event

import pytest
import torch

from resihp.checkpoint import Checkpointer, LocalDisk, SharedStorage
from resihp.checkpoint.format.archive import ALIGN
from resihp.checkpoint.format.checksum import ROW_BYTES
from resihp.checkpoint.format.shard_file import ChunkSegment, SourceBytes
from resihp.checkpoint.levels.direct_file import DirectFile
from resihp.checkpoint.staging.host_buffer import collapse, populate
from tests.checkpoint.helpers import assert_stamped, back_from, stamp, stamped

WARM, PATIENCE_S = 3, 60
Write = Callable[[DirectFile, Sequence[memoryview], int], None]


class Hook:
    """Comes before each write of a chunk, once armed; tells where chunks were written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
        self.is_armed, self.written = False, list[int]()
        real: Write = DirectFile.write

        def write(file: DirectFile, parts: Sequence[memoryview], at: int) -> None:
            if self.is_armed:
                self.written.append(at)
                act()
            real(file, parts, at)

        monkeypatch.setattr(DirectFile, "write", write)


def warmed_up(saver: Checkpointer, state: dict[str, torch.Tensor]) -> None:
    """Steps long enough that the disk is expected to be done before the fence."""
    for step in range(WARM):
        stamp(state, step)
        saver.save(step, state)
        time.sleep(0.3)
        assert saver.wait(PATIENCE_S)


def test_what_is_being_written_at_the_fence_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, changed = Event(), Event()

    def act() -> None:
        writing.set()
        assert changed.wait(PATIENCE_S)

    hook, state, disk = Hook(monkeypatch, act), stamped(5), LocalDisk(tmp_path)
    hook.is_armed = True
    with Checkpointer([disk]) as saver:
        saver.save(5, state)  # the first one, of which nothing is copied before the fence
        assert writing.wait(PATIENCE_S)
        saver.fence()  # must not wait for the disk, which waits for what comes after it
        stamp(state, 99)
        changed.set()
        assert saver.wait(PATIENCE_S)
        assert saver.counters.levels[disk.name].saved == 1
    assert len(hook.written) > len(set(hook.written)), "nothing was in flight at the fence"
    assert_stamped(back_from(disk, step=5)[1], 5)


def test_a_disk_that_fails_before_the_fence_leaves_the_checkpoint_to_shared_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act() -> None:
        raise OSError("the disk is gone")

    hook, state, disk = Hook(monkeypatch, act), stamped(-1), LocalDisk(tmp_path / "d")
    shared = SharedStorage(f"file://{tmp_path}/s")
    with Checkpointer([disk, shared]) as saver:
        warmed_up(saver, state)
        hook.is_armed = True
        stamp(state, WARM)
        saver.save(WARM, state)
        deadline = time.monotonic() + PATIENCE_S
        while saver.counters.levels[shared.name].newest_step != WARM:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        saver.fence()
        stamp(state, 99)
        assert saver.wait(PATIENCE_S)
    restored, into = back_from(shared, disk)
    assert (restored.step, restored.level) == (WARM, shared.name)
    assert_stamped(into, WARM)


def test_large_tensors_lie_in_the_file_as_in_memory(tmp_path: Path) -> None:
    state = {f"t{i}": torch.zeros(300_000 + 7 * i) for i in range(3)}
    disk = LocalDisk(tmp_path)
    with Checkpointer([disk]) as saver:
        saver.save(0, state)
        saver.wait()
    (index,) = disk.open(0).indexes.values()
    for entry in index.tensors:
        assert entry.data % ALIGN == 0
        assert (entry.data - state[entry.key].data_ptr()) % ROW_BYTES == 0


def test_a_copy_that_fails_costs_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(SourceBytes):
        def of(self, segment: ChunkSegment) -> torch.Tensor:
            raise RuntimeError("no memory")

    state, disk = stamped(-1), LocalDisk(tmp_path)
    with Checkpointer([disk]) as saver:
        warmed_up(saver, state)
        monkeypatch.setattr("resihp.checkpoint.staging.copier.SourceBytes", Failing)
        gate = Event()
        hook = Hook(monkeypatch, lambda: gate.wait(PATIENCE_S) and None)
        hook.is_armed = True
        for step in range(WARM, WARM + 3):
            gate.clear()
            stamp(state, step)
            saver.save(step, state)
            saver.fence()  # before the disk has written anything
            gate.set()
            assert saver.wait(PATIENCE_S)
        counters = saver.counters
        assert counters.levels[disk.name].failed + sum(counters.failures.values())
        monkeypatch.undo()
        stamp(state, WARM + 3)
        saver.save(WARM + 3, state)
        assert saver.wait(PATIENCE_S)
    for step in disk.steps():
        assert_stamped(back_from(disk, step=step)[1], step)
    assert back_from(disk)[0].step == WARM + 3


def test_tensors_moved_to_huge_pages_are_the_same(tmp_path: Path) -> None:
    tensors = [torch.arange(size, dtype=torch.int32) for size in (3_000_000, 600_001, 5)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    collapse(tensors, Event())
    populate(tensors, Event())  # which keeps what is there
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    for tensor in tensors:
        assert torch.equal(tensor, torch.arange(len(tensor), dtype=torch.int32))
