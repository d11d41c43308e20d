"""Modules `scheduler.py`, `detector.py` and `service.py` of the user next to a training script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from resihp.client import Client
from resihp.contracts import Job, Layout
from resihp.testing.synthetic_traces import Recipe, record, write_whatif
from service.launch import Sidecar
from tests.elastic.engine_job import SHAPE

ROOT = Path(__file__).parents[1]
RANKS = 2
STEPS = 6
USERS_OWN = "def half(rate):\n    return rate / 2\n"
SCRIPT = """
import os, signal, sys

import torch

import detector, scheduler, service
from resihp.contracts import Job, Layout
from resihp.elastic import Callbacks, Setup, train
from resihp.elastic.models import Llama
from resihp.elastic.optim import Optimizer
from tests.elastic.engine_job import SHAPE, batch

torch.set_num_threads(1)
rank, doomed = int(os.environ["RANK"]), int(sys.argv[1])
layout = Layout.grid(dp={ranks}, pp=1, tp=1, layers=4, units=4)
job = Job(name="own", layout=layout, microbatches=6, model=SHAPE)


def on_step(reduced, ms, plan):
    if rank == doomed and reduced.step == 2:
        os.kill(os.getpid(), signal.SIGKILL)


optimizer = Optimizer(torch.optim.AdamW, lr=scheduler.half(1e-2))
trainer = train(
    Setup(Llama(SHAPE), optimizer, batch), job, {steps}, callbacks=Callbacks(on_step=on_step)
)
assert detector.half(1) == service.half(1) == scheduler.half(1) == 0.5
print("rank", rank, "completed", trainer.completed, "in", trainer.plan.layout.dp, flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder, with modules that have the names of ours."""
    for name in ("scheduler", "detector", "service"):
        (tmp_path / f"{name}.py").write_text(USERS_OWN)
    (tmp_path / "train.py").write_text(SCRIPT.format(ranks=RANKS, steps=STEPS))
    return tmp_path


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run in the user's folder, which is then first on `sys.path`."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},  # the script uses the tests' small job
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("doomed", range(RANKS))
def test_a_job_survives_the_loss_of_any_of_its_ranks(doomed: int, folder: Path) -> None:
    launch = ("-m", "resihp.launch", "--nproc-per-node", str(RANKS))
    done = python(folder, *launch, "train.py", str(doomed))
    assert done.returncode == 0, done.stderr
    for rank in range(RANKS):
        has_completed = f"rank {rank} completed {STEPS} in {RANKS - 1}" in done.stdout
        assert has_completed == (rank != doomed), done.stdout + done.stderr


def test_a_sidecar_that_is_started_there_plans(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    layout = Layout.grid(dp=2, pp=1, tp=1, layers=4, units=4)
    with Sidecar(folder / "data") as sidecar:
        client = Client(sidecar.url)
        client.register(Job(name="own", layout=layout, microbatches=6, model=SHAPE))
        client.report_failure("own", ranks=[1], step=3, plan_version=0, reported_by=0, detail="")
        plan = client.plan("own", after=0, wait=30)
    assert plan is not None, sidecar.tail()
    assert plan.layout.ranks == (0,)


def test_a_trace_is_analyzed_there(folder: Path) -> None:
    trace = folder / "trace.parquet"
    write_whatif(trace, record(Recipe(dp=2, pp=2)))
    done = python(folder, "-m", "resihp.cli", "analyze", str(trace), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["layout"] == {"dp": 2, "pp": 2, "tp": 1}


def test_an_import_that_a_module_of_the_user_hides_says_so(folder: Path) -> None:
    done = python(folder, "-c", "from resihp.offline import analyze")
    assert "ResiHP's package detector is hidden by" in done.stderr
    assert "detector.py: rename that module" in done.stderr
