"""A device that a plan left out recovers: probed, found healthy, taken back, and trusted again.

The real service, detector and scheduler; the ranks are scripted, so that each answer is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from detector import Detector, ProbeRequest
from resihp.client import Client
from resihp.contracts import Job, LayerCost, Op, Plan, Status, TelemetryBatch
from resihp.contracts.codec import WireFormat, encode
from service import Settings
from service.worker.adapters import Adapters, load_adapters
from tests.service.conftest import eventually, job_of, running

BAD = 3
HOW_SLOW = 12.0
"""So slow that every plan does better without it."""


class Hurried(Detector):
    """For the rationing of probes a second is a minute."""

    def probe_requests(self, now: float) -> list[ProbeRequest]:
        return super().probe_requests(60.0 * now)


def hurried_adapters(settings: Settings) -> Adapters:
    return replace(
        load_adapters(settings), detector=lambda job, _: Hurried(job), restore=Hurried.restore
    )


class Ranks:
    """Eight ranks that train by the newest plan, and answer the probes that they are asked for."""

    def __init__(self, client: Client, job: Job) -> None:
        self.client, self.job = client, job
        self.plan = Plan(version=0, layout=job.layout, quotas=job.quotas)
        self.step, self.slowness, self.probed = 0, 1.0, 0
        self._rng = np.random.default_rng(11)

    def train(self) -> None:
        """One step of all of them, each in a message of its own; then a newer plan is taken on."""
        work = self._rng.lognormal(13.0, 0.5, (self.job.layout.dp, 8))
        for rank in self.job.layout.ranks:
            working = rank in self.plan.layout.ranks
            batch = self._records(rank, work) if working else self._sign_of_life(rank)
            key = f"{rank}-{self.step}"
            answer = self.client.send_telemetry("j", encode(batch), WireFormat.MSGPACK, key)
            for order in answer.get("probes", ()):
                self._answer(rank, order["id"])
        self.step += 1
        newer = self.client.plan("j", after=self.plan.version)
        if newer is not None:
            self.plan = newer
            for rank in newer.layout.ranks:
                self.client.acknowledge("j", newer.version, rank=rank, step=self.step)

    def _records(self, rank: int, work: np.ndarray) -> TelemetryBatch:
        place = self.plan.layout.place_of(rank)
        stage = self.plan.layout.stage_at(place)
        share = stage.shares[stage.ranks.index(rank)] / sum(stage.shares)
        quota = self.plan.quotas[place.dp]
        held = np.repeat(work[place.dp, :quota], 2)
        op = np.tile([Op.FORWARD, Op.BACKWARD], quota)
        times = (1 + op) * stage.layer_count * share * (5.0 + held * 1e-5)
        times *= self._rng.normal(1.0, 0.004, times.size)
        count = times.size
        return TelemetryBatch(
            rank=np.full(count, rank), step=np.full(count, self.step), op=op,
            microbatch=np.repeat(np.arange(quota), 2),
            compute_ms=times * (self.slowness if rank == BAD else 1.0),
            wait_ms=np.zeros(count), tokens=np.full(count, 4096), sequences=np.full(count, 8),
            sum_sq_len=held.astype(int), max_len=np.full(count, 2048),
            plan_version=self.plan.version,
        )  # fmt: skip

    def _sign_of_life(self, rank: int) -> TelemetryBatch:
        """What `Monitor.while_idle` sends."""
        return TelemetryBatch(
            rank=np.array([rank]), step=np.array([self.step]), microbatch=np.array([-1]),
            op=np.array([Op.DATA]), compute_ms=np.array([0.0]), plan_version=self.plan.version,
        )  # fmt: skip

    def _answer(self, rank: int, probe: str) -> None:
        slow = self.slowness if rank == BAD else 1.0
        self.probed += rank == BAD and rank not in self.plan.layout.ranks
        self.client.answer_probe("j", probe=probe, rank=rank, ms=slow)

    def until(self, condition: Callable[[], bool]) -> None:
        """Trains on till the condition holds."""

        def holds() -> bool:
            self.train()
            return condition()

        eventually(holds, timeout_s=300.0)

    def status(self) -> Status | None:
        """What is said of the bad rank; None before there are verdicts."""
        said = {verdict.rank: verdict.status for verdict in self.client.verdicts("j")}
        return said.get(BAD)


def test_a_device_that_recovered_outside_the_layout_is_taken_back(tmp_path: Path) -> None:
    settings = Settings(redis_url=None, data=tmp_path, commit_every_s=0.05)
    job = job_of(cost=LayerCost(forward_ms=2.0, backward_ms=4.0))
    with running(settings, hurried_adapters) as http:
        client = Client(http.url)
        client.register(job)
        ranks = Ranks(client, job)
        ranks.until(lambda: ranks.step >= 25 and ranks.status() is Status.HEALTHY)
        ranks.slowness = HOW_SLOW
        ranks.until(lambda: BAD not in ranks.plan.layout.ranks)
        # It is probed out there, still slow: it stays out.
        probed = ranks.probed
        ranks.until(lambda: ranks.probed >= probed + 4)
        assert ranks.status() is Status.FAIL_SLOW
        assert BAD not in ranks.plan.layout.ranks
        ranks.slowness = 1.0
        ranks.until(lambda: BAD in ranks.plan.layout.ranks)
        back = ranks.step
        ranks.until(lambda: ranks.step >= back + 15)
        eventually(lambda: http.get("/v1/jobs/j")["backlog"] == 0)  # all of them are judged
        assert ranks.status() is Status.HEALTHY
        assert BAD in ranks.plan.layout.ranks
        assert http.get("/v1/jobs/j")["rollout"]["active"] == ranks.plan.version
        events = client.verdicts("j")
        assert {v.rank for v in events if v.status is Status.FAIL_SLOW} == set()
        client.close()
