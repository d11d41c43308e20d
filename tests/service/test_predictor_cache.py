"""What one job's detector learned is stored, and serves the next job of the same model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from conftest import eventually, job_of, running

from detector import Detector
from resihp.contracts import ModelShape
from resihp.testing.scenarios import steps_of
from service import Settings
from service.store.embedded_redis import socket_path
from service.store.worker_store import WorkerStore
from service.worker.adapters import load_adapters
from service.worker.predictor_cache import PredictorCache, cache_key

MODEL = ModelShape(layers=4, hidden=1024, heads=16, kv_heads=8, ffn=4096, vocab=32000)
JOB = job_of(model=MODEL, tokens_per_microbatch=8192)


def trained() -> Detector:
    detector = Detector(JOB)
    lengths = np.random.default_rng(0).integers(16, 4096, 500)
    for batch in steps_of(JOB, lengths, steps=36, seed=0):
        detector.update(batch)
    return detector


def test_only_jobs_of_the_same_model_and_device_share_a_predictor():
    assert cache_key(replace(JOB, name="other")) == cache_key(JOB)
    assert cache_key(replace(JOB, device="another")) != cache_key(JOB)
    assert cache_key(replace(JOB, model=None)) is None


def test_a_new_job_starts_with_what_was_learned_and_news_are_told_once():
    teacher, learning = trained(), PredictorCache(load_adapters(Settings()), JOB)
    news = learning.new_fit(teacher)
    assert news is not None
    assert learning.new_fit(teacher) is None
    pupil = PredictorCache(load_adapters(Settings()), JOB)
    detector = pupil.detector(news[1])
    assert isinstance(detector, Detector)
    assert detector.predictor is not None
    assert pupil.new_fit(detector) is None


def test_a_predictor_that_cannot_be_read_is_left_alone():
    detector = PredictorCache(load_adapters(Settings()), JOB).detector(b"of another version")
    assert isinstance(detector, Detector)
    assert detector.predictor is None


def test_the_worker_stores_what_a_job_learned(tmp_path: Path):
    settings = Settings(redis_url=None, data=tmp_path, commit_every_s=0.1)
    with running(settings, load_adapters) as http:
        http.register(JOB)
        lengths = np.random.default_rng(0).integers(16, 4096, 500)
        for batch in steps_of(JOB, lengths, steps=36, seed=0):
            http.send("j", batch)
        store = WorkerStore(f"unix://{socket_path(tmp_path)}", "t", keep_events=1, keep_steps=1)
        assert eventually(lambda: store.predictor(cache_key(JOB)))
        store.close()
