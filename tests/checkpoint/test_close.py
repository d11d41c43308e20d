"""However a program ends, what it had begun is finished and nothing is left running."""

from __future__ import annotations

import gc
import multiprocessing
import threading
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from resihp.checkpoint import Checkpointer, HostMemory, LazyWriter, LocalDisk
from resihp.checkpoint.staging.in_flight import InFlightCheckpoint
from tests.checkpoint.helpers import SlowDisk, assert_stamped, back_from, run_python, stamped

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
        assert saver.wait(60)
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


def test_a_restore_finds_what_was_under_way(tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path, 0.0)
    with Checkpointer([disk]) as saver:
        saver.save(1, stamped(1))
        assert saver.wait(60)
        disk.delay_s = 0.5
        saver.save(2, stamped(2))
        into = stamped(-1)
        assert saver.restore(into).step == 2
    assert_stamped(into, 2)
