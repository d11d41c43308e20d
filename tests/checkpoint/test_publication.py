"""Publication of a folder that several ranks write, whatever fails at whichever moment."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from resihp.checkpoint import Checkpointer, IndependentRank, LocalDisk
from resihp.checkpoint.levels import checkpoint_folder
from tests.checkpoint.helpers import assert_stamped, back_from, stamped


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
