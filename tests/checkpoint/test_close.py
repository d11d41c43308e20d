"""However a program ends, what it had begun is finished and nothing is left running."""

from __future__ import annotations

import gc
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from resihp import _shutdown
from resihp.checkpoint import (
    Checkpointer,
    HostMemory,
    LazyWriter,
    LocalDisk,
    SharedStorage,
    checkpointer,
)
from resihp.checkpoint.level_pipeline import LevelPipeline
from resihp.checkpoint.policy import SaveTiming
from resihp.checkpoint.staging.in_flight import InFlightCheckpoint
from tests.checkpoint.helpers import (
    GatedDisk,
    SlowDisk,
    assert_stamped,
    back_from,
    room_for,
    run_python,
    stamp,
    stamped,
)

UNCLOSED = """
import sys, torch
from resihp.checkpoint import Checkpointer, HostMemory, LocalDisk
saver = Checkpointer([HostMemory(), LocalDisk(sys.argv[1])])
saver.save(7, {"a": torch.ones(5_000_000)})
print("the end")
"""

LET_GO = """
import sys, torch
from resihp.checkpoint import Checkpointer, HostMemory, LocalDisk

def train():
    saver = Checkpointer([HostMemory(), LocalDisk(sys.argv[1])])
    saver.save(7, {"a": torch.ones(5_000_000)})

train()
print("the end")
"""

UNCLOSED_WRITER = """
import sys, torch
import torch.distributed.checkpoint as dcp
from resihp.checkpoint import LazyWriter
dcp.async_save({"a": torch.ones(5_000_000)}, storage_writer=LazyWriter(sys.argv[1]), no_dist=True)
print("the end")
"""


@pytest.mark.parametrize("program", [UNCLOSED, LET_GO])
def test_a_program_that_does_not_close_ends_well_and_loses_nothing(
    program: str, tmp_path: Path
) -> None:
    assert run_python(program, tmp_path) == "the end\n"
    assert LocalDisk(tmp_path).steps() == [7]


def test_a_program_that_does_not_wait_for_an_asynchronous_save(tmp_path: Path) -> None:
    assert run_python(UNCLOSED_WRITER, tmp_path / "one") == "the end\n"
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_a_forked_child_leaves_its_parents_checkpoints_alone(tmp_path: Path) -> None:
    with Checkpointer([SlowDisk(tmp_path, 0.5)]) as saver:
        saver.save(1, stamped(1))
        child = multiprocessing.get_context("fork").Process(target=int)
        child.start()
        child.join(60)
        assert child.exitcode == 0
    assert_stamped(back_from(LocalDisk(tmp_path))[1], 1)


class Odd(LocalDisk):
    """Raises what no storage should."""

    problem: BaseException | None = None

    def put(self, checkpoint: InFlightCheckpoint) -> None:
        """Store it, or not."""
        if self.problem is not None:
            raise self.problem
        super().put(checkpoint)

    def close(self) -> None:
        """Fail."""
        raise RuntimeError("cannot let go")


@pytest.mark.parametrize("problem", [SystemExit(3), KeyboardInterrupt(), MemoryError()])
def test_whatever_a_level_raises_it_costs_that_checkpoint(
    tmp_path: Path, problem: BaseException
) -> None:
    disk = Odd(tmp_path)
    with Checkpointer([disk]) as saver:
        disk.problem = problem
        saver.save(1, stamped(1))
        assert saver.wait(300)
        disk.problem = None
        assert saver.save(2, stamped(2))
    assert saver.counters.levels[disk.name].failed == 1
    assert_stamped(back_from(LocalDisk(tmp_path))[1], 2)


def test_no_thread_outlives_close(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    saver = Checkpointer([HostMemory(), LocalDisk(tmp_path)])
    saver.save(1, stamped(1))
    saver.close()
    saver.close()
    left = [t for t in set(threading.enumerate()) - before if t.name != "resihp-pages"]
    assert not left


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_no_thread_outlives_a_writer_that_is_let_go(tmp_path: Path) -> None:
    """Many programs make one for each checkpoint."""
    before = set(threading.enumerate())
    writer = LazyWriter(tmp_path / "one")
    saved = dcp.async_save(stamped(1), storage_writer=writer, no_dist=True)
    saved.upload_completion.result(60)
    del writer, saved
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert not set(threading.enumerate()) - before


def test_a_restore_finds_what_was_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointer, "_SETTLE_TIMEOUT_S", 300.0)  # for a disk that is busy
    disk = SlowDisk(tmp_path, 0.0)
    with Checkpointer([disk]) as saver:
        saver.save(1, stamped(1))
        assert saver.wait(300)
        disk.delay_s = 0.5
        saver.save(2, stamped(2))
        into = stamped(-1)
        assert saver.restore(into).step == 2
    assert_stamped(into, 2)


