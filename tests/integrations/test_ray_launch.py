"""`resihp run` in a placement group of Ray: bundles stand for nodes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from resihp.contracts import ContractError
from resihp.integrations import ray_launch
from tests.launch.launchers import SCRIPT

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("default")]
LIMIT_S = 300.0


def until(check: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def ray() -> Iterator[Any]:
    found = pytest.importorskip("ray")
    found.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield found
    found.shutdown()


class RunningJob:
    """Ranks of the script, by the files that they write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "script.py").write_text(SCRIPT)

    def has_run(self, attempt: int, ranks: int) -> bool:
        return all((self.folder / f"{attempt}-{r}-of-{ranks}").exists() for r in range(ranks))

    def rank_of_bundle(self, bundle: int, attempt: int, ranks: int) -> int:
        """Process of the rank of a bundle."""
        told = [
            (self.folder / f"{attempt}-{rank}-of-{ranks}").read_text().split()
            for rank in range(ranks)
        ]
        (pid,) = (int(pid) for pid, node in told if int(node) == bundle)
        return pid


def test_a_lost_actor_is_replaced_and_its_bundle_takes_part_again(ray: Any, tmp_path: Path) -> None:
    """At once if the new launcher is there before the others restart, else at the next restart."""
    job = RunningJob(tmp_path)
    group = ray.util.placement_group([{"CPU": 1}] * 2)
    ray.get(group.ready())
    command = ["--nnodes", "1:2", "--heartbeat", "10", str(tmp_path / "script.py"), str(tmp_path)]
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(ray_launch.run, command, group)
        try:
            until(lambda: job.has_run(0, 2) or ended.done())
            rank = job.rank_of_bundle(1, 0, 2)
            launcher = parent(parent(rank))
            os.kill(parent(launcher), signal.SIGKILL)  # the actor
            until(lambda: not is_running(launcher) and not is_running(rank))
            until(lambda: job.has_run(1, 1) or job.has_run(1, 2) or ended.done())
            if not job.has_run(1, 2):
                logs = Path("/tmp/ray/session_latest/logs")
                words = "waits as a standby: attempt 1"
                until(lambda: any(words in one.read_text() for one in logs.glob("worker*")))
                os.kill(job.rank_of_bundle(0, 1, 1), signal.SIGKILL)
                until(lambda: job.has_run(2, 2) or ended.done())
        finally:
            (tmp_path / "finish").touch()
        assert ended.result(LIMIT_S) == {0: 0, 1: 0}


def test_the_place_of_a_node_is_the_groups() -> None:
    with pytest.raises(ContractError, match="--node-rank=1: the placement group says so"):
        ray_launch.run(["--node-rank=1", "train.py"], SimpleNamespace())


def test_options_of_the_script_are_its_own() -> None:
    command = ["--nnodes", "2", "train.py", "--node-rank=1", "--rdzv-endpoint", "here"]
    assert ray_launch._options_of(command) == command[:3]
