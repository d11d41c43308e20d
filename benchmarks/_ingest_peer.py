"""Peer of the ingest benchmark: one pydantic model per record, as in most telemetry APIs."""

from __future__ import annotations

import socket
from multiprocessing.connection import Connection

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel


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

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    connection.send(listener.getsockname()[1])
    config = uvicorn.Config(app, log_level="warning", access_log=False)
    uvicorn.Server(config).run(sockets=[listener])
