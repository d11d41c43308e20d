"""Any script is restarted from memory where that helps, and the training is the undisturbed one."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import urllib3

from resihp.client import Client
from resihp.contracts import Action, Job, Layout, Plan, from_json, to_json
from tests.launch.launcher_process import launched
from tests.launch.restart_script import SAMPLES
from tests.launch.test_nodes import launchers
from tests.launch.test_restart_plans import plan_of
from tests.service.forked_sidecar import ForkedSidecar

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "launch" / "restart_script.py"
STEPS, RANKS = 12, 3


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


def test_after_the_loss_of_a_node_its_state_is_read_from_the_memory_of_another(
    tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    """No level of the script is on disk. Node 1 is lost with all that its ranks have written."""
    script = (str(SCRIPT), ".", str(STEPS), "0:0:6:wait")
    with launchers(tmp_path, *script) as job:
        job.start(0, "--nproc-per-node", "2")
        job.start(1)
        job.until((tmp_path / "wait-0").exists)
        job.kill(1)
        assert job.status(0) == 0, job.logs()
        assert "node 1 was lost: restart" in job.log(0)
    before, after = losses(tmp_path, 0), losses(tmp_path, 1)
    assert min(after) > 0, "it did not begin again"
    assert {**before, **after} == pytest.approx(undisturbed, rel=1e-3)


class FakeSidecar(ThreadingHTTPServer):
    """Knows no job at first and answers nonsense; then has a plan without rank 1, once rank 0 waits
    for it; then the job is registered anew, and another plan leaves too few ranks."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.folder, self.asked, self.was_registered_anew = folder, 0, False
        self.answers: list[dict[str, Any]] = []

    def reply(self, after: int) -> tuple[int, bytes]:
        self.asked += 1
        if not (self.folder / "wait-0").exists():
            return (404, b"") if self.asked < 3 else (200, b'{"version": "x"}')
        if not (self.folder / "losses-1-0").exists():
            plan = plan_of(0, 2)
        elif not (self.was_registered_anew and (self.folder / "hold-1").exists()):
            plan = plan_of(0, 1, version=0, action=None)
            self.was_registered_anew |= after < 0
        else:
            plan = plan_of(0)
        return (200, json.dumps(to_json(plan)).encode()) if plan.version > after else (204, b"")

    def acknowledged(self, answer: dict[str, Any]) -> None:
        self.answers.append(answer)
        if answer["state"] == "refused":
            (self.folder / "go").touch()


