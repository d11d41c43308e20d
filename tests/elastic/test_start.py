"""Training scripts start under torchrun and under our launcher, as users know it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from resihp.contracts import ContractError
from resihp.elastic.environment import Environment

STEPS = 8
SCRIPT = "tests/elastic/train_script.py"


def launched(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    root = str(Path(__file__).parents[2])  # the script uses the tests' small job
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env={**os.environ, "PYTHONPATH": root},
    )


def test_torchrun_starts_a_script() -> None:
    done = launched(
        "torch.distributed.run", "--nproc-per-node=2", "--master-port=0",
        "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", SCRIPT, str(STEPS), "-1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank} completed {STEPS} in 2 replicas" in done.stdout, done.stderr


def test_our_launcher_keeps_a_job_alive_that_loses_a_rank() -> None:
    done = launched("resihp.elastic.launch", "--nproc-per-node=4", SCRIPT, str(STEPS), "3")
    assert done.returncode == 0, done.stderr
    assert "rank 3 ended with -9" in done.stderr
    assert f"rank 0 completed {STEPS}" in done.stdout, done.stderr
    assert "rank 3 completed" not in done.stdout


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
