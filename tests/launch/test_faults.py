"""Ends of launchers and of ranks other than a completed job: nothing is left behind or unclear."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from resihp.contracts.node_memory import NODE_MEMORY, MemoryServers
from resihp.elastic.rendezvous import exit_status
from resihp.launch import rank_environment
from resihp.launch.attempts import Attempt
from resihp.launch.options import Options
from resihp.launch.rank_environment import RankEnvironment
from tests.elastic.engine_job import is_running
from tests.launch.launcher_process import LauncherProcess

LIMIT_S = 300.0
ENDLESS = 10**6
SCRIPT = """
import os, sys, time
from datetime import timedelta
from pathlib import Path

import torch

from resihp.elastic import Replicas, Timeouts

folder, steps, width, failing = Path(sys.argv[1]), *map(int, sys.argv[2:5])
heartbeat = timedelta(seconds=float(sys.argv[5]))
rank = int(os.environ["RANK"])
(folder / f"pid-{rank}").write_text(str(os.getpid()))
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(width, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
replicas = Replicas(model, optimizer, microbatches=4, timeouts=Timeouts(heartbeat=heartbeat))
for step in replicas.steps(steps):
    for index in step:
        if rank == failing and step.number == 2:
            raise ValueError("an error of the script")
        loss = model(torch.ones(2, width)).mean()
        loss.backward()
        step.report(loss)
    optimizer.step()
    optimizer.zero_grad()
    (folder / f"alive-{rank}").write_text(str(len(replicas.alive)))
    if not (folder / "hurry").exists():
        time.sleep(0.05)
print(f"rank {rank} completed {replicas.completed}", flush=True)
"""


class Launcher:
    """A launcher's process, its output in files."""

    def __init__(self, folder: Path, name: str, *arguments: str) -> None:
        self.folder = folder
        self._out, self._err = folder / f"{name}.out", folder / f"{name}.err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = LauncherProcess(folder, *arguments, out=out, err=err)

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    @property
    def store(self) -> str:
        """Address of the store, once it is there."""
        self.until(lambda: re.search(r"store at \S+,", self.err) is not None)
        return re.findall(r"store at (\S+),", self.err)[0]

    def until(self, check: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not check():
            ended = self.process.poll()
            assert time.monotonic() < deadline, f"status {ended}\n{self.out}{self.err}"
            time.sleep(0.02)

    def has_replicas(self, rank: int, count: int) -> Callable[[], bool]:
        """Whether `rank` works in a step of so many replicas."""
        told = self.folder / f"alive-{rank}"
        return lambda: told.exists() and told.read_text() == str(count)

    def status(self) -> int:
        """Exit status, after a bounded time."""
        return self.process.wait(LIMIT_S)


@contextmanager
def launched(folder: Path, name: str, *arguments: str) -> Iterator[Launcher]:
    launcher = Launcher(folder, name, *arguments)
    try:
        yield launcher
    finally:
        launcher.process.send_signal(signal.SIGTERM)
        try:
            launcher.process.wait(20)
        except subprocess.TimeoutExpired:
            launcher.process.kill()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "loop.py"
    path.write_text(SCRIPT)
    return path


def loop(
    script: Path,
    *,
    steps: int = ENDLESS,
    width: int = 8,
    failing: int = -1,
    heartbeat_s: float = 30.0,
) -> list[str]:
    numbers = (steps, width, failing, heartbeat_s)
    return [str(script), str(script.parent), *map(str, numbers)]


def joining(store: str) -> tuple[str, ...]:
    """Options of a launcher whose replica 2 joins a job of two."""
    return ("--join", "2", "--rdzv-endpoint", store)


def test_the_failure_of_a_script_is_the_launchers(script: Path, tmp_path: Path) -> None:
    arguments = ("--nproc-per-node", "2", *loop(script, steps=6, failing=1))
    with launched(tmp_path, "first", *arguments) as first:
        assert first.status() == 1
    assert "rank 0 completed 6" in first.out, first.err
    summary = first.err.split("rank 1 failed with status 1:")[1]
    assert "ValueError: an error of the script" in summary


def test_every_status_of_a_plain_script_is_a_failure(tmp_path: Path) -> None:
    """Also the one with which a rank of the elastic runtime says that it was given up."""
    script = tmp_path / "plain.py"
    script.write_text("import os, sys\nsys.exit(75 * int(os.environ['RANK']))\n")
    arguments = ("--nproc-per-node", "2", "--max-restarts", "0", str(script))
    with launched(tmp_path, "first", *arguments) as first:
        assert first.status() == exit_status.FENCED_OUT, first.err
    assert "rank 1 failed with status 75" in first.err


def test_a_rank_that_python_takes_down_after_its_script_has_completed(tmp_path: Path) -> None:
    """As torch does now and then; torchrun would train again from the newest checkpoint."""
    (tmp_path / "script.py").write_text(
        "import os\n"
        "class Last:\n"
        "    def __del__(self, abort=os.abort):\n"
        "        abort()\n"
        "last = Last() if os.environ['RANK'] == '1' else None\n"
    )
    with launched(tmp_path, "first", "--nproc-per-node", "2", "script.py") as first:
        assert first.status() == 0, first.err
    assert "rank 1 had completed when Python itself was killed by signal 6" in first.err
    assert ": restart" not in first.err


INTERRUPTED = """
import sys, time
from pathlib import Path

try:
    Path(sys.argv[1], "begun").touch()
    while True:  # what comes just before one long sleep would be handled after it
        time.sleep(0.02)
except KeyboardInterrupt:
    print("saved", flush=True)
    time.sleep(10**6 * int(sys.argv[2]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("stays", [0, 1])
def test_ranks_are_interrupted_with_their_launcher(
    tmp_path: Path, number: signal.Signals, stays: int
) -> None:
    """At the first signal they may end, at the second one they are killed."""
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    arguments = ("--shutdown-timeout", "10000", str(script), str(tmp_path), str(stays))
    with launched(tmp_path, "first", *arguments) as first:
        first.until((tmp_path / "begun").exists)
        first.process.send_signal(number)
        first.until(lambda: "saved" in first.out)
        if stays:
            first.process.send_signal(number)
        assert first.status() == 128 + number
    assert "Traceback" not in first.err


def test_ranks_end_with_a_launcher_in_the_background_of_a_shell_script(tmp_path: Path) -> None:
    """Such a shell starts it with SIGINT ignored."""
    (tmp_path / "waits.py").write_text(
        "import time\nprint('begun', flush=True)\ntime.sleep(10**6)\n"
    )
    launch = (
        "import signal, sys\n"
        "from resihp.launch.supervisor import main\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "sys.exit(main(['--shutdown-timeout', '10000', 'waits.py']))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", launch], cwd=tmp_path, env=environment, stdout=subprocess.PIPE
    ) as launcher:
        try:
            assert launcher.stdout is not None
            assert launcher.stdout.readline() == b"begun\n"
            launcher.send_signal(signal.SIGHUP)
            assert launcher.wait(60.0) == 128 + signal.SIGHUP
        finally:
            launcher.kill()


def test_a_launcher_in_a_rank_of_another_job_has_a_memory_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    outer = MemoryServers(token="t", servers=(("node-1", 1),), target=("node-1", 1))
    for name, value in outer.to_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(NODE_MEMORY, "/dev/shm/outer")
    for memory in (tmp_path, None):
        environment = RankEnvironment(Options.parse([__file__]), "launcher", memory)
        variables = environment.of_all_ranks()
        environment.close()
        assert MemoryServers.of_environment(variables) == MemoryServers()
        assert variables[NODE_MEMORY] == ("" if memory is None else str(memory))


@pytest.mark.parametrize(("given", "left"), [(None, "1"), ("4,5,6", "5"), ("", None), (" ", None)])
def test_devices_are_left_out_of_those_that_are_visible(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str | None, left: str | None
) -> None:
    monkeypatch.setattr(rank_environment, "_gpus", lambda: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    options = Options.parse(["--nproc-per-node", "2", __file__])
    environment = RankEnvironment(options, "launcher", tmp_path)
    assert environment._visible_devices([1]).get("CUDA_VISIBLE_DEVICES") == left
    environment.close()


@pytest.mark.parametrize(("given", "gpus"), [("0", 8), ("4,5", 8), (None, 1)])
def test_devices_that_ranks_share_stay_visible(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str | None, gpus: int
) -> None:
    """Nothing tells which one a rank used, and without any the rank could not train."""
    monkeypatch.setattr(rank_environment, "_gpus", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    options = Options.parse(["--nproc-per-node", "3", __file__])
    environment = RankEnvironment(options, "launcher", tmp_path)
    assert environment._visible_devices([1, 2]) == {}
    environment.close()


@pytest.mark.parametrize("full", [("memory",), ("memory", "disk")])
def test_a_plan_for_which_the_memory_has_no_room_goes_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    full: tuple[str, ...],
) -> None:
    def write_text(path: Path, text: str) -> int:
        if path.is_relative_to(tmp_path) and path.relative_to(tmp_path).parts[0] in full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, text)

    write = Path.write_text
    for name in ("memory", "disk"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "disk"))
    monkeypatch.setattr(Path, "write_text", write_text)
    attempt = Attempt(number=1, nodes=(), host="localhost", port=1, plan="the plan")
    options = Options.parse(["--nproc-per-node", "2", __file__])
    environment = RankEnvironment(options, "launcher", tmp_path / "memory")
    variables = [
        environment.of_one_rank(rank, rank, attempt, [0, 1], has_copies=False) for rank in (0, 1)
    ]
    if "disk" in full:
        assert not any("RESIHP_PLAN" in each for each in variables)
        assert len([text for text in caplog.messages if "start without it" in text]) == 1
    else:
        files = {Path(each["RESIHP_PLAN"]) for each in variables}
        assert [file.read_text() for file in files] == ["the plan"]
    environment.close()
    assert not [*(tmp_path / "memory").iterdir(), *(tmp_path / "disk").iterdir()]


def test_ranks_end_with_a_launcher_that_is_killed(script: Path, tmp_path: Path) -> None:
    with (
        launched(tmp_path, "first", "--nproc-per-node", "2", *loop(script)) as first,
        launched(tmp_path, "second", *joining(first.store), *loop(script)) as second,
    ):
        second.until(second.has_replicas(2, 3))
        pids = [int((tmp_path / f"pid-{rank}").read_text()) for rank in (0, 1)]
        first.process.kill()
        first.until(lambda: not any(map(is_running, pids)))
        assert second.status() == exit_status.JOB_STOPPED, second.err
    assert "the store is gone" in second.err
    assert "Traceback" not in second.err
    assert "completed" not in second.out


def test_a_job_ends_with_the_launcher_that_hosts_its_store(script: Path, tmp_path: Path) -> None:
    with (
        launched(tmp_path, "first", "--nproc-per-node", "2", *loop(script)) as first,
        launched(tmp_path, "second", *joining(first.store), *loop(script)) as second,
    ):
        second.until(second.has_replicas(2, 3))
        first.process.send_signal(signal.SIGTERM)
        assert second.status() == exit_status.JOB_STOPPED, second.err
        assert first.status() != 0
    assert "Traceback" not in second.err
    assert "completed" not in second.out


def test_a_rank_that_was_given_up_says_so(script: Path, tmp_path: Path) -> None:
    """Stopped for longer than the heartbeat's time-out, and continued then."""
    arguments = ("--nproc-per-node", "3", *loop(script, steps=300, heartbeat_s=1.5))
    with launched(tmp_path, "first", *arguments) as first:
        first.until(first.has_replicas(2, 3))
        pid = int((tmp_path / "pid-2").read_text())
        os.kill(pid, signal.SIGSTOP)
        first.until(first.has_replicas(0, 2))
        os.kill(pid, signal.SIGCONT)
        first.until(lambda: "rank 2 ended" in first.err)
        (tmp_path / "hurry").touch()
        assert first.status() == 0, first.err
    assert f"rank 2 ended with {exit_status.FENCED_OUT}" in first.err
    assert "rank 2: FencedOutError: rank 2 was given up by the other ranks" in first.err
    assert "Traceback" not in first.err


def test_a_joiner_that_comes_too_late_is_told(
    script: Path, tmp_path: Path, closed_port: int
) -> None:
    store = f"127.0.0.1:{closed_port}"
    with launched(tmp_path, "late", *joining(store), *loop(script)) as late:
        assert late.status() == exit_status.JOB_STOPPED
    waiting, ended = late.err.splitlines()
    assert waiting.endswith(f"waiting for the store at {store}")
    assert f"no store answers at {store}" in ended


def test_a_joiner_with_another_model_is_refused(script: Path, tmp_path: Path) -> None:
    """It finds the job, whatever that is called."""
    named = ("--nproc-per-node", "2", "--rdzv-id", "run7")
    with launched(tmp_path, "first", *named, *loop(script)) as first:
        store = first.store
        with launched(tmp_path, "other", *joining(store), *loop(script, width=9)) as other:
            assert other.status() == exit_status.JOIN_REFUSED
        assert first.process.poll() is None
    assert "the job trains a model with 2 parameters and 36 elements" in other.err
    assert "this process trains a model with 2 parameters and 40 elements" in other.err
    assert "Traceback" not in other.err
