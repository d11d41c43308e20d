"""Examples run by torchrun beside a real sidecar, whose verdicts are followed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from resihp.client import Client
from resihp.contracts import (
    Heartbeat,
    Job,
    Op,
    ServiceError,
    Status,
    TelemetryBatch,
    Verdict,
)
from resihp.contracts.codec import WireFormat, decode
from service.launch import Sidecar

EXAMPLES = Path(__file__).parents[2] / "examples"
UNHURRIED = Path(__file__).with_name("unhurried.py")
TIMEOUT_S = 400.0
NOISE = 0.5
"""Share of the slow rank's excess time that others may lose to the load of this machine."""


@dataclass
class Training:
    """A finished run of an example.

    named  ranks that were found slow or stopped on its way, each with its worst verdict
    last   verdicts on all ranks at its end
    """

    output: str
    named: dict[int, Verdict] = field(default_factory=dict)
    last: dict[int, Verdict] = field(default_factory=dict)

    def assert_named(self, slow_rank: int) -> None:
        """Assert that this rank was found slow, and no other.

        Others may lose speed to whatever else this machine runs; a rank that is blamed for
        waiting would be as slow as the one that it waits for.
        """
        what = f"{self.named}\n{self.output}"
        assert {verdict.status for verdict in self.named.values()} == {Status.FAIL_SLOW}, what
        assert slow_rank in self.named, what
        most = 1.0 + NOISE * (self.named[slow_rank].slowdown - 1.0)
        slow = {rank for rank, verdict in self.named.items() if verdict.slowdown > most}
        assert slow == {slow_rank}, what

    def assert_sent(self, records: int, *, loads: int) -> None:
        """Assert that no record was lost: those of passes and updates, and of data loaders at most
        `loads`, because a batch that comes before the first pass is not timed."""
        (sent,) = set(re.findall(r"(\d+) records sent, 0 lost", self.output))
        assert records <= int(sent) <= records + loads


Run = Callable[..., Training]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Function that runs an example on several ranks; those of a script that starts them itself
    are `None`, and it names the job too."""

    def start(
        example: str | Path, *options: str, ranks: int | None = 3, sidecar: str = ""
    ) -> Training:
        script = (str(EXAMPLES / example), *options)
        if sidecar:
            return _train(script, ranks, sidecar, tmp_path)
        with Sidecar(tmp_path / "sidecar") as service:
            return _train((str(UNHURRIED), *script), ranks, service.url, tmp_path)

    return start


def run_ranks(module: str, folder: Path, ranks: int) -> str:
    """Run a module of the tests on several ranks, with `folder` as its argument; the output."""
    launch = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    ran = subprocess.run(
        [sys.executable, "-m", *launch, "-m", module, str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        cwd=EXAMPLES.parent, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


def _train(script: tuple[str, ...], ranks: int | None, url: str, folder: Path) -> Training:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    command = [sys.executable, *(launch if ranks else ()), *script]
    environment = {
        **os.environ,
        "RESIHP_URL": url,
        **({"RESIHP_JOB": "example"} if ranks else {}),
        "RESIHP_PROBES": "0",  # a probe would find the real device, which is healthy
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    client = Client(url)
    training = Training("")
    log = folder / "output"
    deadline_s = time.monotonic() + TIMEOUT_S
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [*command, "--folder", str(folder / "trainer")],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            while process.poll() is None and time.monotonic() < deadline_s:
                time.sleep(0.2)
                _note_verdicts(client, training)
        finally:
            process.terminate()
    _note_verdicts(client, training)
    training.output = log.read_text(errors="replace")
    assert process.returncode == 0, training.output
    return training


def _note_verdicts(client: Client, training: Training) -> None:
    try:
        verdicts = client.verdicts("example")
    except ServiceError:
        return
    training.last = {verdict.rank: verdict for verdict in verdicts}
    for verdict in verdicts:
        if verdict.status in (Status.FAIL_SLOW, Status.FAIL_STOP):
            worst = training.named.setdefault(verdict.rank, verdict)
            training.named[verdict.rank] = max(worst, verdict, key=_badness)


def _badness(verdict: Verdict) -> tuple[bool, float]:
    return verdict.status is Status.FAIL_STOP, verdict.slowdown


class InProcessSidecar:
    """A sidecar for trainings of one rank in this process, that finds this rank slow."""

    def __init__(self) -> None:
        self.batches: list[TelemetryBatch] = []
        self.jobs: list[Job] = []
        self.heartbeats: list[Heartbeat] = []
        self.error: Exception | None = None

    def register(self, job: Job) -> None:
        self.jobs.append(job)

    def send_telemetry(
        self, job: str, message: bytes, form: WireFormat, key: str | None = None
    ) -> None:
        self.batches.append(decode(message, form))

    def send_heartbeat(self, job: str, heartbeat: Heartbeat) -> None:
        self.heartbeats.append(heartbeat)

    def verdicts(self, job: str) -> list[Verdict]:
        if self.error is not None:
            raise self.error
        return [Verdict(rank=0, status=Status.FAIL_SLOW, slowdown=1.5, since_step=3)]

    def advice(self, job: str) -> None:
        """No advice: there is one rank only."""

    def passes(self) -> list[tuple[int, int, Op]]:
        """Step, microbatch and op of all records but those of data loaders."""
        found = TelemetryBatch.concat(self.batches)
        found = found.select(found.op != Op.DATA)
        columns = (found.step.tolist(), found.microbatch.tolist(), found.op.tolist())
        return [(step, index, Op(op)) for step, index, op in zip(*columns, strict=True)]

    def work(self) -> set[tuple[int, int]]:
        """Tokens and sequences of all forward passes."""
        found = TelemetryBatch.concat(self.batches)
        found = found.select(found.op == Op.FORWARD)
        return {*zip(found.tokens.tolist(), found.sequences.tolist(), strict=True)}

    def loaded_steps(self) -> set[int]:
        """Steps with records of data loaders."""
        found = TelemetryBatch.concat(self.batches)
        return set(found.step[found.op == Op.DATA].tolist())


@pytest.fixture
def sidecar(monkeypatch: pytest.MonkeyPatch) -> InProcessSidecar:
    """A sidecar that takes everything; trainings have time to send it, however busy this machine
    is."""
    monkeypatch.setattr("resihp.integrations._observer._END_TIMEOUT_S", 300.0)
    return InProcessSidecar()


@pytest.fixture
def quick_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts are read much more often than in practice."""
    monkeypatch.setattr("resihp.integrations._verdicts._INTERVAL_S", 0.02)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """DeepSpeed in a world of one rank."""
    if "deepspeed" not in sys.modules:  # which looks for its accelerator once
        monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    for name, value in {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    deepspeed = pytest.importorskip("deepspeed")
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", False)
    deepspeed.init_distributed("gloo")
    yield deepspeed
    deepspeed.comm.destroy_process_group()
