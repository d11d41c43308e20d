"""Any script is restarted from memory where that helps, and the training is the undisturbed one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "launch" / "restart_script.py"
STEPS, RANKS = 12, 3


def launched(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "resihp.launch", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def run(folder: Path, ranks: str, *events: str) -> subprocess.CompletedProcess[str]:
    return launched(folder, "--nproc-per-node", ranks, str(SCRIPT), ".", str(STEPS), *events)


def losses(folder: Path, attempt: int, rank: int = 0) -> dict[int, float]:
    lines = (folder / f"losses-{attempt}-{rank}").read_text().splitlines()
    return dict(json.loads(line) for line in lines)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    done = run(folder, str(RANKS))
    assert done.returncode == 0, done.stderr
    return losses(folder, 0)


def test_every_rank_is_lost_in_turn(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    doomed = [(0, 1, 3), (1, 0, 5), (2, 2, 8)]
    done = run(tmp_path, str(RANKS), *(f"{a}:{rank}:{step}:kill" for a, rank, step in doomed))
    assert done.returncode == 0, done.stderr
    seen: dict[int, float] = {}
    for attempt in range(len(doomed) + 1):
        of_attempt = losses(tmp_path, attempt)
        assert attempt == 0 or min(of_attempt) > 0, "it did not begin again"
        assert min(of_attempt) <= len(seen)
        seen |= of_attempt
    assert seen == pytest.approx(undisturbed, rel=1e-5)


def test_a_broken_device_is_left_out(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    done = run(tmp_path, f"2:{RANKS}", "0:1:4:device")
    assert done.returncode == 0, done.stderr
    assert "device 1 of this node is left out" in done.stderr
    assert not (tmp_path / "losses-1-2").exists()
    assert {**losses(tmp_path, 0), **losses(tmp_path, 1)} == pytest.approx(undisturbed, rel=1e-3)


def test_a_bug_of_the_script_ends_it_after_two_tries(tmp_path: Path) -> None:
    done = run(tmp_path, "2", "0:1:7:bug")
    assert done.returncode == 1, done.stderr
    assert not (tmp_path / "losses-2-0").exists()
    told = done.stderr.split("rank 1 failed with status 1:")[-1]
    assert "Traceback" in told
    assert told.rstrip().endswith("ValueError: no sample of step 7")
    assert not Path((tmp_path / "memory").read_text()).exists()


def test_without_progress_it_ends(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    done = launched(tmp_path, "--nproc-per-node", "2", "script.py")
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    assert "for the third time without progress: the job ends" in done.stderr
    done = launched(tmp_path, "--max-restarts", "0", "script.py")
    assert "there have been 0 restarts: the job ends" in done.stderr


def test_an_elastic_job_that_lost_all_ranks_starts_again(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, torch\nfrom resihp.elastic import Replicas\n"
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for step in Replicas(model, optimizer, microbatches=2).steps(4):\n"
        "    for index in step:\n"
        "        if step.number == 2 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "            os.kill(os.getpid(), 9)\n"
        "        model(torch.ones(1, 4)).sum().backward()\n"
        "    optimizer.step()\n"
        "print('completed', flush=True)\n"
    )
    done = launched(tmp_path, "--nproc-per-node", "2", "script.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("completed") == 2
    assert done.stderr.count("restart") == 1, done.stderr


def test_two_nodes_restart_alike(tmp_path: Path) -> None:
    """The second launcher stands for another node; it has more ranks."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nimport torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "attempt, rank = int(os.environ['TORCHELASTIC_RESTART_COUNT']), dist.get_rank()\n"
        "if (attempt, rank) == (0, 2):\n    os.kill(os.getpid(), 9)\n"
        "dist.barrier()\n"
        "print('attempt', attempt, 'rank', rank, 'of', dist.get_world_size(), flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def started(node: int, port: int) -> subprocess.Popen[str]:
        meeting = (
            "--nnodes",
            "2",
            "--node-rank",
            str(node),
            "--rdzv-endpoint",
            f"127.0.0.1:{port}",
        )
        processes = ("--nproc-per-node", str(node + 1))
        return subprocess.Popen(
            [sys.executable, "-m", "resihp.launch", *meeting, *processes, str(script)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    launchers = [started(0, 0)]
    assert launchers[0].stderr is not None
    found = (re.search(r"store at \S+:(\d+),", line) for line in launchers[0].stderr)
    address = next(one for one in found if one)
    launchers.append(started(1, int(address[1])))
    try:
        told = [launcher.communicate(timeout=300) for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
    assert [launcher.returncode for launcher in launchers] == [0, 0], told
    lines = sorted(line for out, _ in told for line in out.splitlines())
    assert lines == [f"attempt 1 rank {rank} of 3" for rank in range(3)]
