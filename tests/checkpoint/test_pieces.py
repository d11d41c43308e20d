"""Uneven shards go in from each rank, any other ranges come back."""

from __future__ import annotations

import os
import resource
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.checkpoint import Checkpointer, IndependentRank, LocalDisk, ShardedTensorPiece
from resihp.checkpoint.ranks import SaveItem, assign_writers
from resihp.checkpoint.restore import restore
from resihp.contracts import CheckpointError, ContractError
from resihp.layout import Param, split
from tests.checkpoint.helpers import load_by_torch

PARAMS = (Param("wq", (12, 5), 0, 2), Param("wo", (5, 12, 2), 1, 2), Param("norm", (7,)))

edges = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)
segments = st.sets(st.integers(1, 11), max_size=3).map(lambda inner: [0, *sorted(inner), 12])


def whole(param: Param) -> torch.Tensor:
    return torch.arange(torch.Size(param.shape).numel(), dtype=torch.float32).reshape(param.shape)


def piece(param: Param, start: int, stop: int) -> ShardedTensorPiece:
    dim = param.dim or 0
    offsets = tuple(start if d == dim else 0 for d in range(len(param.shape)))
    tensor = whole(param).narrow(dim, start, stop - start).contiguous()
    return ShardedTensorPiece(param.key, param.shape, offsets, tensor)


def save(folder: Path, pieces: list[list[ShardedTensorPiece]]) -> None:
    """One process plays all ranks, one after the other."""
    ranks = range(len(pieces))
    for rank, mine in enumerate(pieces):
        with Checkpointer(
            [LocalDisk(folder)], ranks=IndependentRank(rank, ranks, run="test")
        ) as saver:
            assert saver.save(3, mine, extra={"rank": rank})
        assert not saver.counters.failures


@settings(max_examples=25, deadline=None)
@given(shares_of_ranks=edges, wanted=segments)
def test_any_range_of_any_split(shares_of_ranks: tuple[int, ...], wanted: list[int]) -> None:
    pieces = [
        [
            piece(param, *param.ranges(shares_of_ranks)[rank])
            for param in PARAMS
            if param.ranges(shares_of_ranks)[rank][0] < param.ranges(shares_of_ranks)[rank][1]
        ]
        for rank in range(len(shares_of_ranks))
    ]
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), pieces)
        targets = [piece(p, a, b) for p in PARAMS[:2] for a, b in pairwise(wanted)]
        targets.append(piece(PARAMS[2], 1, 6))
        expected = [target.tensor.clone() for target in targets]
        for target in targets:
            target.tensor.fill_(-1.0)
        restored = restore([LocalDisk(folder)], targets, IndependentRank())
    assert restored.extra == {"rank": 0}
    for target, tensor in zip(targets, expected, strict=True):
        assert torch.equal(target.tensor, tensor)


def test_torch_reads_uneven_pieces_as_whole_tensors(tmp_path: Path) -> None:
    ranges = split(12, (1, 3, 2), unit=2)
    save(tmp_path, [[piece(p, *ranges[rank]) for p in PARAMS[:2]] for rank in range(3)])
    whole = {"wq": torch.zeros(12, 5), "wo": torch.zeros(5, 12, 2)}
    load_by_torch(tmp_path / "step-000000003", whole)
    for tensor in whole.values():
        assert torch.equal(tensor.flatten(), torch.arange(float(tensor.numel())))


def test_a_rank_that_did_not_finish_leaves_no_checkpoint(tmp_path: Path) -> None:
    with Checkpointer([LocalDisk(tmp_path)], ranks=IndependentRank(0, (0, 1), run="test")) as saver:
        saver.save(3, [piece(PARAMS[0], 0, 6)])
    assert LocalDisk(tmp_path).steps() == []


def test_a_range_that_nobody_saved_is_named(tmp_path: Path) -> None:
    save(tmp_path, [[piece(PARAMS[0], 0, 6)], [piece(PARAMS[0], 7, 12)]])
    with pytest.raises(CheckpointError, match=r"wq\['4:8', '0:5'\]"):
        restore([LocalDisk(tmp_path)], [piece(PARAMS[0], 4, 8)], IndependentRank())


@pytest.mark.parametrize(
    ("shape", "offsets"), [((4, 4), (0,)), ((4, 4), (3, 0)), ((4, 4), (-1, 0))]
)
def test_a_piece_lies_inside_its_tensor(shape: tuple[int, ...], offsets: tuple[int, ...]) -> None:
    with pytest.raises(ContractError):
        ShardedTensorPiece("w", shape, offsets, torch.zeros(2, 2))


def claim(key: str, start: int, size: int, whole: int) -> SaveItem:
    return SaveItem(key, (start,), (size,), (whole,), 4 * size)


def test_what_several_ranks_hold_is_written_once_by_the_one_with_least() -> None:
    held = [[claim("a", 0, 8, 8), claim("b", 0, 3, 3)], [claim("a", 0, 8, 8), claim("b", 0, 3, 3)]]
    assert assign_writers(held) == [{("a", (0,))}, {("b", (0,))}]


def test_parts_that_leave_a_gap_or_overlap_are_refused() -> None:
    with pytest.raises(ContractError, match="6 elements, the whole has 8"):
        assign_writers([[claim("a", 0, 4, 8)], [claim("a", 4, 2, 8)]])
    with pytest.raises(ContractError, match="10 elements"):
        assign_writers([[claim("a", 0, 5, 8)], [claim("a", 3, 5, 8)]])


def test_a_checkpoint_of_more_ranks_than_a_process_may_open_files(tmp_path: Path) -> None:
    """Whatever fails, all files are closed."""
    count = 60
    save(tmp_path, [[ShardedTensorPiece("w", (count,), (k,), torch.ones(1))] for k in range(count)])
    into = [ShardedTensorPiece("w", (count,), (0,), torch.zeros(count))]
    limits, before = resource.getrlimit(resource.RLIMIT_NOFILE), os.listdir("/proc/self/fd")
    free = sorted(set(range(len(before) + count)) - set(map(int, before)))
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[count // 2], limits[1]))
    try:
        restore([LocalDisk(tmp_path)], into, IndependentRank())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert torch.equal(into[0].tensor, torch.ones(count))
    (tmp_path / "step-000000003" / f"__{count - 1}_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=f"__{count - 1}_0.distcp"):
        restore([LocalDisk(tmp_path)], into, IndependentRank())
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_shard_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    """Only one of the two would be filled."""
    param = PARAMS[0]
    save(tmp_path, [[piece(param, 0, 12)]])
    into = [piece(param, 4, 8), piece(param, 4, 6)]
    with pytest.raises(ContractError, match="occurs twice"):
        restore([LocalDisk(tmp_path)], into, IndependentRank())
