"""What one job's detector learned is stored, and serves the next job of the same model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from resihp.contracts import ModelShape, Plan
from resihp.contracts.codec import encode
from resihp.testing.scenarios import steps_of
from service import Settings
from service.store.documents import JobMessage, MessageKind, predictor_key
from service.store.embedded_redis import socket_path
from service.store.schema import PREDICTOR
from service.store.worker_store import WorkerStore
from service.worker.adapters import load_adapters
from service.worker.planning import Planner
from service.worker.session import JobSession
from tests.service.conftest import eventually, job_of, running

MODEL = ModelShape(layers=4, hidden=1024, heads=16, kv_heads=8, ffn=4096, vocab=32000)
JOB = job_of(model=MODEL, tokens_per_microbatch=8192)


@pytest.fixture
def start() -> Iterator[Callable[..., JobSession]]:
    adapters = load_adapters(Settings())
    planner = Planner(adapters, time_limit_s=5.0)
    first = Plan(version=0, layout=JOB.layout, quotas=JOB.quotas)
    yield lambda predictor=None: JobSession(JOB, first, adapters, planner, predictor)
    planner.close()


def test_only_jobs_of_the_same_model_and_device_share_a_predictor():
    assert predictor_key(replace(JOB, name="other")) == predictor_key(JOB)
    assert predictor_key(replace(JOB, device="another")) != predictor_key(JOB)


def test_a_new_job_starts_with_what_was_learned_and_news_are_told_once(start):
    teacher = start()
    lengths = np.random.default_rng(0).integers(16, 4096, 500)
    for step, batch in enumerate(steps_of(JOB, lengths, steps=36, seed=0)):
        teacher.apply(JobMessage(f"{step}-0", MessageKind.TELEMETRY, encode(batch)))
    news = teacher.new_predictor()
    assert news is not None
    assert teacher.new_predictor() is None
    pupil = start(news)
    assert pupil._detector.predictor is not None
    assert pupil.new_predictor() is None


def test_a_predictor_that_cannot_be_read_is_left_alone(start):
    assert start(b"of another version")._detector.predictor is None


def test_the_worker_stores_what_a_job_learned(tmp_path: Path):
    settings = Settings(redis_url=None, data=tmp_path, commit_every_s=0.1)
    with running(settings, load_adapters) as http:
        http.register(JOB)
        lengths = np.random.default_rng(0).integers(16, 4096, 500)
        for batch in steps_of(JOB, lengths, steps=36, seed=0):
            http.send("j", batch)
        store = WorkerStore(f"unix://{socket_path(tmp_path)}", "t", keep_events=1, keep_steps=1)
        assert eventually(lambda: store.predictor(JOB))
        (kept,) = store._redis.keys(f"{PREDICTOR}*")
        store._redis.persist(kept)
        assert store.predictor(JOB)
        assert store._redis.ttl(kept) > 0, "one that is used is kept for its whole time again"
        store.keep_predictor(replace(JOB, model=None), b"of any model")
        assert store.predictor(replace(JOB, model=None)) is None
        store.close()
