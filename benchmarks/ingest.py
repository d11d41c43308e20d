"""Ingest rate of one sidecar in microbatch records per second, and the lag of its worker.

    python -m benchmarks.ingest [--seconds 5] [--ranks 64] [--json PATH]

One `resihp serve` process with its own embedded Redis receives whole steps over HTTP from one
sender, one message per step (10,240 records with 64 ranks), as msgpack and as JSON. Two rates are
measured: records accepted into Redis (without a worker), and records through the whole pipeline
(accepted, applied by the detector, state saved; the clock stops when the backlog is empty). The lag
is measured at one step every 250 ms, from the answer to a message until the API shows its step. The
peer is a FastAPI app in the usual style, with one model per record, which validates the same JSON
and stores nothing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import urllib3

from resihp.client import Client
from resihp.contracts import Job, Layout, TelemetryBatch
from resihp.contracts.codec import WireFormat, encode
from resihp.formatting import duration
from service import Sidecar

from ._ingest_peer import serve_peer
from ._report import machine, print_table, write_json

_MICROBATCHES = 40
_STEPS = 400


def _job(ranks: int) -> Job:
    layout = Layout.grid(dp=max(1, ranks // 16), pp=4, tp=min(4, ranks // 4), layers=32)
    return Job(name="bench", layout=layout, microbatches=_MICROBATCHES * layout.dp)


def _steps(ranks: int) -> Iterator[TelemetryBatch]:
    """Healthy steps: forward and backward passes of 40 microbatches in two chunks on each rank."""
    rng = np.random.default_rng(0)
    rows = 4 * _MICROBATCHES
    for step in range(_STEPS):
        work = rng.lognormal(16.0, 0.5, _MICROBATCHES)
        rank = np.repeat(np.arange(ranks, dtype=np.int32), rows)
        microbatch = np.tile(np.repeat(np.arange(_MICROBATCHES, dtype=np.int32), 4), ranks)
        op = np.tile([0, 1, 0, 1], _MICROBATCHES * ranks)
        chunk = np.tile([0, 0, 1, 1], _MICROBATCHES * ranks)
        took = (2.0 + work[microbatch] * 1e-7) * (1 + op) * rng.normal(1.0, 0.01, rank.size)
        yield TelemetryBatch(
            rank=rank, step=np.full(rank.size, step), microbatch=microbatch, chunk=chunk, op=op,
            compute_ms=took, wait_ms=np.zeros(rank.size), tokens=np.full(rank.size, 8192),
            sequences=np.full(rank.size, 16), sum_sq_len=work[microbatch].astype(np.int64),
            max_len=np.full(rank.size, 4096),
        )  # fmt: skip


def _flood(
    client: Client, messages: list[bytes], form: WireFormat, seconds: float
) -> tuple[int, float]:
    """Number of messages accepted in sequence, and the seconds taken."""
    begun, sent = time.monotonic(), 0
    for message in messages:
        client.send_telemetry("bench", message, form)
        sent += 1
        if time.monotonic() - begun > seconds:
            break
    return sent, time.monotonic() - begun


def _backlog(url: str) -> int:
    return int(urllib3.request("GET", f"{url}/v1/jobs/bench").json()["backlog"])


def _drain(url: str, timeout_s: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_s
    while _backlog(url):
        if time.monotonic() > deadline:
            raise TimeoutError("the worker does not catch up")
        time.sleep(0.02)


def _wait_for_step(url: str, step: int, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while urllib3.request("GET", f"{url}/v1/jobs/bench").json()["last_step"] < step:
        if time.monotonic() > deadline:
            raise TimeoutError("the worker does not catch up")
        time.sleep(0.01)


def _rates(
    job: Job, messages: list[bytes], form: WireFormat, seconds: float, *, worker: bool
) -> tuple[float, float]:
    """Messages per second: accepted, and (with a worker) through the whole pipeline."""
    options = () if worker else ("--no-worker",)
    with tempfile.TemporaryDirectory() as folder, Sidecar(Path(folder), options=options) as sidecar:
        client = Client(sidecar.url, timeout=30)
        client.register(job)
        begun = time.monotonic()
        sent, took = _flood(client, messages, form, seconds)
        if worker:
            _drain(sidecar.url)
        whole = time.monotonic() - begun
        client.close()
    return sent / took, sent / whole


def _lags(job: Job, messages: list[bytes], count: int) -> list[float]:
    """Seconds from the answer to a message until the detector's status shows its step."""
    lags = []
    with tempfile.TemporaryDirectory() as folder, Sidecar(Path(folder)) as sidecar:
        client = Client(sidecar.url, timeout=30)
        client.register(job)
        time.sleep(1.5)  # until the worker has acquired the job
        for step, message in enumerate(messages[:count]):
            begun = time.monotonic()
            client.send_telemetry("bench", message, WireFormat.MSGPACK)
            answered = time.monotonic()
            _wait_for_step(sidecar.url, step)
            lags.append(time.monotonic() - answered)
            time.sleep(max(0.0, 0.25 - (time.monotonic() - begun)))
        client.close()
    return lags