class Answer(BaseHTTPRequestHandler):
    server: FakeSidecar

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        self.answer(*self.server.reply(int(query.get("after", ["-1"])[0])))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.acknowledged({"path": self.path, **body})
        self.answer(200, b"{}")

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[FakeSidecar]:
    with FakeSidecar(tmp_path) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_plan_of_the_sidecar_leaves_a_rank_out(
    tmp_path: Path, undisturbed: dict[int, float], sidecar: FakeSidecar
) -> None:
    """Rank 2 does not end when it is told to, so it is killed."""
    options = ("--nproc-per-node", f"2:{RANKS}", "--shutdown-timeout", "1")
    events = ("0:0:4:wait", "0:2:4:deaf", "1:0:8:hold")
    done = launched(
        tmp_path, *options, str(SCRIPT), ".", str(STEPS), *events,
        RESIHP_URL=f"http://127.0.0.1:{sidecar.server_port}", RESIHP_JOB="a job",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "device 1 of this node is left out" in done.stderr
    assert "plan 1 is refused: node 0 goes on with 2 ranks or more" in done.stderr
    assert not (tmp_path / "losses-1-2").exists()
    assert not (tmp_path / "losses-2-0").exists(), done.stderr
    assert {**losses(tmp_path, 0), **losses(tmp_path, 1)} == pytest.approx(undisturbed, rel=1e-3)
    told = from_json(Plan, json.loads((tmp_path / "plan-1").read_text()))
    assert told.layout.ranks == (0, 1)
    assert {answer["path"] for answer in sidecar.answers} == {"/v1/jobs/a%20job/plan/1/ack"}
    applied = [answer for answer in sidecar.answers if answer["state"] == "applied"]
    assert {answer["rank"] for answer in applied} == {0, 2}
    assert {answer["digest"] for answer in applied} == {plan_of(0, 2).digest}
    pauses = [answer["pause_ms"] for answer in applied]
    assert pauses[0] > 0
    assert pauses == sorted(pauses)


def test_the_sidecar_itself_restarts_a_job(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    """Rank 1 is reported as lost while it is there; the pause is known to the sidecar then."""
    layout = Layout.grid(dp=RANKS, pp=1, tp=1, layers=2)
    job = Job(name="mine", layout=layout, microbatches=SAMPLES, actions=(Action.RESTART,))
    with ForkedSidecar(tmp_path / "sidecar") as sidecar:
        client = Client(sidecar.url, timeout=60.0)
        client.register(job)

        def has_asked() -> bool:
            """Whether the launcher knows the plan before: it takes no other for its own job's."""
            told = urllib3.request("GET", f"{sidecar.url}/metrics", timeout=60.0).data.decode()
            return 'route="/v1/jobs/{job}/plan",status="200"' in told

        def report() -> None:
            deadline = time.monotonic() + 300
            while not ((tmp_path / "wait-0").exists() and has_asked()):
                assert time.monotonic() < deadline, sidecar.tail()
                time.sleep(0.02)
            client.report_failure("mine", ranks=[1], step=4)

        reporter = threading.Thread(target=report)
        reporter.start()
        arguments = ("--nproc-per-node", f"1:{RANKS}", str(SCRIPT), ".", str(STEPS), "0:0:4:wait")
        done = launched(tmp_path, *arguments, RESIHP_URL=sidecar.url, RESIHP_JOB="mine")
        reporter.join()
        assert done.returncode == 0, done.stderr + sidecar.tail()
        plan = client.plan("mine")
        assert plan is not None
        assert (plan.layout.ranks, plan.action) == ((0, 2), Action.RESTART)
        deadline, answer = time.monotonic() + 60, {}
        while time.monotonic() < deadline:  # acknowledgements are accepted, then applied
            answer = urllib3.request("GET", f"{sidecar.url}/v1/jobs/mine", timeout=60.0).json()
            if answer["rollout"]["active"] == plan.version:
                break
            time.sleep(0.1)
    assert answer["rollout"]["active"] == plan.version, answer
    assert not (tmp_path / "losses-1-2").exists()
    assert {**losses(tmp_path, 0), **losses(tmp_path, 1)} == pytest.approx(undisturbed, rel=1e-3)


def test_the_rank_that_failed_first_may_end_last(tmp_path: Path) -> None:
    """The others read of its end before its process has ended."""
    (tmp_path / "script.py").write_text(
        "import os, sys, time\nfrom pathlib import Path\n"
        "attempt, rank = os.environ['TORCHELASTIC_RESTART_COUNT'], os.environ['RANK']\n"
        "told = Path('told')\n"
        "if attempt == '0' and rank == '0':\n"
        "    told.write_text(str(os.getpid()))\n"
        "    raise RuntimeError('Connection closed by peer [127.0.0.1]:4021')\n"
        "if attempt == '0':\n"
        "    while not told.exists() or not told.read_text():\n        time.sleep(0.01)\n"
        "    while Path('/proc', told.read_text()).exists():\n        time.sleep(0.01)\n"
        "    raise RuntimeError('CUDA error: uncorrectable ECC error encountered')\n"
    )
    done = launched(tmp_path, "--nproc-per-node", "1:2", "--heartbeat", "200", "script.py")
    assert done.returncode == 0, done.stderr
    assert "device 1 of this node is left out" in done.stderr, done.stderr


def test_a_device_that_may_be_whole_is_left_out_once_it_fails_again(tmp_path: Path) -> None:
    """Not for an error that another device makes in the next attempt."""
    (tmp_path / "script.py").write_text(
        "import os, time\nfrom pathlib import Path\n"
        "attempt, rank = int(os.environ['TORCHELASTIC_RESTART_COUNT']), os.environ['RANK']\n"
        "Path(f'rank-{attempt}-{rank}').touch()\n"
        "time.sleep(0 if attempt == 3 or rank == '101'[attempt] else 600)\n"
        "if attempt < 3:\n"
        "    raise RuntimeError('CUDA error: an illegal memory access was encountered')\n"
    )
    options = ("--nproc-per-node", "1:2", "--max-restarts", "5")
    done = launched(tmp_path, *options, "script.py")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is left out") == 1, done.stderr
    assert "device 1 of this node is left out" in done.stderr
    started = sorted(path.name for path in tmp_path.glob("rank-*"))
    assert {"rank-1-0", "rank-2-1", "rank-3-0"} < {*started}
    assert "rank-3-1" not in started


def test_a_bug_of_the_script_ends_it_after_two_tries(tmp_path: Path) -> None:
    done = run(tmp_path, "2", "0:1:7:bug")
    assert done.returncode == 1, done.stderr
    assert not (tmp_path / "losses-2-0").exists(), done.stderr
    told = done.stderr.split("rank 1 failed with status 1:")[-1]
    assert "Traceback" in told
    assert "fork_server.py" not in told, "frames of which the script's author knows nothing"
    assert told.rstrip().endswith("ValueError: no sample of step 7")
    assert not Path((tmp_path / "memory").read_text()).exists()


def test_a_script_that_python_cannot_read_is_shown_as_python_shows_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("x = 1\ndef f(:\n    pass\n")
    done = launched(tmp_path, "--nproc-per-node", "1", "--max-restarts", "0", "script.py")
    assert done.returncode == 1, done.stderr
    assert "fork_server.py" not in done.stderr
    assert 'script.py", line 2\n' in done.stderr
    assert done.stderr.rstrip().endswith("SyntaxError: invalid syntax")


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
    script = tmp_path / "ended.py"
    script.write_text(
        "import os, sys\nimport torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "attempt, rank = int(os.environ['TORCHELASTIC_RESTART_COUNT']), dist.get_rank()\n"
        "if (attempt, rank) == (0, 2):\n    os.kill(os.getpid(), 9)\n"
        "dist.barrier()\n"
        "sys.stdout.write(f'attempt {attempt} rank {rank} of {dist.get_world_size()}\\n')\n"
        "dist.destroy_process_group()\n"
    )
    with launchers(tmp_path, str(script)) as job:
        for node in range(2):
            job.start(node, "--nproc-per-node", str(node + 1), nodes="2")
        assert [job.status(node) for node in range(2)] == [0, 0], job.logs()
        told = re.findall(r"attempt (\d) rank (\d) of 3", job.logs())
    assert sorted(told) == [("1", str(rank)) for rank in range(3)]
