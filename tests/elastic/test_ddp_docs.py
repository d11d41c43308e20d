"""The scripts that the documentation shows run as written; one loses a replica on the way."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"step (\d+) loss ([\d.]+) replicas \(([\d, ]+)\)")


def script(folder: Path, page: str = "recovery.md", name: str = "train") -> Path:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    code = re.search(rf"```python\n(# {name}\.py\n.*?)```", text, re.DOTALL)
    assert code is not None
    path = folder / f"{name}.py"
    path.write_text(code[1], encoding="utf-8")
    return path


def losses(lines: Iterable[str]) -> Iterator[tuple[int, float]]:
    """Step and loss, as the script prints them; two processes may have written into one line."""
    for line in lines:
        for told in LINE.finditer(line):
            yield int(told[1]), float(told[2])


def launched(processes: int, path: Path, *, doomed: int | None = None) -> dict[int, float]:
    """Losses by step; the process of rank `doomed` is killed when the third step is told."""
    command = [sys.executable, "-m", "resihp.launch", f"--nproc-per-node={processes}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(
        [*command, str(path)],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    known: dict[int, float] = {}
    assert job.stdout is not None
    assert job.stderr is not None
    with job, job.stdout, job.stderr:
        for step, loss in losses(job.stdout):
            if doomed is not None and step == 2 and step not in known:
                [fork_server] = children(job.pid)
                os.kill(children(fork_server)[doomed], signal.SIGKILL)
            known[step] = loss
        errors = job.stderr.read()
    assert job.returncode == 0, errors
    if doomed is not None:
        assert f"rank {doomed} ended with" in errors
    return known


def children(pid: int) -> list[int]:
    """Processes that a process has started, in order."""
    told = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return sorted(int(child) for child in told.split())


@pytest.mark.timeout(300)  # three processes import torch
def test_the_script_of_the_documentation(tmp_path: Path) -> None:
    path = script(tmp_path)
    undisturbed = launched(1, path)
    hurt = launched(2, path, doomed=1)
    assert sorted(hurt) == list(range(100))
    assert hurt == pytest.approx(undisturbed, abs=1e-3)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["hsdp", "pipeline"])
def test_the_scripts_with_several_processes_a_replica(name: str, tmp_path: Path) -> None:
    """The mate of the process that is killed ends too, and is no failure of the script."""
    losses = launched(4, script(tmp_path, "replicas.md", name), doomed=3)
    assert sorted(losses) == list(range(100))
    assert losses[99] < losses[0]


@pytest.mark.timeout(300)
def test_the_script_with_quotas(tmp_path: Path) -> None:
    """Without a sidecar quotas stay even; the losses are those of one process."""
    told: list[dict[int, float]] = []
    for processes in (1, 2):
        command = [sys.executable, "-m", "resihp.launch", f"--nproc-per-node={processes}"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        environment.pop("RESIHP_URL", None)
        done = subprocess.run(
            [*command, str(script(tmp_path, "quotas.md"))],
            capture_output=True,
            text=True,
            timeout=250,
            env=environment,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("quotas (4, 4)") == (20 if processes == 2 else 0)
        lines = re.findall(r"step (\d+) loss ([\d.]+)", done.stdout)
        told.append({int(step): float(loss) for step, loss in lines})
    assert sorted(told[0]) == list(range(20))
    assert told[1] == pytest.approx(told[0], abs=2e-5)