def _peer_rate(batch: TelemetryBatch, seconds: float) -> float:
    """Messages per second of the peer, which accepts a list of records."""
    columns = json.loads(encode(batch, WireFormat.JSON))["columns"]
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    body = json.dumps({"records": rows}).encode()
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve_peer, args=(theirs,))
    process.start()
    try:
        url = f"http://127.0.0.1:{ours.recv()}/telemetry"
        pool = urllib3.PoolManager()
        headers = {"Content-Type": "application/json"}
        sent, begun = 0, time.monotonic()
        while time.monotonic() - begun < seconds:
            answer = pool.request("POST", url, body=body, headers=headers)
            if answer.status != 200:
                raise RuntimeError(f"the peer answered {answer.status}")
            sent += 1
        return sent / (time.monotonic() - begun)
    finally:
        process.terminate()
        process.join()


def measure(ranks: int, seconds: float) -> dict[str, Any]:
    """All figures, in records per second and in seconds."""
    job, batches = _job(ranks), list(_steps(ranks))
    size = len(batches[0])
    figures: dict[str, Any] = {"records_per_message": size, "seconds": seconds}
    for form in WireFormat:
        messages = [encode(batch, form) for batch in batches]
        accepted, _ = _rates(job, messages, form, seconds, worker=False)
        together, applied = _rates(job, messages, form, seconds, worker=True)
        figures[form.name.lower()] = {
            "bytes_per_message": len(messages[0]),
            "accepted_per_s": accepted * size,
            "accepted_with_worker_per_s": together * size,
            "applied_per_s": applied * size,
        }
    messages = [encode(batch) for batch in batches[:40]]
    lags = _lags(job, messages, 40)
    figures["lag_median_s"] = statistics.median(lags)
    figures["lag_max_s"] = max(lags)
    figures["peer_accepted_per_s"] = _peer_rate(batches[0], seconds) * size
    return figures


def main() -> None:
    """Measure, print, and write JSON on request."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    figures = measure(given.ranks, given.seconds)
    peer = figures["peer_accepted_per_s"]
    rows = [["one model per record, stores nothing (peer)", f"{peer:,.0f}", "1.0x", "-", "-"]]
    for form in ("json", "msgpack"):
        of = figures[form]
        rows.append([
            f"resihp {form}", f"{of['accepted_per_s']:,.0f}",
            f"{of['accepted_per_s'] / peer:.1f}x",
            f"{of['accepted_with_worker_per_s']:,.0f}", f"{of['applied_per_s']:,.0f}",
        ])  # fmt: skip
    columns = ["records/s", "accepted", "ratio", "accepted with worker", "applied and saved"]
    print(machine())
    print_table(f"{figures['records_per_message']:,} records per message", columns, rows)
    median_ms, worst_ms = 1e3 * figures["lag_median_s"], 1e3 * figures["lag_max_s"]
    print(f"\nlag at 4 messages/s: median {duration(median_ms)}, longest {duration(worst_ms)}")
    if given.json is not None:
        write_json(given.json, figures)


if __name__ == "__main__":
    main()
