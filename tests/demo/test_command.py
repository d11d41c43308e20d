"""The demo's command: a finished run is never lost to the path of one of its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from records import demo_record
from typer.testing import CliRunner, Result

from resihp.cli._demo import app
from resihp.demo import run


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders of the demos that were run, each of which goes as promised."""
    folders: list[Path] = []

    def play(settings: object, folder: Path, display: object) -> object:
        folders.append(folder)
        return demo_record()

    monkeypatch.setattr(run, "play", play)
    return folders


def demo(*options: str | Path) -> Result:
    return CliRunner().invoke(app, ["demo", *map(str, options)])


def test_folders_of_its_files_are_made(played, tmp_path):
    record, trace = tmp_path / "a" / "b" / "run.json", tmp_path / "c" / "run.parquet"
    result = demo("--out", tmp_path / "out", "--json", record, "--trace", trace)
    assert result.exit_code == 0
    assert json.loads(record.read_text())["passed"] is True
    assert trace.exists()
    assert f"resihp analyze {trace}" in result.stdout


@pytest.mark.parametrize("options", [("--out",), ("--json",), ("--trace",)])
def test_a_path_through_a_file_is_told_before_the_run(played, tmp_path, options):
    (tmp_path / "file").write_text("x")
    path = tmp_path / "file" if options == ("--out",) else tmp_path / "file" / "run"
    result = demo("--out", tmp_path / "out", *options, path)
    assert (result.exit_code, played) == (2, [])
    assert result.stderr.startswith("resihp demo: ")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("option", ["--json", "--trace"])
def test_the_summary_is_shown_although_a_file_cannot_be_written(played, tmp_path, option):
    result = demo("--out", tmp_path / "out", option, tmp_path)
    assert result.exit_code == 2
    assert result.stderr.startswith("resihp demo: ")
    assert "report.html" in result.stdout
    assert "checks" in result.stdout