def save_all(saver: Checkpointer, steps: range, memory: HostMemory | None = None) -> list[bool]:
    """Save each step, and wait until `memory` has it, if there is one; whether each was begun."""
    state, begun = stamped(-1), []
    for step in steps:
        saver.fence()
        stamp(state, step)
        begun.append(saver.save(step, state, {"step": step}))
        # A step is listed there before the blocks of the one before it are given back.
        workers = [one for one in saver._pipeline._first if one.level is memory]
        assert all(one.wait(300) for one in workers)
        assert memory is None or step in memory.steps()
    return begun


def test_a_last_save_without_room_is_made_up_for_at_close(tmp_path: Path) -> None:
    disk = GatedDisk(tmp_path)
    with Checkpointer([disk]) as saver:
        assert not save_all(saver, range(5))[-1], "there was no room"
        assert saver.counters.no_buffer
        disk.gate.set()
    assert not saver.counters.failures
    restored, into = back_from(disk)
    assert (restored.step, restored.extra["step"]) == (4, 4)
    assert_stamped(into, 4)


def test_a_last_save_that_the_disk_alone_skipped_is_made_up_for(tmp_path: Path) -> None:
    memory, disk = HostMemory(), GatedDisk(tmp_path)
    with Checkpointer([memory, disk], host_cache_bytes=room_for(4)) as saver:
        assert save_all(saver, range(5), memory)[-1], "host memory has taken it"
        assert saver.counters.levels[disk.name].skipped
        disk.gate.set()
    assert not saver.counters.failures
    assert_stamped(back_from(disk)[1], 4)


def test_a_state_that_has_changed_since_is_not_taken_for_the_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = GatedDisk(tmp_path)
    with Checkpointer([disk]) as saver:
        state = stamped(0)
        assert saver.save(0, state)
        saver.fence()
        stamp(state, 1)
        assert not saver.save(1, state)
        stamp(state, 2)
        disk.gate.set()
    assert disk.steps() == [0]
    assert "step 1 is not on" in caplog.text


def test_nothing_is_saved_twice_at_close(tmp_path: Path) -> None:
    disk, shared = LocalDisk(tmp_path / "disk"), SharedStorage(f"file://{tmp_path}/shared")
    with Checkpointer([HostMemory(), disk, shared]) as saver:
        save_all(saver, range(1))
        saver.wait()
    assert [each.saved for each in saver.counters.levels.values()] == [1, 1, 1]


def test_shared_storage_that_hangs_gets_the_newest_that_waits(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path / "disk")
    entered, going = threading.Event(), threading.Event()

    class Hanging(SharedStorage):
        def put(self, checkpoint: InFlightCheckpoint) -> None:
            entered.set()
            assert going.wait(300)
            super().put(checkpoint)

    shared = Hanging(f"file://{tmp_path}/shared", keep=9)
    state = stamped(-1)
    with Checkpointer([disk, shared]) as saver:
        for step in range(4):
            saver.fence()
            stamp(state, step)
            assert saver.save(step, state)
            assert entered.wait(300)
            # Until it is on disk, has been passed on, and has left the cache.
            assert saver._pipeline._first[0].wait(300)
        going.set()
    assert shared.steps() == [0, 3]
    for step in shared.steps():
        assert_stamped(back_from(shared, step=step)[1], step)


def run_interrupted(call: Callable[[], object], line: int, handler: Callable[[], object]) -> bool:
    """Run `call`, with a handler before one line of ours, as Python handles signals.

    Returns False if there are fewer lines.
    """
    left = line

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        nonlocal left
        file = frame.f_code.co_filename
        is_ours = "resihp/checkpoint" in file and frame.f_code.co_name != "_before_close"
        if is_ours and event == "line":
            left -= 1
            if not left:
                handler()
        return trace if is_ours else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return left <= 0


