"""One line changes for users of torch's own `save` and `async_save`."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

import resihp.checkpoint.dcp
from resihp.checkpoint import LazyWriter, LocalDisk
from tests.checkpoint.helpers import assert_stamped, back_from, run_until_killed, stamp, stamped

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def load(folder: Path) -> dict[str, torch.Tensor]:
    into = stamped(-1)
    dcp.load(into, storage_reader=dcp.FileSystemReader(folder))
    return into


def test_save_is_atomic_and_verified(tmp_path: Path) -> None:
    folder = tmp_path / "step-000000005"
    state = {**stamped(5), "lr": 0.5, "nested": [{"w": torch.ones(3)}]}
    dcp.save(state, storage_writer=LazyWriter(folder))
    assert_stamped(load(folder), 5)
    restored, into = back_from(LocalDisk(tmp_path))
    assert restored.step == 5
    assert_stamped(into, 5)
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_a_folder_with_another_spelling_of_a_step_is_torchs_alone(tmp_path: Path) -> None:
    dcp.save(stamped(42), storage_writer=LazyWriter(tmp_path / "step-42"))
    assert_stamped(load(tmp_path / "step-42"), 42)
    assert LocalDisk(tmp_path).steps() == []


def test_a_save_in_place_of_another(tmp_path: Path) -> None:
    writer = LazyWriter(tmp_path / "first")
    for step in range(3):
        dcp.save(stamped(step), checkpoint_id=tmp_path / "latest", storage_writer=writer)
        assert_stamped(load(tmp_path / "latest"), step)
        assert [path.name for path in tmp_path.iterdir()] == ["latest"]


@pytest.mark.parametrize("given", [None, "latest"])
def test_a_relative_path_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    planned, writer = LazyWriter.prepare_global_plan, LazyWriter("latest")

    def plan_elsewhere(self: LazyWriter, plans: list[SavePlan]) -> list[SavePlan]:
        os.chdir(tmp_path / "elsewhere")
        return planned(self, plans)

    monkeypatch.setattr(LazyWriter, "prepare_global_plan", plan_elsewhere)
    dcp.save(stamped(1), storage_writer=writer, checkpoint_id=given)
    assert_stamped(load(tmp_path / "latest"), 1)


def test_a_save_that_fails_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = LazyWriter(tmp_path / "latest")
    dcp.save(stamped(1), storage_writer=writer)

    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(CheckpointException, match="no room"):
        dcp.save(stamped(2), storage_writer=writer)
    assert_stamped(load(tmp_path / "latest"), 1)
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]


class KilledWriter(LazyWriter):
    """Its process dies when all is written but not published."""

    def finish(self, *arguments: object, **named: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def save_until_killed(rank: int, host: str, port: int, folder: Path) -> None:
    dcp.save({"a": torch.ones(1000)}, storage_writer=KilledWriter(folder), no_dist=True)


def test_what_a_killed_save_left_is_deleted_by_the_next_of_its_name(tmp_path: Path) -> None:
    for name in ("latest", "latest.old", "other"):
        run_until_killed(save_until_killed, tmp_path / name)
    assert len(list(tmp_path.iterdir())) == 3
    dcp.save(stamped(1), storage_writer=LazyWriter(tmp_path / "latest"))
    left = sorted(path.name for path in tmp_path.iterdir())
    assert [name.split(".dcp-")[0] for name in left] == [".latest.old", ".other", "latest"]


def test_a_save_that_is_about_to_be_published_survives_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are of the same name."""
    finish, is_first, has_planned = LazyWriter.finish, [True], threading.Event()

    def late(*arguments: Any, **named: Any) -> None:
        if is_first and is_first.pop():
            assert has_planned.wait(300)
        finish(*arguments, **named)

    monkeypatch.setattr(LazyWriter, "finish", late)
    writer = LazyWriter(tmp_path / "latest")
    first = dcp.async_save(stamped(1), storage_writer=writer)
    deadline = time.monotonic() + 300
    while is_first:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    dcp.async_save(stamped(2), storage_writer=writer).upload_completion.result(timeout=300)
    assert_stamped(load(tmp_path / "latest"), 2)
    has_planned.set()
    first.upload_completion.result(timeout=300)
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]
    writer.close()


def test_async_save_holds_the_step_it_was_called_at(tmp_path: Path) -> None:
    state, writer = stamped(0), LazyWriter(tmp_path / "none")
    nested = {"state": {0: {"moment": state["t1"]}}, "lr": 0.5, "list": [state["t4"]]}
    for step in range(4):
        stamp(state, step)
        folder = tmp_path / f"step-{step:09d}"
        response = dcp.async_save(
            {**state, "nested": nested}, checkpoint_id=folder, storage_writer=writer
        )
        writer.fence()
        stamp(state, -9)
        response.upload_completion.result(timeout=300)
        assert_stamped(load(folder), step)
        assert_stamped(back_from(LocalDisk(tmp_path), step=step)[1], step)
    writer.close()


