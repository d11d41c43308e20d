"""Nodes that are lost, leave and come: the others restart without them, or with those that wait.

Launchers of one machine stand for nodes.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.elastic.engine_job import is_running

ROOT = Path(__file__).parents[2]
LIMIT_S = 400.0
HEARTBEAT_S = 10
"""All launchers of a job start, and each one beats, within less than it on a busy machine too."""
SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], dist.get_rank()
told = folder / f"{attempt}-{rank}-of-{dist.get_world_size()}"
while True:
    flag = torch.tensor(float((folder / "finish").exists()))
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    told.with_suffix(".part").write_text(f"{os.getpid()} {os.environ['GROUP_RANK']}")
    told.with_suffix(".part").rename(told)
    if flag:
        break
    time.sleep(0.05)
dist.destroy_process_group()
"""


class Launchers:
    """Launchers by name, each in a process group of its own, with their output in files."""

    def __init__(self, folder: Path, *command: str) -> None:
        self.folder, self.store = folder, "127.0.0.1:0"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "script.py").write_text(SCRIPT)
        self._command = command or (str(folder / "script.py"), str(folder))

    def start(self, node: int, *options: str, nodes: str = "1:2") -> None:
        name = f"node-{node}"
        with (self.folder / name).open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [
                    *(sys.executable, "-m", "resihp.launch", "--nnodes", nodes),
                    *("--node-rank", str(node), "--rdzv-endpoint", self.store),
                    *("--heartbeat", str(HEARTBEAT_S), "--shutdown-timeout", "2", *options),
                    *self._command,
                ],
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if node == 0:
            pattern = re.compile(r"store at (\S+),")
            self.until(lambda: pattern.search(self.log(0)) is not None)
            self.store = pattern.findall(self.log(0))[0]

    def log(self, node: int) -> str:
        return (self.folder / f"node-{node}").read_text()

    def until(self, check: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not check():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.05)

    def runs(self, attempt: int, ranks: int) -> list[int]:
        """Processes of an attempt, once all its ranks have made a step."""
        self.until(lambda: self.has_run(attempt, ranks))
        files = [self.folder / f"{attempt}-{rank}-of-{ranks}" for rank in range(ranks)]
        return [int(file.read_text().split()[0]) for file in files]

    def has_run(self, attempt: int, ranks: int) -> bool:
        return all((self.folder / f"{attempt}-{rank}-of-{ranks}").exists() for rank in range(ranks))

    def kill(self, node: int) -> None:
        os.killpg(self._processes[f"node-{node}"].pid, signal.SIGKILL)

    def stop(self, node: int, number: int) -> None:
        os.kill(self._processes[f"node-{node}"].pid, number)

    def status(self, node: int) -> int:
        return self._processes[f"node-{node}"].wait(LIMIT_S)

    def logs(self) -> str:
        return "\n".join(f"{name}:\n{(self.folder / name).read_text()}" for name in self._processes)

    def close(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def launchers(folder: Path, *command: str) -> Iterator[Launchers]:
    found = Launchers(folder, *command)
    try:
        yield found
    finally:
        found.close()


def test_nodes_are_lost_leave_and_are_replaced(tmp_path: Path) -> None:
    """Two nodes of 2 and 1 ranks and two spares: a spare dies, a node is lost, one leaves."""
    with launchers(tmp_path) as job:
        job.start(0, "--nproc-per-node", "2")
        job.start(1)
        pids = job.runs(0, 3)
        job.start(2, "--preemption-file", str(tmp_path / "notice"))
        job.until(lambda: "waits as a standby" in job.log(2))
        job.start(3)
        job.until(lambda: "waits as a standby" in job.log(3))
        job.kill(3)
        job.kill(1)
        job.until(lambda: not is_running(pids[2]))
        job.runs(1, 3)
        assert "node 1 was lost: restart" in job.log(0)
        assert "attempt 1 begins, with ranks [2]" in job.log(2)
        (tmp_path / "notice").write_text("maintenance")
        # The spare that died within the last heartbeat may be taken first, and cost a restart.
        job.until(lambda: job.has_run(2, 2) or job.has_run(3, 2))
        assert job.status(2) == 128 + signal.SIGTERM, job.logs()
        assert re.search(r"found \S+notice: maintenance: this node leaves the job", job.log(2))
        assert "node 2 leaves the job (found" in job.log(0)
        (tmp_path / "finish").touch()
        assert job.status(0) == 0, job.logs()
        restarts = 3 if "node 3 was lost" in job.log(0) else 2
        assert job.log(0).count(": restart") == restarts


def test_the_job_ends_with_fewer_nodes_than_it_needs(tmp_path: Path) -> None:
    """The launcher that is stopped for too long learns that it was given up."""
    with launchers(tmp_path) as job:
        job.start(0, nodes="2")
        job.start(1, nodes="2")
        pids = job.runs(0, 2)
        job.stop(1, signal.SIGSTOP)
        assert job.status(0) == 69, job.logs()
        assert "node 1 was lost: 1 of at least 2 nodes is left: the job ends" in job.log(0)
        job.stop(1, signal.SIGCONT)
        assert job.status(1) != 0, job.logs()
        job.until(lambda: not any(map(is_running, pids)))


def test_a_notice_at_node_0_ends_the_job_on_all(tmp_path: Path) -> None:
    with launchers(tmp_path) as job:
        job.start(0)
        job.start(1)
        pids = job.runs(0, 2)
        job.stop(0, signal.SIGUSR1)
        job.stop(0, signal.SIGTERM)  # the second notice changes nothing
        assert job.status(0) == 128 + signal.SIGUSR1, job.logs()
        assert job.status(1) == 128 + signal.SIGTERM, job.logs()
        for node in (0, 1):
            assert "node 0 leaves the job (got SIGUSR1): the job ends" in job.log(node)
        assert not any(map(is_running, pids))
