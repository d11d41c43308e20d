"""The scripts that the documentation shows run as written; one loses a replica on the way."""

from __future__ import annotations

import fcntl
import os
import re
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.launch.launcher_process import LauncherProcess, launched

ROOT = Path(__file__).parents[2]
PAGE_BYTES = 4096
"""What a pipe holds at least: much less than a script with several processes prints."""
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


def losses_of(
    folder: Path, processes: int, script: Path, *, doomed: int | None = None
) -> dict[int, float]:
    """Losses by step; the process of rank `doomed` is killed when the third step is told.

    Nothing is read ahead, and what is not read soon fills the pipe: the job waits to be killed.
    """
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PAGE_BYTES)
    errors = folder / "errors"
    with os.fdopen(write, "wb") as out, errors.open("wb") as err:
        option = f"--nproc-per-node={processes}"
        job = LauncherProcess(folder, option, str(script), out=out, err=err)
    known: dict[int, float] = {}
    try:
        with os.fdopen(read, "rb", buffering=0) as lines:
            for step, loss in losses(line.decode() for line in lines):
                if doomed is not None and step == 2 and step not in known:
                    [fork_server] = children(job.pid)
                    os.kill(children(fork_server)[doomed], signal.SIGKILL)
                known[step] = loss
        assert job.wait(60) == 0, errors.read_text()
    finally:
        job.kill()
    if doomed is not None:
        assert f"rank {doomed} ended with" in errors.read_text()
    return known


def children(pid: int) -> list[int]:
    """Processes that a process has started, in order."""
    told = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return sorted(int(child) for child in told.split())


@pytest.mark.timeout(300)  # three processes import torch
def test_the_script_of_the_documentation(tmp_path: Path) -> None:
    path = script(tmp_path)
    undisturbed = losses_of(tmp_path, 1, path)
    hurt = losses_of(tmp_path, 2, path, doomed=1)
    assert sorted(hurt) == list(range(100))
    assert hurt == pytest.approx(undisturbed, abs=1e-3)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["hsdp", "pipeline"])
def test_the_scripts_with_several_processes_a_replica(name: str, tmp_path: Path) -> None:
    """The mate of the process that is killed ends too, and is no failure of the script."""
    known = losses_of(tmp_path, 4, script(tmp_path, "replicas.md", name), doomed=3)
    assert sorted(known) == list(range(100))
    assert known[99] < known[0]


@pytest.mark.timeout(300)
def test_the_script_with_quotas(tmp_path: Path) -> None:
    """Without a sidecar quotas stay even; the losses are those of one process."""
    told: list[dict[int, float]] = []
    for processes in (1, 2):
        option = f"--nproc-per-node={processes}"
        done = launched(tmp_path, option, str(script(tmp_path, "quotas.md")), RESIHP_URL="")
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("quotas (4, 4)") == (20 if processes == 2 else 0)
        lines = re.findall(r"step (\d+) loss ([\d.]+)", done.stdout)
        told.append({int(step): float(loss) for step, loss in lines})
    assert sorted(told[0]) == list(range(20))
    assert told[1] == pytest.approx(told[0], abs=2e-5)