def test_saves_that_overlap_go_to_a_folder_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = LazyWriter.finish

    def late(*arguments: Any, **named: Any) -> None:
        time.sleep(0.3)  # the next one begins meanwhile
        finish(*arguments, **named)

    monkeypatch.setattr(LazyWriter, "finish", late)
    state, writer, responses = stamped(0), LazyWriter(tmp_path / "none"), []
    for step in range(3):
        stamp(state, step)
        responses.append(
            dcp.async_save(state, checkpoint_id=tmp_path / str(step), storage_writer=writer)
        )
        writer.fence()
    stamp(state, -9)
    for step, response in enumerate(responses):
        response.upload_completion.result(timeout=300)
        assert_stamped(load(tmp_path / str(step)), step)
    writer.close()


def test_a_save_after_one_that_could_not_be_written(tmp_path: Path) -> None:
    state, writer = stamped(1), LazyWriter(tmp_path / "a file" / "below")
    (tmp_path / "a file").write_text("in the way")
    failed = dcp.async_save(state, storage_writer=writer)
    with pytest.raises(CheckpointException):
        failed.upload_completion.result(timeout=300)
    done = dcp.async_save(state, checkpoint_id=tmp_path / "one", storage_writer=writer)
    done.upload_completion.result(timeout=300)
    assert_stamped(load(tmp_path / "one"), 1)
    writer.close()


class Failing(DefaultSavePlanner):
    """Cannot plan."""

    def create_global_plan(self, *arguments: object) -> Any:
        raise ValueError("no plan")


def test_a_save_after_one_that_could_not_be_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch does not call the writer again after that."""
    monkeypatch.setattr(resihp.checkpoint.dcp, "_RELEASE_TIMEOUT_S", 30)
    state, writer = stamped(1), LazyWriter(tmp_path / "latest")
    failed = dcp.async_save(state, storage_writer=writer, planner=Failing())
    with pytest.raises(CheckpointException, match="no plan"):
        failed.upload_completion.result(timeout=300)
    dcp.async_save(state, storage_writer=writer).upload_completion.result(timeout=300)
    assert_stamped(load(tmp_path / "latest"), 1)
    writer.close()


class Uncopied:
    """A value that refuses a deep copy."""

    def __deepcopy__(self, memo: object) -> Uncopied:
        raise ValueError("no copy")


def test_a_save_after_one_that_could_not_be_staged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resihp.checkpoint.dcp, "_RELEASE_TIMEOUT_S", 30)
    state, writer = stamped(1), LazyWriter(tmp_path / "latest")
    with pytest.raises(ValueError, match="no copy"):
        dcp.async_save({**state, "object": Uncopied()}, storage_writer=writer)
    dcp.async_save(state, storage_writer=writer).upload_completion.result(timeout=300)
    assert_stamped(load(tmp_path / "latest"), 1)
    writer.close()


def test_a_save_in_the_training_thread_leaves_the_cache_to_one_under_way(tmp_path: Path) -> None:
    writer, is_planning, goes_on = LazyWriter(tmp_path), threading.Event(), threading.Event()

    class Late(DefaultSavePlanner):
        def finish_plan(self, plan: SavePlan) -> SavePlan:
            is_planning.set()
            assert goes_on.wait(60)
            return super().finish_plan(plan)

    under_way = dcp.async_save(
        stamped(1), checkpoint_id=tmp_path / "1", storage_writer=writer, planner=Late()
    )
    assert is_planning.wait(60)
    dcp.save(stamped(2), checkpoint_id=tmp_path / "2", storage_writer=writer)
    assert writer._staged is not None
    is_released = writer._staged.checkpoint.is_idle
    goes_on.set()
    under_way.upload_completion.result(timeout=300)
    assert (is_released, writer._staged.checkpoint.is_idle) == (False, True)
    for step in (1, 2):
        assert_stamped(load(tmp_path / str(step)), step)
    writer.close()


def test_async_save_fenced_by_the_optimizer(tmp_path: Path) -> None:
    model = torch.nn.Linear(1000, 1000)
    optimizer = torch.optim.AdamW(model.parameters())
    writer = LazyWriter(tmp_path / "none")
    writer.attach(optimizer, model)
    model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    expected = [tensor.clone() for tensor in model.state_dict().values()]
    response = dcp.async_save(state, checkpoint_id=tmp_path / "c", storage_writer=writer)
    optimizer.step()
    response.upload_completion.result(timeout=300)
    into = {"model": {key: torch.zeros_like(v) for key, v in model.state_dict().items()}}
    dcp.load(into, storage_reader=dcp.FileSystemReader(tmp_path / "c"))
    for loaded, tensor in zip(into["model"].values(), expected, strict=True):
        assert torch.equal(loaded, tensor)
    writer.close()
