"""Probes from the suspicion to the evidence: sidecar, hooks and detector together."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fakes import FakeDetector, fake_adapters

from detector import ProbeKind, ProbeRequest, ProbeResult
from resihp.client import Client
from resihp.contracts import Op, Verdict, from_json, to_json
from resihp.hooks import Monitor
from service import Settings
from service.worker.adapters import Adapters
from service.worker.probes import OpenProbes
from tests.service.conftest import batch_of, eventually, job_of, running


class Doubting(FakeDetector):
    """Asks once for one probe of rank 3, and keeps the answer as evidence."""

    def __init__(self, job, predictor=None) -> None:
        super().__init__(job, predictor)
        self.asked = False
        self.results: list[ProbeResult] = []

    def probe_requests(self, now: float) -> list[ProbeRequest]:
        if self.asked or not self.records:
            return []
        self.asked = True
        return [ProbeRequest(rank=3, reference=1, kind=ProbeKind.GEMM)]

    def probe_result(self, result: ProbeResult) -> list[Verdict]:
        self.results.append(result)
        return []

    def verdicts(self) -> list[Verdict]:
        words = tuple(result.words for result in self.results)
        return [
            Verdict(rank=v.rank, status=v.status, evidence=words if v.rank == 3 else ())
            for v in super().verdicts()
        ]


class Hopeful(Doubting):
    """Asks for a probe of a rank that has no work in the layout."""

    def probe_requests(self, now: float) -> list[ProbeRequest]:
        return [replace(request, rank=42) for request in super().probe_requests(now)]


def hopeful_adapters(settings: Settings) -> Adapters:
    return replace(fake_adapters(), detector=Hopeful, restore=Hopeful.restore)


def doubting_adapters(settings: Settings) -> Adapters:
    return replace(fake_adapters(), detector=Doubting, restore=Doubting.restore)


@pytest.fixture
def doubtful(tmp_path: Path):
    with running(
        Settings(redis_url=None, data=tmp_path, commit_every_s=0.05), doubting_adapters
    ) as http:
        http.register(job_of())
        yield http


def train_until(condition, monitors: list[Monitor]) -> None:
    """Steps of a few records on each rank, till the condition holds."""

    def step() -> bool:
        for monitor in monitors:
            with monitor.step():
                monitor.record(op=Op.FORWARD, compute_ms=10.0, microbatch=0, tokens=100)
        return bool(condition())

    eventually(step)


def evidence(http) -> list[str]:
    verdicts = http.get("/v1/jobs/j/verdicts")["verdicts"]
    return [words for v in verdicts if v["rank"] == 3 for words in v["evidence"]]


def test_both_ends_are_asked_and_the_answer_joins_the_evidence(doubtful):
    monitors = [Monitor(job="j", url=doubtful.url, rank=r, interval_s=0.05) for r in (1, 3)]
    train_until(lambda: evidence(doubtful), monitors)
    assert "gemm probe took" in evidence(doubtful)[0]
    for monitor in monitors:
        monitor.close()
        assert monitor.stats.failures == 0


def test_a_rank_that_forbids_probes_ends_the_asking(doubtful):
    def asked_of_rank_1() -> list[dict]:
        return doubtful.send("j", batch_of(1).select(np.arange(4, 8))).json().get("probes", [])

    eventually(asked_of_rank_1)
    refusing = Monitor(job="j", url=doubtful.url, rank=3, interval_s=0.05, probes=False)
    train_until(lambda: not asked_of_rank_1(), [refusing])
    refusing.close()
    assert evidence(doubtful) == []


def test_only_ranks_in_the_message_are_asked(doubtful):
    own = batch_of(0).select(np.arange(12, 16))
    eventually(lambda: doubtful.send("j", own).json().get("probes", []))
    (order,) = doubtful.send("j", own).json().get("probes", [])
    assert (order["kind"], order["rank"]) == ("gemm", 3)
    both = doubtful.send("j", batch_of(0)).json()["probes"]
    assert {order["rank"] for order in both} == {1, 3}
    assert len({order["id"] for order in both}) == 1
    assert doubtful.send("j", batch_of(0).select(np.arange(4))).json().get("probes", []) == []


def test_a_rank_without_work_is_asked_too_and_its_signs_of_life_are_no_records(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("resihp.hooks._probes._CALL_S", 0.1)
    settings = Settings(redis_url=None, data=tmp_path, commit_every_s=0.05)
    with running(settings, hopeful_adapters) as http:
        http.register(job_of())
        *working, idle = (
            Monitor(job="j", url=http.url, rank=r, interval_s=0.05) for r in (1, 3, 42)
        )

        def told() -> bool:
            idle.while_idle()
            return bool(evidence(http))

        train_until(told, working)
        verdicts = {v["rank"]: v for v in http.get("/v1/jobs/j/verdicts")["verdicts"]}
        assert 42 not in verdicts
        for monitor in (*working, idle):
            monitor.close()
            assert monitor.stats.failures == 0


def test_an_answer_that_makes_no_sense_is_refused_or_forgotten(doubtful):
    assert doubtful("POST", "/v1/jobs/j/probes/7", {"rank": 3, "ms": -1.0}).status == 422
    client = Client(doubtful.url)
    client.answer_probe("j", probe="never asked", rank=3, ms=1.0)
    client.close()
    doubtful.send("j", batch_of(0))
    eventually(lambda: doubtful.get("/v1/jobs/j")["backlog"] == 0)
    assert evidence(doubtful) == []


def test_open_probes_survive_a_restart_and_are_given_up_in_the_end():
    probes = OpenProbes()
    request = ProbeRequest(rank=1, reference=2, kind=ProbeKind.MEMORY)
    probes.ask([request], 0.0)
    assert probes.answer("1", 2, 4.0) is None
    probes = from_json(OpenProbes, json.loads(json.dumps(to_json(probes))))
    assert probes.by_rank() == {"1": [{"id": "1", "kind": "memory"}]}
    result = probes.answer("1", 1, 6.0)
    assert result is not None
    assert result.slowdown == 1.5
    probes.ask([request], 0.0)
    probes.ask([], 31.0)
    assert probes.by_rank() == {}


def test_a_trainer_without_torch_probes_without_torch():
    code = (
        "import sys; from resihp.hooks._probe_kernels import TIMED; "
        "print(min(work(5.0) for work in TIMED.values()) > 0, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
