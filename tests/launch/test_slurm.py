"""Launchers that srun starts, in a Slurm cluster of two nodes on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(
        os.geteuid() != 0 or any(not shutil.which(n) for n in ("srun", "slurmctld", "munged")),
        reason="needs root, and Debian's slurmctld, slurmd, slurm-client and munge",
    ),
]
LIMIT_S = 300.0
CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
NodeName={host} NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName={host}-2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=all Nodes=ALL Default=YES State=UP
"""
SCRIPT = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"rank {dist.get_rank()} counts {total.item():.0f}", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Path]:
    """A folder with `slurm.conf` and `script.py`, and the cluster running."""
    with ExitStack() as sockets:
        held = [sockets.enter_context(socket.socket()) for _ in range(3)]
        for each in held:
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in held]
    host = socket.gethostname()  # it sorts first, and its name leads to node 0
    for name in ("state", host, f"{host}-2"):
        (tmp_path / name).mkdir()
    (tmp_path / "slurm.conf").write_text(
        CONFIGURATION.format(folder=tmp_path, ports=ports, host=host)
    )
    (tmp_path / "script.py").write_text(SCRIPT)
    key = tmp_path / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    names = ("socket", "key", "pid", "log", "seed")
    options = [f"--{n}{'' if n == 'socket' else '-file'}={tmp_path}/munge.{n}" for n in names]
    commands = [
        ["munged", "--foreground", "--force", *options],
        ["slurmctld", "-D"],
        *(["slurmd", "-D", "-N", node] for node in (host, f"{host}-2")),
    ]
    environment = {**os.environ, "SLURM_CONF": str(tmp_path / "slurm.conf")}
    with (tmp_path / "daemons.log").open("wb") as log:
        daemons = [
            subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            for command in commands
        ]
        try:
            _wait_for_nodes(tmp_path)
            yield tmp_path
        finally:
            for daemon in reversed(daemons):
                daemon.send_signal(signal.SIGTERM)
            for daemon in daemons:
                daemon.wait(timeout=LIMIT_S)


def _wait_for_nodes(folder: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while True:
        found = _run(folder, "sinfo", "--noheader", "--format=%D %t")
        if found.stdout.split() == ["2", "idle"]:
            return
        assert time.monotonic() < deadline, (folder / "daemons.log").read_text() + found.stderr
        time.sleep(0.2)


def _run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name[:4] != "PET_"}
    return subprocess.run(
        command,
        env={**environment, "SLURM_CONF": str(folder / "slurm.conf")},
        cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip


def _srun(folder: Path, tasks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    return _run(
        folder, "srun", "--nodes=2", f"--ntasks-per-node={tasks}", "--kill-on-bad-exit=0",
        sys.executable, "-m", "resihp.launch", *arguments,
    )  # fmt: skip


def test_a_launcher_a_node_makes_one_job(slurm: Path) -> None:
    ended = _srun(slurm, 1, "--nproc-per-node", "2", "script.py")
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.split("\n")) == ["", *(f"rank {n} counts 4" for n in range(4))]


def test_two_launchers_a_node_are_refused(slurm: Path) -> None:
    ended = _srun(slurm, 2, "script.py")
    assert ended.returncode == 2
    assert "Slurm started 4 launchers on 2 nodes" in ended.stderr
