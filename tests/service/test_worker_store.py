"""Commits of a worker against a real Redis: what ends a lease and what does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from conftest import job_of, running

from service import Settings
from service.errors import LeaseLostError
from service.store.embedded_redis import socket_path
from service.store.worker_store import WorkerStore

STATUS = {"phase": "training"}


def test_a_lease_renewed_during_a_commit_is_not_lost(tmp_path: Path):
    """Another thread of the worker renews it between the check and the transaction."""
    settings = Settings(data=tmp_path, redis_url=None, worker=False)
    with running(settings) as http:
        http.register(job_of("j"))
        url = f"unix://{socket_path(tmp_path)}"
        store = WorkerStore(url, "w", keep_events=9, keep_steps=9)
        lease = store.acquire("j", ttl_s=60)
        assert lease is not None
        attempts = []

        def queue(pipe, keys):
            attempts.append(keys)
            if len(attempts) == 1:
                assert store.renew(lease, ttl_s=60)
            pipe.hset(keys.status, mapping=STATUS)

        store._fenced(lease, queue)
        assert len(attempts) == 2
        with pytest.raises(LeaseLostError):
            store._fenced(replace(lease, token=b"another"), queue)
