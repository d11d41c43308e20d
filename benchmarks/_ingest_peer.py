"""Peer of the ingest benchmark: one pydantic model per record, as in most telemetry APIs."""

from __future__ import annotations

import json
import multiprocessing
import socket
import time
from multiprocessing.connection import Connection

import urllib3
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from resihp.contracts import TelemetryBatch
from resihp.contracts.codec import WireFormat, encode

from ._ingest_watch import spent_s


class Record(BaseModel):
    """One microbatch record."""

    rank: int
    step: int
    microbatch: int
    chunk: int
    op: int
    compute_ms: float
    wait_ms: float | None
    tokens: int
    sequences: int
    sum_sq_len: int
    max_len: int
    peer: int


class Message(BaseModel):
    """Records of a step."""

    records: list[Record]


def serve_peer(connection: Connection) -> None:
    """Serve until terminated; sends the port through the pipe."""
    app = FastAPI()

    @app.post("/telemetry")
    async def telemetry(message: Message) -> dict[str, int]:
        return {"accepted": len(message.records)}

    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    connection.send(listener.getsockname()[1])
    config = uvicorn.Config(app, log_level="warning", access_log=False)
    uvicorn.Server(config).run(sockets=[listener])


def peer_records_per_core_s(batches: list[TelemetryBatch], seconds: float) -> float:
    """Records per second of its processor time that the peer takes, sent these messages in turns
    for some seconds."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve_peer, args=(theirs,))
    process.start()
    assert process.pid is not None
    try:
        url = f"http://127.0.0.1:{ours.recv()}/telemetry"
        bodies = [_body(batch) for batch in batches]
        pool, headers = urllib3.PoolManager(), {"Content-Type": "application/json"}
        sent = number = 0
        before_s = begun_s = 0.0
        while not sent or time.monotonic() - begun_s < seconds:
            body, records = bodies[number % len(bodies)]
            answer = pool.request("POST", url, body=body, headers=headers)
            if answer.status != 200:
                raise RuntimeError(f"the peer answered {answer.status}")
            if number >= len(bodies):  # the first round warms it up
                sent += records
            else:
                begun_s, before_s = time.monotonic(), spent_s(process.pid)
            number += 1
        return sent / (spent_s(process.pid) - before_s)
    finally:
        process.terminate()
        process.join()


def _body(batch: TelemetryBatch) -> tuple[bytes, int]:
    columns = json.loads(encode(batch, WireFormat.JSON))["columns"]
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return json.dumps({"records": rows}).encode(), len(rows)
