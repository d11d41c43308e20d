"""Training scripts start under torchrun and under our launcher, as users know it."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import urllib3

from resihp.checkpoint import LocalDisk
from resihp.client import Client
from resihp.contracts import ContractError
from resihp.elastic.rendezvous.environment import Environment
from tests.launch.launcher_process import launched
from tests.launch.train_script import job_of
from tests.service.forked_sidecar import ForkedSidecar

STEPS = 8
ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "tests" / "launch" / "train_script.py")
OURS = ("resihp.launch",)
TORCHRUN = (
    "torch.distributed.run", "--master-port=0",
    "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0",
)  # fmt: skip


def started(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )


def ended(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """When it has ended by itself, which takes a bounded time."""
    try:
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def test_torchrun_starts_a_script() -> None:
    done = ended(started(*TORCHRUN, "--nproc-per-node=2", SCRIPT, str(STEPS), "-1"))
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank} completed {STEPS} in 2 replicas" in done.stdout, done.stderr


@pytest.mark.parametrize("closed", [(0, 1, 2), (1,), (2,)])
def test_streams_that_are_closed_are_in_nobodys_way(
    tmp_path: Path, closed: tuple[int, ...]
) -> None:
    (tmp_path / "script.py").write_text(
        "import os, sys\n"
        "for stream in (sys.stdout, sys.stderr):\n"
        "    print('words' * 100_000, file=stream, flush=True)\n"
        "sys.exit(7)\n"
    )
    shell = " ".join(["exec", '"$@"', *(f"{number}>&-" for number in closed)])
    launcher = (sys.executable, "-m", *OURS, "--max-restarts=0", str(tmp_path / "script.py"))
    done = subprocess.run(
        ["sh", "-c", shell, "sh", *launcher],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=300,
        check=False,
    )
    assert done.returncode == 7, done.stderr
    for number, told in ((1, done.stdout), (2, done.stderr)):
        assert (b"words" in told) is (number not in closed)


def test_our_launcher_keeps_a_job_alive_that_loses_a_rank(tmp_path: Path) -> None:
    done = launched(tmp_path, "--nproc-per-node=4", SCRIPT, str(STEPS), "3")
    assert done.returncode == 0, done.stderr
    assert "rank 3 ended with -9" in done.stderr
    assert f"rank 0 completed {STEPS}" in done.stdout, done.stderr
    assert "rank 3 completed" not in done.stdout


@pytest.mark.parametrize("given", [{}, {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}])
def test_memory_of_ranks_is_in_huge_pages_unless_the_user_says_otherwise(
    tmp_path: Path, given: dict[str, str]
) -> None:
    library, version = platform.libc_ver()
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    is_asked = setting.exists() and "[madvise]" in setting.read_text()
    if not is_asked or library != "glibc" or tuple(map(int, version.split("."))) < (2, 35):
        pytest.skip("here memory is not given in huge pages to those that ask for them")
    (tmp_path / "script.py").write_text(
        "import re, torch\n"
        "tensor = torch.ones(16 << 20)\n"
        "middle, is_there = tensor.data_ptr() + tensor.nbytes // 2, False\n"
        "for line in open('/proc/self/smaps'):\n"
        "    if span := re.match('([0-9a-f]+)-([0-9a-f]+) ', line):\n"
        "        is_there = int(span[1], 16) <= middle < int(span[2], 16)\n"
        "    elif is_there and line.startswith('VmFlags:'):\n"
        "        print('huge' if ' hg' in line else 'small')\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "GLIBC_TUNABLES"}
    done = subprocess.run(
        [sys.executable, "-m", *OURS, str(tmp_path / "script.py")],
        capture_output=True,
        text=True,
        env={**environment, "PYTHONPATH": str(ROOT), **given},
        timeout=300,
        check=False,
    )
    assert done.stdout == ("small\n" if given else "huge\n"), done.stderr


def test_a_sidecar_that_was_just_started_watches_a_script(tmp_path: Path) -> None:
    with ForkedSidecar(tmp_path) as sidecar:
        done = launched(
            tmp_path, "--nproc-per-node=2", SCRIPT, str(STEPS), "-1", RESIHP_URL=sidecar.url
        )
        assert done.returncode == 0, done.stderr
        client = Client(sidecar.url, timeout=60.0)
        told = f"{sidecar.url}/v1/jobs/script/steps?after=-1"
        deadline, ranks, steps = time.monotonic() + 300, set[int](), list[int]()
        while ranks != {0, 1} or len(steps) < STEPS - 1:  # records are accepted, then applied
            assert time.monotonic() < deadline, done.stderr + sidecar.tail()
            time.sleep(0.1)
            ranks = {verdict.rank for verdict in client.verdicts("script")}
            answer = urllib3.request("GET", told, timeout=60).json()
            steps = [step["step"] for step in answer["steps"]]
    assert steps == list(range(STEPS - 1)), done.stderr


def test_a_sidecar_that_wants_a_token_plans_for_a_script_that_has_it(tmp_path: Path) -> None:
    with ForkedSidecar(tmp_path, options=("--token", "secret")) as sidecar:
        client = Client(sidecar.url, "secret", timeout=60.0)
        client.register(job_of(1))
        done = launched(
            tmp_path, "--nproc-per-node=2", SCRIPT, str(STEPS), "1",
            RESIHP_URL=sidecar.url, RESIHP_TOKEN="secret",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        plan = client.plan("script", after=0, wait=30)
    assert plan is not None, done.stderr
    assert plan.layout.ranks == (0,)
    assert "without the sidecar" not in done.stderr


@pytest.mark.parametrize("launcher", [OURS, TORCHRUN])
def test_a_job_that_is_told_to_end_saves_its_last_step(
    launcher: tuple[str, ...], tmp_path: Path
) -> None:
    """A rank that is told a step before the other hands over, and the other one goes on."""
    arguments = ("--nproc-per-node=2", SCRIPT, str(10**6), "-1")
    process = started(*launcher, *arguments, CHECKPOINTS=str(tmp_path))
    deadline = time.monotonic() + 300
    while len(list(tmp_path.glob("begun-*"))) < 2 and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()
    done = ended(process)
    completed = [int(number) for number in re.findall(r"completed (\d+)", done.stdout)]
    assert len(completed) == 2, done.stdout + done.stderr
    assert LocalDisk(tmp_path).steps()[-1] == max(completed) - 1, done.stderr


def test_the_environment_is_read_as_torchrun_sets_it() -> None:
    given = {
        "RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "mine", "TORCHELASTIC_RESTART_COUNT": "2",
    }  # fmt: skip
    assert Environment.read(given) == Environment(
        0, 4, "node0", 29500, "resihp/mine/2", True, False
    )
    hosted = {**given, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert not Environment.read(hosted).hosts_store


def test_a_missing_variable_is_named() -> None:
    with pytest.raises(ContractError, match="WORLD_SIZE"):
        Environment.read({"RANK": "0"})


def test_a_rank_beyond_the_world_is_refused_unless_it_joins() -> None:
    given = {"RANK": "3", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    with pytest.raises(ContractError, match="RANK: must be below WORLD_SIZE, 2, not 3"):
        Environment.read(given)
    assert Environment.read({**given, "RESIHP_JOIN": "1"}).rank == 3
