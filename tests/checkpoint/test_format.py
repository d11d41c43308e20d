"""Others read our files, and the bytes around tensors are what torch expects."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.checkpoint import Checkpointer, LocalDisk
from resihp.checkpoint.format.archive import ALIGN, frame
from resihp.checkpoint.format.shard_file import flat_bytes
from tests.checkpoint.helpers import run_python

DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn,
    torch.int64, torch.int32, torch.uint8, torch.uint16, torch.bool, torch.complex64,
]  # fmt: skip


@settings(deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    start=st.integers(0, 1 << 40),
)
def test_a_framed_tensor_is_what_torch_loads(
    dtype: torch.dtype, shape: tuple[int, ...], start: int
) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    memory = bytes(flat_bytes(tensor).numpy())
    around = frame(dtype, shape, len(memory), start)
    assert (start + len(around.head)) % ALIGN == 0
    loaded = torch.load(io.BytesIO(around.head + memory + around.tail), weights_only=True)
    assert loaded.dtype == dtype
    assert loaded.shape == tensor.shape
    assert bytes(flat_bytes(loaded).numpy()) == memory


def test_a_tensor_beyond_four_gibibytes_has_a_wide_directory(tmp_path: Path) -> None:
    rows, row = 5, 1 << 30
    around = frame(torch.uint8, (rows, row), rows * row, 0)
    path = tmp_path / "large"
    with open(path, "wb") as file:
        file.write(around.head)
        file.seek(rows * row - 1, io.SEEK_CUR)  # a hole: takes no room on disk
        file.write(b"\7" + around.tail)
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo("archive/data/0").file_size == rows * row
    loaded = torch.load(path, mmap=True, weights_only=True)
    assert loaded.shape == (rows, row)
    assert loaded[-1, -1] == 7
    assert loaded[0, 0] == 0


LOAD = """
import sys, torch, torch.distributed.checkpoint as dcp
folder, = sys.argv[1:]
state = {"model": {"w": torch.zeros(6, 5), "b": torch.zeros(5, dtype=torch.bfloat16)},
         "groups": [{"lr": None, "moment": torch.zeros(3)}], "scalar": torch.zeros(())}
dcp.load(state, storage_reader=dcp.FileSystemReader(folder))
assert torch.equal(state["model"]["w"], torch.arange(30.).reshape(6, 5))
assert torch.equal(state["model"]["b"], torch.arange(5).bfloat16())
assert state["groups"][0]["lr"] == 0.25 and state["groups"][0]["moment"].sum() == 6
assert state["scalar"] == 7
extra = {"resihp": {"extra": {"0": None}}}
dcp.load(extra, storage_reader=dcp.FileSystemReader(folder))
assert extra["resihp"]["extra"]["0"] == {"cursor": 99}
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
dcp_to_torch_save(folder, folder + ".pt")
again = torch.load(folder + ".pt", weights_only=False)
assert torch.equal(again["model"]["w"], state["model"]["w"])
assert not any(name.startswith("resihp") for name in sys.modules)
print("read")
"""

LOAD_SHARDED = """
import os, sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, zeros
folder, = sys.argv[1:]
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
state = {"model": {"w": zeros(6, 5, device_mesh=mesh, placements=[Shard(1)])}}
dcp.load(state, storage_reader=dcp.FileSystemReader(folder))
assert torch.equal(state["model"]["w"].to_local(), torch.arange(30.).reshape(6, 5))
assert not any(name.startswith("resihp") for name in sys.modules)
dist.destroy_process_group()
print("read", flush=True)
os._exit(0)  # a thread of gloo that still runs at the interpreter's exit aborts the process
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("format")
    state = {
        "model": {"w": torch.arange(30.0).reshape(6, 5), "b": torch.arange(5).bfloat16()},
        "groups": [{"lr": 0.25, "moment": torch.tensor([1.0, 2.0, 3.0])}],
        "scalar": torch.tensor(7.0),
    }

    with Checkpointer([LocalDisk(root)]) as saver:
        assert saver.save(12, state, extra={"cursor": 99})
    assert not saver.counters.failures
    return root / "step-000000012"


@pytest.mark.parametrize("script", [LOAD, LOAD_SHARDED], ids=["plain", "sharded"])
def test_torch_reads_it_in_a_process_that_does_not_import_us(folder: Path, script: str) -> None:
    assert run_python(script, folder) == "read\n"


def test_the_file_is_a_whole_number_of_sectors(folder: Path) -> None:
    assert (folder / "__0_0.distcp").stat().st_size % 4096 == 0
