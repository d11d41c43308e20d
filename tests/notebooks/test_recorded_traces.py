"""The notebook on recorded traces runs, and its committed outputs say the same."""

import os
from pathlib import Path

import nbformat
import pytest

from resihp.offline import read_trace, write_trace
from resihp.testing.synthetic_traces import Recipe, Trouble, record, write_whatif
from tests.notebooks.test_planning import execute, text_of

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks" / "recorded_traces.ipynb"


def own_recording(folder):
    """A recording in our own format of a job with a slow device."""
    recipe = Recipe(steps=20, troubles=(Trouble(replica=1, stage=1, factor=1.4, since=8),))
    write_whatif(folder / "job.parquet", record(recipe))
    trace = read_trace(folder / "job.parquet")
    write_trace(folder / "own.parquet", trace.job, trace.batches())
    return folder / "own.parquet"


def run(monkeypatch, tmp_path, **environment):
    for name in ("RESIHP_TRACES", "RESIHP_DEMO_TRACE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    execute(notebook, tmp_path)
    return notebook.cells


def check_synthetic(text):
    """Assert the key facts of the notebook on synthetic jobs."""
    assert "due to stages of unequal weight" in text
    assert "due to sequences of unequal length" in text
    assert "due to a slow device" in text


# The kernel's sockets are closed by its own garbage collection, at a time of its choosing.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
def test_the_notebook_runs_on_synthetic_jobs(monkeypatch, tmp_path):
    cells = run(monkeypatch, tmp_path, RESIHP_DEMO_TRACE=own_recording(tmp_path))
    check_synthetic(text_of(cells))
    committed = nbformat.read(NOTEBOOK, as_version=4).cells
    *_, with_demo = cells
    assert "RESIHP_DEMO_TRACE" in with_demo.source
    assert text_of(cells[:-1]) == text_of(committed[:-1])


def test_the_committed_notebook_shows_its_plots():
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 4
    assert "Traceback" not in text_of(cells)


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
def test_the_notebook_runs_on_the_published_jobs(monkeypatch, tmp_path):
    named = os.environ.get("RESIHP_TRACES")
    folder = Path(named) if named else ROOT.parent / "shared" / "traces"
    if not (folder / "trace-SE.parquet").is_file():
        pytest.skip("RESIHP_TRACES names no folder with the published traces")
    text = text_of(run(monkeypatch, tmp_path, RESIHP_TRACES=folder))
    assert "{'S': 1.1787, 'ideal step (s)': 1.8433, 'M_S': 1.2194, 'M_W': 0.0314}" in text
    assert "{'S': 1.5374, 'ideal step (s)': 5.8975, 'M_S': 0.6877, 'M_W': 0.0251}" in text
    assert "named: [10]" in text
