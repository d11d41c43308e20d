"""Damage is named, and the next-best complete checkpoint is used."""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from resihp.checkpoint import Checkpointer, LocalDisk, SharedStorage
from resihp.checkpoint.levels.level import CheckpointReader
from resihp.contracts import CheckpointError, ContractError
from tests.checkpoint.helpers import assert_stamped, back_from, stamp, stamped

DATA, INDEX = "__0_0.distcp", "__0.index.json"


@pytest.fixture
def disk(tmp_path: Path) -> LocalDisk:
    """Three checkpoints, of steps 0 to 2."""
    level, state = LocalDisk(tmp_path / "disk", keep=3), stamped(-1)
    with Checkpointer([level]) as saver:
        for step in range(3):
            stamp(state, step)
            saver.save(step, state)
            saver.wait()
    return level


def newest(disk: LocalDisk) -> Path:
    return disk.folder / "step-000000002"


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def test_a_flipped_bit_names_its_shard(disk: LocalDisk, caplog: pytest.LogCaptureFixture) -> None:
    flip(newest(disk) / DATA, 5 << 20)
    with caplog.at_level(logging.WARNING):
        restored, into = back_from(disk)
    assert restored.step == 1
    assert_stamped(into, 1)
    (line,) = restored.skipped
    assert "checksum differs" in line
    assert "t4 (file of rank 0)" in line
    assert "t0" not in line
    assert "used step 1" in caplog.text


@pytest.mark.parametrize("seed", range(8))
def test_whatever_bit_flips_the_state_is_right(disk: LocalDisk, seed: int) -> None:
    chosen = random.Random(seed)
    path = newest(disk) / chosen.choice([DATA, DATA, INDEX])
    flip(path, chosen.randrange(path.stat().st_size))
    restored, into = back_from(disk)
    assert_stamped(into, restored.step)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_torn_file(disk: LocalDisk, share: float) -> None:
    path = newest(disk) / DATA
    os.truncate(path, int(path.stat().st_size * share))
    restored, into = back_from(disk)
    assert restored.step == 1
    assert_stamped(into, 1)
    assert "cannot be read" in restored.skipped[0]


@pytest.mark.parametrize("name", [DATA, INDEX])
def test_a_missing_file_is_named(disk: LocalDisk, name: str) -> None:
    (newest(disk) / name).unlink()
    restored, into = back_from(disk)
    assert restored.step == 1
    assert name in restored.skipped[0] or "every index" in restored.skipped[0]
    assert_stamped(into, 1)


def test_without_its_metadata_a_folder_is_no_checkpoint(disk: LocalDisk) -> None:
    (newest(disk) / ".metadata").unlink()
    restored, _ = back_from(disk)
    assert restored.step == 1
    assert restored.skipped == (f"step 2 is torn: {newest(disk) / '.metadata'} is missing",)
    with pytest.raises(CheckpointError, match=r"of step 2: step 2 is torn: .* is missing"):
        back_from(disk, step=2)


@pytest.mark.parametrize("content", [None, b"", b"{}", b"[1]", b"null", bytes(64), "flipped"])
def test_without_its_lineage_a_checkpoint_is_still_the_newest(
    disk: LocalDisk, tmp_path: Path, content: bytes | str | None
) -> None:
    shutil.copytree(disk.folder, tmp_path / "far")
    for folder in (newest(disk), tmp_path / "far" / newest(disk).name):
        path = folder / "lineage.json"
        if content == "flipped":
            at = path.read_bytes().index(b'"born": ') + len(b'"born": ')
            path.write_bytes(path.read_bytes()[:at] + b"0" + path.read_bytes()[at + 1 :])
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.unlink()
    for level in (disk, SharedStorage(f"file://{tmp_path}/far")):
        restored, into = back_from(level)
        assert restored.step == 2
        assert_stamped(into, 2)


