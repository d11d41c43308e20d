"""The real detector and the real scheduler behind the HTTP contract."""

from __future__ import annotations

import numpy as np
import pytest

from detector import Detector
from resihp.client import Client
from resihp.contracts import LayerCost, Status, TelemetryBatch, to_json
from resihp.contracts.codec import WireFormat, encode
from service import Settings
from service.worker.adapters import load_adapters
from tests.service.conftest import eventually, job_of, running


def steps_of(steps: range, rng: np.random.Generator, *, version: int, ranks, slow: int | None):
    """Whole steps of forward and backward records with varying sequence lengths."""
    for step in steps:
        ranks = np.asarray(ranks)
        microbatches = 4
        work = rng.lognormal(13.0, 0.5, microbatches)  # one draw: all stages see the same batch
        rank = np.repeat(ranks, 2 * microbatches)
        microbatch = np.tile(np.repeat(np.arange(microbatches), 2), len(ranks))
        op = np.tile([0, 1], microbatches * len(ranks))
        base = (5.0 + work[microbatch] * 1e-5) * (1 + op)
        factor = np.where(rank == slow, 1.6, 1.0) if slow is not None else 1.0
        yield TelemetryBatch(
            rank=rank, step=np.full(rank.size, step), microbatch=microbatch, op=op,
            compute_ms=base * factor * rng.normal(1.0, 0.004, rank.size),
            wait_ms=np.zeros(rank.size), tokens=np.full(rank.size, 4096),
            sequences=np.full(rank.size, 8), sum_sq_len=work[microbatch].astype(int),
            max_len=np.full(rank.size, 2048), plan_version=version,
        )  # fmt: skip


def test_a_slow_rank_is_named_planned_for_and_stays_named(tmp_path):
    rng = np.random.default_rng(7)
    settings = Settings(redis_url=None, data=tmp_path, commit_every_s=0.1)
    cost = LayerCost(forward_ms=2.0, backward_ms=4.0)
    with running(settings, load_adapters) as http:
        client = Client(http.url)
        client.register(job_of(cost=cost))

        def feed(steps, **given):
            for batch in steps_of(steps, rng, **given):
                client.send_telemetry("j", encode(batch), WireFormat.MSGPACK, f"{batch.step[0]}")

        feed(range(40), version=0, ranks=range(8), slow=None)
        eventually(lambda: http.get("/v1/jobs/j")["last_step"] == 39)
        assert {v.status for v in client.verdicts("j")} <= {Status.HEALTHY, Status.INCONCLUSIVE}
        feed(range(40, 80), version=0, ranks=range(8), slow=3)
        plan = client.plan("j", after=0, wait=30.0)
        assert plan is not None
        bad = [v.rank for v in client.verdicts("j") if v.status is Status.FAIL_SLOW]
        assert bad == [3]
        for rank in plan.layout.ranks:
            client.acknowledge("j", plan.version, rank=rank, step=80)
        feed(range(80, 110), version=plan.version, ranks=plan.layout.ranks, slow=3)
        eventually(lambda: http.get("/v1/jobs/j")["last_step"] == 109)
        status = http.get("/v1/jobs/j")
        assert status["rollout"]["active"] >= 1
        assert [v.rank for v in client.verdicts("j") if v.status is Status.FAIL_SLOW] == [3]
        client.report_failure("j", ranks=[6], step=110)
        # A plan on account of rank 3 may come in between.
        eventually(lambda: 6 not in client.plan("j", after=0, wait=30.0).layout.ranks)
        assert next(v for v in client.verdicts("j") if v.rank == 6).status is Status.FAIL_STOP
        steps = http.get("/v1/jobs/j/steps")["steps"]
        assert steps[-1]["predicted_ms"] > 0
        expected = {step["step"]: step for step in steps if step["expected_ms"] is not None}
        healthy = expected[30]
        assert healthy["expected_ms"] == pytest.approx(healthy["observed_ms"], rel=0.15)
        assert healthy["healthy_ms"] == healthy["expected_ms"]
        before = [step for step in expected.values() if not step["plan_version"]]
        assert any(step["healthy_ms"] < 0.9 * step["expected_ms"] for step in before)
        client.close()


def test_the_diagnosis_of_a_job_that_falls_silent_knows_its_last_steps(tmp_path):
    settings = Settings(redis_url=None, data=tmp_path, commit_every_s=0.1)
    batches = steps_of(range(30), np.random.default_rng(3), version=0, ranks=range(8), slow=None)
    detector = Detector(job_of())
    with running(settings, load_adapters) as http:
        client = Client(http.url)
        client.register(job_of())
        for batch in batches:
            detector.update(batch)
            client.send_telemetry("j", encode(batch), WireFormat.MSGPACK, f"{batch.step[0]}")
            if batch.step[0] == 14:
                eventually(lambda: http("GET", "/v1/jobs/j/diagnosis").status == 200)
        whole = to_json(detector.diagnosis())
        eventually(lambda: http.get("/v1/jobs/j/diagnosis")["attribution"] == whole["attribution"])
        client.close()