@pytest.mark.parametrize(
    ("name", "stride", "raises"),
    [("save", 43, False), ("save", 43, True), ("fence", 9, False), ("wait", 9, False),
     ("wait", 9, True)],
)  # fmt: skip
def test_a_signal_handler_that_closes_loses_no_step(
    tmp_path: Path, name: str, stride: int, raises: bool
) -> None:
    """Wherever it interrupts the thread that saves: that one may hold a lock, copy a chunk, or not
    have given the checkpoint to the levels."""

    def is_interrupted(line: int) -> bool:
        disk, state = LocalDisk(tmp_path / str(line)), stamped(1)
        saver = Checkpointer([HostMemory(), disk])

        def end() -> None:
            saver.close(60)
            if raises:
                raise SystemExit

        assert saver.save(1, state)
        assert saver.wait(60)
        stamp(state, 2)
        calls = {"save": lambda: saver.save(2, state), "fence": saver.fence, "wait": saver.wait}
        if name != "save":
            saver.save(2, state)
        is_there = True
        with suppress(SystemExit):
            is_there = run_interrupted(calls[name], line, end)
        saver.close(60)  # as at the end of the program
        restored, into = back_from(disk)
        assert_stamped(into, restored.step)
        assert not [words for words in saver.counters.failures if "been closed" not in words]
        assert restored.step == 2 or (name == "save" and saver.counters.started == 1), line
        return is_there

    assert any(not is_interrupted(line) for line in range(1, 3000, stride))


@pytest.mark.parametrize("raises", [False, True])
def test_a_handler_that_closes_between_the_copy_and_the_levels(
    tmp_path: Path, raises: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = LocalDisk(tmp_path)
    saver = Checkpointer([HostMemory(), disk])
    assert saver.save(1, stamped(1))
    assert saver.wait(60)
    offer = LevelPipeline.offer

    def interrupted(pipeline: LevelPipeline, *given: Any) -> None:
        deadline = time.monotonic() + 60
        while saver._stager._cache is None or saver._stager._cache.free:  # the copy has the blocks
            assert time.monotonic() < deadline
            time.sleep(0.01)
        saver.close(60)
        if raises:
            raise SystemExit
        offer(pipeline, *given)

    monkeypatch.setattr(LevelPipeline, "offer", interrupted)
    with suppress(SystemExit):
        saver.save(2, stamped(2))
    saver.close(60)
    assert "close interrupts another call" in caplog.text
    assert_stamped(back_from(disk)[1], 2)


def test_a_wait_of_another_thread_leaves_close_to_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins during a save of this thread, and ends after that."""
    disk, waits, state = GatedDisk(tmp_path), threading.Event(), stamped(1)

    class SecondMeetsWait:
        def is_due(self, timing: SaveTiming) -> bool:
            if timing.step == 2:
                waiting.start()
                assert waits.wait(60)
            return True

    saver = Checkpointer([disk], SecondMeetsWait())
    waiting = threading.Thread(target=saver.wait, args=(300,))
    wait = saver._pipeline.wait

    def begin_to_wait(deadline_s: float) -> bool:
        waits.set()
        return wait(deadline_s)

    monkeypatch.setattr(saver._pipeline, "wait", begin_to_wait)
    assert saver.save(1, state)
    saver.fence()
    saver.save(2, state)
    disk.gate.set()
    waiting.join(60)
    saver.close()
    assert disk.steps() == [1, 2]
    assert not saver.save(3, state), "it has been closed"


@pytest.mark.parametrize("closes", [False, True])
def test_a_handler_that_ends_close_leaves_it_to_the_end_of_the_program(
    tmp_path: Path, closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = GatedDisk(tmp_path)
    saver = Checkpointer([disk])
    (worker,) = saver._pipeline._first
    wait, is_first = saver._pipeline.wait, [True]

    def interrupted(deadline_s: float) -> bool:
        if is_first and is_first.pop():
            if closes:
                saver.close(60)
            raise SystemExit
        disk.gate.set()
        return wait(deadline_s)

    monkeypatch.setattr(saver._pipeline, "wait", interrupted)
    assert not save_all(saver, range(5))[-1], "there was no room"
    with pytest.raises(SystemExit):
        saver.close(60)
    if not closes:
        assert saver in _shutdown._open
        saver.close(60)  # as at the end of the program
    assert not worker._thread.is_alive()
    assert saver not in _shutdown._open
    assert_stamped(back_from(disk)[1], 4)