def test_the_same_step_of_another_level_comes_before_an_older_one(tmp_path: Path) -> None:
    disk, shared = LocalDisk(tmp_path / "d"), SharedStorage(f"file://{tmp_path}/s")
    state = stamped(4)
    with Checkpointer([disk, shared]) as saver:
        saver.save(4, state)
        saver.wait()
    flip(tmp_path / "d" / "step-000000004" / DATA, 1 << 20)
    restored, into = back_from(disk, shared)
    assert (restored.step, restored.level) == (4, shared.name)
    assert_stamped(into, 4)


def test_with_nothing_left_the_error_says_what_was_wrong_with_each(disk: LocalDisk) -> None:
    for step in range(3):
        flip(disk.folder / f"step-{step:09d}" / DATA, 1 << 20)
    with pytest.raises(CheckpointError, match=r"step 2 .* step 1 .* step 0"):
        back_from(disk)


def test_an_error_without_words_is_named_by_its_type(
    disk: LocalDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(step: int) -> CheckpointReader:
        raise TimeoutError

    monkeypatch.setattr(disk, "open", fail)
    with pytest.raises(CheckpointError, match="unusable: TimeoutError"):
        back_from(disk)


class Frozen(Mapping[str, object]):
    """A mapping whose values cannot be set."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = dict(values)

    def __getitem__(self, key: str) -> object:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@pytest.mark.parametrize("kind", [MappingProxyType, Frozen])
@pytest.mark.parametrize(
    ("wrap", "key"),
    [
        (lambda inner: inner, "lr"),
        (lambda inner: {"a": inner}, "a.lr"),
        (lambda inner: {"a": {"b": [inner, {}]}}, "a.b.0.lr"),
    ],
)
def test_values_that_a_restore_could_not_set_are_refused(
    tmp_path: Path,
    kind: Callable[[Mapping[str, object]], Mapping[str, object]],
    wrap: Callable[[Mapping[str, object]], Mapping[str, object]],
    key: str,
) -> None:
    with Checkpointer([LocalDisk(tmp_path)]) as saver:
        assert not saver.save(1, wrap(kind({"lr": 1.0, "w": torch.ones(2)})))
        (reason,) = saver.counters.failures
        assert f"{key}: is no tensor" in reason
        filled = wrap(kind({"w": torch.ones(2), "inner": {"lr": 2.0}}))
        assert saver.save(2, filled)  # the tensor in place, the value in a dict
        assert saver.wait()
        tensor, inner = torch.zeros(2), {"lr": 0.0}
        saver.restore(wrap(kind({"w": tensor, "inner": inner})))
    assert (tensor.tolist(), inner) == ([1.0, 1.0], {"lr": 2.0})


def test_an_expanded_tensor_is_saved_and_not_filled_in_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer([LocalDisk(tmp_path)]) as saver:
        assert saver.save(1, {"a": {"row": torch.ones(1).expand(4)}})
        assert saver.wait()
        into = torch.zeros(1).expand(4)
        with pytest.raises(ContractError, match=r"a\.row: is expanded: it cannot be filled"):
            saver.restore({"a": {"row": into}})
        assert "unusable" not in caplog.text
        filled = into.clone()
        saver.restore({"a": {"row": filled}})
    assert filled.tolist() == [1.0] * 4


def test_what_the_checkpoint_lacks_is_named(disk: LocalDisk) -> None:
    with Checkpointer([disk]) as saver:
        with pytest.raises(CheckpointError, match="it lacks more"):
            saver.restore({**stamped(0), "more": torch.zeros(3)})
        with pytest.raises(CheckpointError, match="it lacks t0"):
            saver.restore({"t0": 3})  # a tensor there
        with pytest.raises(ContractError, match="t0: a tensor that is on the meta device"):
            saver.restore({"t0": torch.zeros(3, device="meta")})
        with pytest.raises(CheckpointError, match=r"t0 is \[2\], the checkpoint has \[3\]"):
            saver.restore({"t0": torch.zeros(2)})
        with pytest.raises(CheckpointError, match="of step 17"):
            saver.restore(stamped(0), step=17)
