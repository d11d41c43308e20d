"""The notebook on planning runs from top to bottom, and its committed outputs say the same."""

from pathlib import Path

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks" / "planning.ipynb"


def test_the_planning_notebook_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    check_outputs(notebook)
    committed = text_of(notebook.cells)
    execute(notebook, tmp_path)
    check_outputs(notebook)
    assert text_of(notebook.cells) == committed


def execute(notebook, folder):
    """Run a notebook; its kernel listens on sockets in a folder, where no port can be taken."""
    kernel = {"transport": "ipc", "ip": str(folder / "kernel")}
    NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(ROOT)}},
        config=Config({"KernelManager": kernel}),
    ).execute()


def text_of(cells):
    """The printed outputs of cells."""
    return "".join(output.get("text", "") for cell in cells for output in cell.get("outputs", []))


def check_outputs(notebook):
    """Assert the key facts and the plots in the outputs of the notebook."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = text_of(notebook.cells)
    assert "rank 17 has stopped and is left out" in text
    assert "most work done: joint" in text
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
