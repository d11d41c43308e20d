"""The demo's folder: what an earlier demo left is replaced, what anybody else left is kept."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from resihp.demo import run
from resihp.demo.live.display import LiveDisplay
from resihp.demo.training.settings import DemoSettings


class StartedError(Exception):
    """The demo has made room and starts."""


def start_demo(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sidecar(path: Path) -> None:
        raise StartedError

    monkeypatch.setattr(run, "Sidecar", sidecar)
    settings = DemoSettings()
    display = LiveDisplay(settings.plan(), settings.steps, console=Console(file=io.StringIO()))
    run.play(settings, folder, display)


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x")


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_files_of_an_earlier_demo_are_removed_and_no_others(tmp_path, monkeypatch):
    mine = ("dataset.jsonl", "embeddings.f64", "events.jsonl", "data/loads.f64")
    write(tmp_path, *mine)
    with pytest.raises(StartedError):
        start_demo(tmp_path, monkeypatch)
    write(tmp_path, "logs/rank-0.log", "sidecar/db", "events-7.jsonl", "records-0.jsonl")
    write(tmp_path, "reference.jsonl", "loads.f64", "calibration-loads.f64", "report.html")
    with pytest.raises(StartedError):
        start_demo(tmp_path, monkeypatch)
    assert files(tmp_path) == {*mine, ".resihp-demo"}


@pytest.mark.parametrize("name", ["logs/precious.log", "sidecar/db", "records-0.jsonl"])
def test_a_folder_with_such_files_of_somebody_else_is_refused(tmp_path, monkeypatch, name):
    write(tmp_path, name)
    with pytest.raises(run.DemoError, match="not of an earlier demo"):
        start_demo(tmp_path, monkeypatch)
    assert files(tmp_path) == {name}
